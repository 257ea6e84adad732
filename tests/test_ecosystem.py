"""In from NumPyro, PyMC, ArviZ and BlackJAX, out to tables, data frames, xarray and ArviZ: one small fit for all."""

import warnings
from collections import namedtuple

import jax, jax.numpy as jnp, numpy as np, pytest

import mmdfw
from mmdfw._checks import assert_close
from mmdfw._draws import as_source
from mmdfw._later import EXTRAS
from mmdfw.samplers._chains import diagnose

numpyro = pytest.importorskip("numpyro")
xarray = pytest.importorskip("xarray")
dist = numpyro.distributions

KEY = jax.random.key(0)
HEIGHTS = np.array([1.2, 0.7, 1.9, 1.4, 0.8, 1.1], np.float32)


def measure(num, y=None):
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    numpyro.deterministic("twice", 2 * level)
    with numpyro.plate("rows", num):
        numpyro.sample("y", dist.Normal(level, noise), obs=y)


@pytest.fixture(scope="module")
def target():
    return mmdfw.from_numpyro(measure, 6, y=HEIGHTS)


@pytest.fixture(scope="module")
def result(target):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ten particles are few, and it says so
        return mmdfw.fit(KEY, target, num_particles=10, refine=False)


# In ------------------------------------------------------------------------------------------------


def test_particles_are_values_of_the_sites(result):
    assert set(result.particles) == {"level", "noise", "twice"} and np.all(result.particles["noise"] > 0)
    assert_close(result.particles["twice"], 2 * result.particles["level"], rtol=1e-6)
    assert abs(result.expectation(lambda sites: sites["level"]).mean - 1.13) < 0.15
    assert set(result.sample(KEY, 3)) == {"level", "noise", "twice"}


def test_new_data_are_drawn_by_weight(result):
    at_the_data = result.predictive(KEY, num_draws=200)
    assert at_the_data["y"].shape == (200, 6) and len(np.unique(at_the_data["twice"])) <= 10
    assert result.predictive(KEY, 9, num_draws=50)["y"].shape == (50, 9)
    share = np.asarray(result.weights) @ np.asarray(result.particles["twice"])
    assert abs(at_the_data["twice"].mean() - share) < 0.02


def test_a_saved_result_comes_back_by_its_sites(result, target, tmp_path):
    again = mmdfw.load(result.save(tmp_path / "model.npz"), target)
    assert_close(again.particles["noise"], result.particles["noise"], rtol=1e-6)
    with pytest.raises(ValueError, match="belongs to another target"):
        mmdfw.load(tmp_path / "model.npz", mmdfw.from_numpyro(measure, 6, y=2 * HEIGHTS))


