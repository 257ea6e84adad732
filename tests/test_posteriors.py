"""The posteriors benchmark: densities belong to their draws, children are cold, and what fails is told.

Where MMDFW_DATA names no folder with the posteriors, what needs the files is skipped.
"""

import json, os
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np, pooch, pytest

from mmdfw._checks import assert_close
from mmdfw.experiments import _bench_posteriors as bench, _framework as framework
from mmdfw.experiments._framework import Settings, Trial, as_json, Findings
from mmdfw.experiments._posteriors import POSTERIORS, Loaded, Problem, centre, stein_z
from mmdfw.experiments._shapes import SHAPES

THERE = Path(os.environ.get("MMDFW_DATA", "nowhere"), "posteriors").is_dir()
needs_files = pytest.mark.skipif(not THERE, reason="MMDFW_DATA does not name a folder with `posteriors`")
HEAVY = "eight_schools_centered"  # its scores have no mean: see the notebook
BY_IDENTITY = [name for name in SHAPES if name not in ("edge", "cox_process")]  # an edge breaks it; a run is slow here


# Densities


@needs_files
@pytest.mark.parametrize("name", [name for name in POSTERIORS if name != HEAVY])
def test_a_density_belongs_to_its_draws(name, x64):
    "Stein's identity on the reference draws: mean score 0, mean coordinate times score -1."
    data, draws = POSTERIORS[name].load()
    assert draws.shape == (10_000, POSTERIORS[name].dimension)
    assert np.abs(stein_z(POSTERIORS[name].bind(data), draws)).max() < 5


@needs_files
def test_a_wrong_density_is_found_out(x64):
    "A prior twice as wide, a variance for a standard deviation."
    data, draws = POSTERIORS["gp_regr"].load()
    right = POSTERIORS["gp_regr"].bind(data)
    assert np.abs(stein_z(lambda x: right(x) + 0.375 * (jnp.exp(x[1]) / 2) ** 2, draws)).max() > 5
    assert np.abs(stein_z(lambda x: right(x.at[2].multiply(2.0)), draws)).max() > 5


@needs_files
def test_both_forms_of_the_eight_schools_are_one_posterior(x64):
    "The densities differ by the Jacobian tau^8 at every draw, and the draws by the change of variables."
    own, moved = POSTERIORS["eight_schools_noncentered"], POSTERIORS[HEAVY]
    (data, draws), (_, there) = own.load(), moved.load()
    assert_close(there, centre(draws), 0)
    here = jax.vmap(own.bind(data))(jnp.asarray(draws[:100]))
    assert_close(jax.vmap(moved.bind(data))(jnp.asarray(there[:100])) + 8 * draws[:100, 9], here, 1e-9)


@needs_files
@pytest.mark.parametrize("name", POSTERIORS)
def test_a_density_is_finite_where_everybody_begins(name):
    "At zeros and at draws, with its slope, in float32."
    data, draws = POSTERIORS[name].load()
    points = jnp.concatenate([jnp.zeros((1, draws.shape[1])), jnp.asarray(draws[:20], jnp.float32)])
    values, slopes = jax.vmap(jax.value_and_grad(POSTERIORS[name].bind(data)))(points)
    assert values.dtype == jnp.float32 and np.isfinite(values).all() and np.isfinite(slopes).all()


@pytest.mark.parametrize("name", BY_IDENTITY)
def test_a_shape_belongs_to_its_draws(name, x64):
    data, draws = SHAPES[name].load()
    assert np.abs(stein_z(SHAPES[name].bind(data), draws)).max() < 5


def test_a_file_that_is_missing_is_left_out_unless_it_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("MMDFW_DATA", str(tmp_path))
    monkeypatch.setattr(pooch, "os_cache", lambda project: tmp_path / project)
    (part, *_) = bench.posterior_parts(Settings(only="arK"))
    assert "arK is not here" in part.run(Trial(0))["skipped"]
    with pytest.raises(FileNotFoundError, match="MMDFW_DATA"):
        part.run(Trial(0, Settings(only="arK")))


# The bench


@pytest.fixture
def small_problem(monkeypatch):
    "A standard normal with few draws."
    draws = np.random.default_rng(0).normal(size=(500, 2))
    log_p = lambda data, x: -0.5 * x @ x
    problem = Problem(999, ("a", "b"), log_p, lambda: Loaded(None, draws))
    monkeypatch.setitem(bench.PROBLEMS, "small", problem)
    yield draws
    bench.judge_of.cache_clear()


def test_the_judge_is_the_formula(small_problem):
    "MMD^2 written out in NumPy, with lengthscales from the sds and the median scaled distance."
    draws = small_problem
    scaled = draws / draws.std(0)
    distances = np.linalg.norm(scaled[:, None] - scaled, axis=-1)
    width = np.median(distances[np.triu_indices(500, 1)])
    k = lambda x, y: np.exp(-0.5 * (np.linalg.norm(x[:, None] - y, axis=-1) / width) ** 2)
    x = np.random.default_rng(1).normal(size=(7, 2))
    w = np.random.default_rng(2).dirichlet(np.ones(7))
    z = x / draws.std(0)
    by_hand = w @ k(z, z) @ w - 2 * (w @ k(z, scaled)).mean() + k(scaled, scaled).mean()
    found = bench.judged(bench.judge_of("small"), x, w)
    assert_close(found["mmd2"], by_hand, 1e-9)
    assert_close(found["mean_error"], np.abs((w @ x - draws.mean(0)) / draws.std(0)).max(), 1e-9)
    sd = np.sqrt(w @ (x - w @ x) ** 2)
    assert_close(found["sd_error"], np.abs(sd / draws.std(0) - 1).max(), 1e-9)


def test_a_crash_is_a_finding(small_problem, monkeypatch):
    "The bench goes on, with no figures and one line of error; it counts as infinitely bad."

    def crash(*asked):
        raise ChildProcessError("FloatingPointError: no")

    monkeypatch.setattr(bench, "run_alone", crash)
    parts = [part for part in bench.posterior_parts(Settings(only="small"))]
    trial = {part.number: part.run(Trial(0, Settings(only="small"))) for part in parts}
    assert trial[9993]["nuts_all"]["error"] == "FloatingPointError: no" and trial[9993]["nuts"]["mmd2"] is None
    found = Findings("posteriors", {}, tuple(parts), (trial,))
    monkeypatch.setitem(bench.SHAPES, "small", bench.PROBLEMS["small"])
    summary = bench.summarise_posteriors(found)
    ours = summary["shapes"]["small"]["mmdfw"]
    assert ours["mmd2"] is None and ours["worst_over_draws"] is None and ours["verdicts"] == [None]
    written = as_json(bench.EXPERIMENTS[0], Findings("posteriors", {}, summary=summary, made={}))
    json.dumps(written, allow_nan=False)
    assert bench.beaten(summary)[0].startswith("small: independent") and len(bench.rows_of(summary)) == 1
    figures = bench.draw_posteriors(Findings("posteriors", {}, summary=summary))
    assert set(figures) == {"mmd2", "seconds"}


def test_a_child_is_cold(monkeypatch):
    "Neither 64-bit floats nor compiled code nor a lazy compiler reach it, where times are meant."
    for name in framework.WARM:
        monkeypatch.setenv(name, "1")
    assert not set(framework.WARM) & set(framework.environment_of(quick=False))
    assert "JAX_ENABLE_X64" not in framework.environment_of(quick=True)


def test_an_error_of_a_child_is_its_last_line():
    with pytest.raises(ChildProcessError, match="KeyError: 'nobody'"):
        bench.run_alone("nobody", "svgd", jax.random.key(0), True)


@needs_files
def test_one_real_posterior_in_a_process_of_its_own():
    "Its files are found there, it runs in float32, and it finds what it finds here."
    key = jax.random.key(1)
    (there,) = bench.run_alone("arK", "svgd", key, True).values()
    data, _ = POSTERIORS["arK"].load()
    (here,) = bench.by_svgd(key, POSTERIORS["arK"].bind(jax.tree.map(jnp.asarray, data)), 7, True).values()
    assert there.positions.dtype == np.float32
    assert_close(there.positions, here.positions, 1e-3, atol=1e-3)