def test_svgd_and_nuts_need_no_position(target):
    moved = mmdfw.svgd(target, num_steps=20, num_particles=8)
    assert moved.particles["noise"].shape == (8,) and np.all(moved.particles["noise"] > 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        draws = mmdfw.nuts(KEY, target, num_draws=20, num_warmup=20, num_chains=2)
    assert draws.draws["twice"].shape == (2, 20) and draws.names == ("level", "noise")


def test_a_position_may_be_given_by_its_sites(target):
    from mmdfw._target import as_target

    assert_close(as_target(target, {"level": jnp.zeros(()), "noise": jnp.ones(())}).start, [0.0, 0.0], atol=1e-6)


@pytest.mark.parametrize(
    "model, words",
    [
        (lambda: numpyro.sample("coin", dist.Bernoulli(0.5)), "site 'coin' is discrete"),
        (lambda: numpyro.param("w", 1.0), "site 'w' is a numpyro.param"),
        (lambda: None, "nothing to approximate"),
        (3, "model must be a function"),
    ],
)
def test_models_that_are_refused(model, words):
    with pytest.raises(ValueError, match=words):
        mmdfw.from_numpyro(model)


def test_pymc_model():
    pymc = pytest.importorskip("pymc")
    with pymc.Model() as model:
        level = pymc.Normal("level", 0.0, 2.0)
        pymc.Normal("y", level, pymc.HalfNormal("noise", 1.0), observed=HEIGHTS)
        pymc.Deterministic("twice", 2 * level)
    with jax.enable_x64(True):  # PyMC switches that on for good when it is imported: from_pymc does not
        target = mmdfw.from_pymc(model)
        moved = mmdfw.svgd(target, num_steps=20, num_particles=8)
        found = target.function.log_likelihoods(moved.particles)["y"]
    assert set(moved.particles) == {"level", "noise", "twice"} and np.all(moved.particles["noise"] > 0)
    level, noise = (np.asarray(moved.particles[name])[:, None] for name in ("level", "noise"))
    assert_close(found, -0.5 * ((HEIGHTS - level) / noise) ** 2 - np.log(noise) - 0.5 * np.log(2 * np.pi), rtol=1e-5)
    assert not jax.config.jax_enable_x64


DRAWS = {
    "mu": np.random.default_rng(0).normal(size=(4, 100)),
    "theta": np.random.default_rng(1).normal(size=(4, 100, 2)),
}
DATA = xarray.Dataset({"mu": (("chain", "draw"), DRAWS["mu"]), "theta": (("chain", "draw", "k"), DRAWS["theta"])})
State = namedtuple("State", "position logdensity")
CONTAINERS = {
    "dict": DRAWS,
    "data set": DATA,
    "data set, other axes first": DATA.transpose("k", "draw", "chain"),
    "tree": xarray.DataTree.from_dict({"posterior": DATA, "sample_stats": DATA[["mu"]]}),
    "states, draws first": State({name: np.swapaxes(a, 0, 1) for name, a in DRAWS.items()}, np.zeros((100, 4))),
    "states, chains first": State(DRAWS, np.zeros((4, 100))),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_draws_of_other_libraries(kind):
    source = as_source(CONTAINERS[kind], None)
    assert source.num_chains == 4 and source.layout.names == ("mu", "theta[0]", "theta[1]")
    assert_close(source.points[:, 1:], DRAWS["theta"].reshape(400, 2), rtol=1e-6)
    assert_close(source.rhat[0], diagnose(DRAWS["mu"][..., None])["rhat"][0], rtol=1e-4)


def test_inference_data_and_its_diagnostics():
    arviz = pytest.importorskip("arviz")
    if not arviz.__version__.startswith("0."):
        pytest.skip("ArviZ 1.x has trees alone")
    source = as_source(arviz.from_dict(DRAWS), None)
    assert_close(
        source.rhat, [arviz.rhat(DRAWS["mu"]), *(arviz.rhat(DRAWS["theta"][..., i]) for i in (0, 1))], rtol=1e-4
    )


def test_chains_are_recognised_and_kept():
    small = mmdfw.compress(KEY, CONTAINERS["tree"], 5, refine=False)
    assert set(small.particles) == {"mu", "theta"} and "4 chains" in small.embedding_name
    assert_close(small.run.source[0][0], diagnose(DRAWS["mu"][..., None])["rhat"][0], rtol=1e-4)
    assert small.to_datatree(50)["particles"].attrs["source_ess"].shape == (3,)


def test_numpyro_mcmc_without_its_deterministic_sites():
    mcmc = numpyro.infer.MCMC(numpyro.infer.NUTS(measure), num_warmup=10, num_samples=20, progress_bar=False)
    mcmc.run(KEY, 6, y=HEIGHTS)
    assert as_source(mcmc, None).layout.names == ("level", "noise")


# Out -----------------------------------------------------------------------------------------------


def test_summary_is_by_weight(result):
    told, w = result.summary(), np.asarray(result.weights, float)
    noise = np.asarray(result.particles["noise"], float)
    assert told.names == ("level", "noise", "twice") and list(told.columns)[:3] == ["mean", "error", "sd"]
    assert_close(told.row("noise")["mean"], w @ noise / w.sum(), rtol=1e-5)
    assert told.row("noise")["hdi 94% low"] > 0 and "noise" in repr(told)
    assert "<td>noise</td>" in result._repr_html_() and "10 particles" in result._repr_html_()


def test_data_frame(result):
    frame = result.to_dataframe()
    assert list(frame.columns) == ["level", "noise", "twice", "weight"] and len(frame) == 10


def test_tree_holds_draws_particles_likelihoods_and_data(result):
    tree = result.to_datatree(400)
    assert tree["posterior"]["noise"].shape == (1, 400) and tree["log_likelihood"]["y"].shape == (1, 400, 6)
    assert_close(tree["observed_data"]["y"].values, HEIGHTS)
    assert tree.attrs["verdict"] == result.verdict and tree.attrs["inference_library"] == "mmdfw"
    w = tree["particles"]["weight"].values
    assert_close(tree["posterior"]["level"].mean().item(), w @ tree["particles"]["level"].values, rtol=0.01)


def test_arviz_reads_it(result):
    "ArviZ 1.x takes the tree as it is, 0.23 by its own conversion."
    arviz = pytest.importorskip("arviz")
    import matplotlib.pyplot as plt

    tree = result.to_datatree(400)
    if arviz.__version__.startswith("0."):
        tree = arviz.InferenceData.from_datatree(tree)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table = arviz.summary(tree, var_names=["level", "noise"])
        assert list(table.index) == ["level", "noise"]
        assert abs(float(table["mean"].iloc[0]) - result.summary().row("level")["mean"]) < 0.05
        arviz.plot_pair(tree, var_names=["level", "noise"])
        arviz.plot_forest(tree, var_names=["level", "noise"])
        loo = arviz.loo(tree)
    assert np.isfinite(getattr(loo, "elpd_loo", getattr(loo, "elpd", np.nan)))
    plt.close("all")


def test_what_is_missing_names_its_extra(monkeypatch):
    monkeypatch.setitem(EXTRAS, "no_such_library", "nothing")
    from mmdfw._later import needed

    with pytest.raises(ModuleNotFoundError, match=r"plot needs no_such_library, .*: pip install 'mmdfw\[nothing\]'"):
        needed("no_such_library.part", "plot")
