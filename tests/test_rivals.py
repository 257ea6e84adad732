"""The rivals: SVGD as pytrees, in chunks and on minibatches; samplers, their warnings and their cache; compression."""

import re, warnings
import jax, jax.numpy as jnp, numpy as np, optax, pytest
from jax import export

from mmdfw._checks import assert_close
from mmdfw._compress import compress
from mmdfw._files import cached, fingerprint, program_digest
from mmdfw.kernels._kernel import RBF
from mmdfw.models._logistic import Logistic
from mmdfw._mmd import mmd2
from mmdfw._result import load
from mmdfw._target import as_target, layout_of
from mmdfw.models._model import posterior
from mmdfw.samplers._chains import Draws, jitted_draws, jitted_langevin, jitted_warm_up, nuts, sgld, warn_poor
from mmdfw.samplers._svgd import begin_svgd, jitted_advance, jitted_svgd, run_svgd, svgd, svgd_direction, target_like

SGD = optax.sgd(0.1)


def bell(x):
    return -0.5 * jnp.sum((x - 1.0) ** 2 / jnp.array([0.5, 2.0, 1.0], x.dtype))


def nested_bell(p):
    return bell(jnp.concatenate([p["a"].ravel(), p["b"][None]]))


def nested(x):
    return {"a": x[:, :2].reshape(-1, 1, 2), "b": x[:, 2]}


def points(num=12, d=3, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(num, d)), jnp.result_type(float))


def rows(num=60):
    return np.random.default_rng(1).normal(size=(num, 2)), (np.arange(num) % 2).astype(float)


def logistic(batch_size):
    return posterior(Logistic(2), *rows(), batch_size=batch_size)


LOGISTIC_START = {"weights": jnp.zeros(2), "bias": jnp.zeros(()), "log_precision": jnp.zeros(())}


# ---------------------------------------------------------------- SVGD


def moved(target, start, **more):
    return svgd(target, start, 10, SGD, 0.7, **more)  # one setting, so that compiled code is shared


def test_a_pytree_moves_as_its_vector_does(x64):
    flat, tree = moved(bell, points()), moved(nested_bell, nested(points()))
    assert_close(tree.positions, flat.positions, rtol=1e-12)
    assert_close(tree.particles["a"], np.asarray(flat.positions)[:, :2].reshape(-1, 1, 2), rtol=1e-12)
    assert flat.evaluations == tree.evaluations == 120 and not np.any(flat.rejected)


@pytest.mark.parametrize("chunk_size", [5, 6, 100])
def test_chunks_change_nothing(x64, chunk_size):
    assert_close(moved(bell, points(), chunk_size=chunk_size).positions, moved(bell, points()).positions, rtol=1e-12)


def test_chunks_with_a_lengthscale_for_each_dimension(x64):
    direction, h = jax.jit(svgd_direction, static_argnums=3), jnp.array([0.5, 1.0, 2.0])
    assert_close(direction(points(), -points(), h, 5), direction(points(), -points(), h), rtol=1e-12, atol=1e-15)


def logistic_start(model):
    return jax.jit(jax.vmap(model.sample_prior))(jax.random.split(jax.random.key(0), 6))


def test_minibatches_depend_on_the_key_alone(x64):
    target, begin = logistic(7), logistic_start(Logistic(2))
    run = lambda seed, size=None: moved(target, begin, key=jax.random.key(seed), chunk_size=size).positions
    assert np.array_equal(run(1), run(1)) and not np.allclose(run(1), run(2))
    assert_close(run(1, 4), run(1), rtol=1e-10)  # in chunks: the same rows for all particles


def test_all_rows_as_a_minibatch_of_equal_rows(x64):
    "Where all rows are the same, every minibatch is the whole: SVGD on minibatches is SVGD."
    model, (x, y) = Logistic(2), rows()
    target = posterior(model, np.repeat(x[:1], 20, 0), np.repeat(y[:1], 20), batch_size=4)
    some = moved(target, logistic_start(model), key=jax.random.key(3))
    assert_close(some.positions, moved(target, logistic_start(model)).positions, rtol=1e-9)


def test_a_function_of_a_position_and_a_key_is_a_target_that_draws(x64):
    target, begin, key = logistic(7), logistic_start(Logistic(2)), jax.random.key(4)
    by_hand = lambda params, key: target.estimate(params, key)
    assert_close(moved(by_hand, begin, key=key).positions, moved(target, begin, key=key).positions, rtol=1e-10)
    old = jax.random.PRNGKey(4)  # keys of the older kind are the same keys
    assert np.array_equal(moved(by_hand, begin, key=old).positions, moved(by_hand, begin, key=key).positions)


def test_a_target_is_taken_with_its_pytree_or_as_vectors(x64):
    target, begin = as_target(logistic(7)), logistic_start(Logistic(2))
    tree = moved(target, begin)
    flat = moved(target, jax.vmap(lambda p: jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(p)]))(begin))
    assert np.array_equal(tree.positions, flat.positions)
    assert_close(flat.particles["weights"], tree.particles["weights"], rtol=1e-15)


def test_pieces_are_the_whole(x64):
    target, start, unit = as_target(bell, jnp.zeros(3)), points(), optax.adam(1.0)
    piece = lambda state: jitted_advance(target, state, 5, unit, "median", rates=jnp.full(5, 0.1))
    whole = svgd(bell, start, 10, optax.adam(0.1))
    assert_close(piece(piece(begin_svgd(start, unit))).positions, whole.positions, rtol=1e-10)


def log_posterior(seed, softly):
    "A new function for each data set: NumPy arrays in a closure, and a function of JAX that brings its own derivative."
    x = np.random.default_rng(seed).normal(size=(30, 3)).astype(np.float32)
    y = x[:, 0] > 0
    return lambda w: jnp.sum(jnp.where(y, 0.0, -x @ w) + softly(x @ w)) - 0.5 * jnp.sum(w**2)


def log_posteriors():
    return [log_posterior(seed, jax.nn.log_sigmoid) for seed in range(20)]


def test_twenty_data_sets_compile_svgd_once():
    before, ends = jitted_svgd._cache_size(), []
    for function in log_posteriors():
        ends.append(np.asarray(svgd(function, points(5), 7, SGD).positions))
    assert jitted_svgd._cache_size() == before + 1
    assert len({end.tobytes() for end in ends}) == 20
    svgd(log_posterior(0, lambda x: -jnp.logaddexp(0.0, -x)), points(5), 7, SGD)
    assert jitted_svgd._cache_size() == before + 2  # other operations are another program


def test_twenty_data_sets_compile_svgd_on_minibatches_once():
    before, ends = jitted_svgd._cache_size(), []
    for seed in range(20):
        x = jnp.asarray(np.random.default_rng(seed).normal(size=(30, 3)), jnp.float32)
        draw = lambda w, key, x=x: -jnp.sum(jax.nn.softplus(x[jax.random.randint(key, (5,), 0, 30)] @ w)) - w @ w
        ends.append(np.asarray(svgd(draw, points(5), 7, SGD, key=jax.random.key(0)).positions))
    assert jitted_svgd._cache_size() == before + 1 and len({end.tobytes() for end in ends}) == 20


def test_direction_of_blackjax_to_twelve_digits(x64):
    import blackjax
    from blackjax.vi.svgd import rbf_kernel

    x, h = points(40, 3), 0.7
    theirs = blackjax.svgd(jax.grad(bell), optax.sgd(1.0), rbf_kernel, lambda state: state)
    step = jax.jit(theirs.step)(theirs.init(x, {"length_scale": 2 * h**2})).particles - x
    ours = jax.jit(lambda x: svgd_direction(x, jax.vmap(jax.grad(bell))(x), h, 16))(x)
    assert_close(ours, step, rtol=1e-12, atol=1e-12 * float(jnp.abs(step).max()))


def largest(jaxpr):
    "How many numbers the largest array of a program holds."
    inner = [
        getattr(sub, "jaxpr", sub)
        for eqn in jaxpr.eqns
        for value in eqn.params.values()
        for sub in (value if isinstance(value, tuple) else (value,))
    ]
    own = [int(np.prod(out.aval.shape)) for eqn in jaxpr.eqns for out in eqn.outvars]
    return max(own + [largest(sub) for sub in inner if hasattr(sub, "eqns")], default=0)


def test_memory_of_two_thousand_particles_in_a_hundred_dimensions():
    "O(chunk n + n d): no array is larger, and the compiler needs a few of that size."
    shape = jax.ShapeDtypeStruct((2000, 100), jnp.float32)
    target = as_target(lambda x: -0.5 * jnp.sum(x**2), jnp.zeros(100))
    run = lambda size: lambda x: run_svgd(target, x, 2, SGD, "median", None, size)
    assert largest(jax.make_jaxpr(run(None))(shape).jaxpr) == 2000**2
    assert largest(jax.make_jaxpr(run(50))(shape).jaxpr) == 2000 * (100 + 1)  # the kernel sums ride along as a column
    used = jitted_svgd.lower(target, shape, 2, SGD, "median", None, 50).compile().memory_analysis().temp_size_in_bytes
    assert used < 4 * 10 * (50 * 2000 + 2000 * 100)


def test_two_thousand_particles_in_a_hundred_dimensions_run():
    found = svgd(lambda x: -0.5 * jnp.sum(x**2), points(2000, 100), 2, SGD, bandwidth=10.0, chunk_size=200)
    assert found.positions.shape == (2000, 100) and bool(jnp.all(jnp.isfinite(found.positions)))


def test_scores_that_are_not_finite_are_counted(x64):
    edge = lambda x: -0.5 * jnp.sum((x - 3.0) ** 2) + 1e-9 * jnp.sqrt(x[0])
    with pytest.warns(UserWarning, match="scores were NaN or infinite and counted as zero, in 1 particles"):
        found = svgd(edge, jnp.array([[1.0, 0.0], [-0.05, 0.0]]), 30, optax.sgd(0.3), bandwidth=5.0)
    assert found.rejected[0] == 0 and 0 < found.rejected[1] < 30
    with pytest.raises(ValueError, match="1 of 2 particles never had a finite score"):
        svgd(edge, jnp.array([[1.0, 0.0], [-50.0, 0.0]]), 3, optax.sgd(0.01))
    with pytest.raises(ValueError, match="ended at NaN or infinity"):
        svgd(lambda x: -jnp.sum(x**4), points(5), 30, optax.sgd(10.0))


@pytest.mark.parametrize(
    "wrong, text",
    [
        (lambda: svgd(lambda x, key: 0.0, points(), key=None), r"a key only for minibatches; yours takes \(x, key\)"),
        (lambda: svgd(bell, points(), key=jax.random.key(0)), r"one position and a key; yours takes \(x\)"),
        (lambda: svgd(lambda x: x, points()), r"must return a scalar, got an array of shape \(3,\)"),
        (lambda: svgd(lambda x: 1, points()), "must return a floating point number, got dtype int"),
        (lambda: svgd(lambda x: -np.sum(np.exp(x)), points()), "must be written with jax.numpy"),
        (lambda: svgd(7, points()), "must be a function, got 7"),
        (lambda: svgd(lambda x, key: bell(x), points(), key=7), "key must be a random key, got 7"),
        (lambda: svgd(as_target(bell, jnp.zeros(3)), points(d=2)), r"the target has \('x\[0\]', 'x\[1\]', 'x\[2\]'\)"),
        (
            lambda: svgd(as_target(bell, jnp.zeros(3)), points(), key=jax.random.key(0)),
            "no rows to draw minibatches from",
        ),
        (lambda: svgd(nested_bell, {"a": jnp.ones((3, 2)), "b": jnp.ones(4)}), r"same leading axis.*\(4,\)"),
        (lambda: svgd(nested_bell, {"a": jnp.ones((3, 2), int), "b": jnp.ones(3)}), "must be floating point"),
        (lambda: svgd(bell, points(), chunk_size=2.5), "got 2.5"),
        (lambda: logistic(0), "batch_size must be a whole number of at least 1, got 0"),
    ],
)
def test_svgd_refuses(wrong, text):
    with pytest.raises(ValueError, match=text):
        wrong()


@pytest.mark.parametrize("platforms", [["cuda"], ["cpu", "cuda"]], ids="+".join)
def test_svgd_lowers_for_cuda(platforms):
    "Minibatches, chunks and the median rule, without a callback or a float64."
    with jax.enable_x64(False):
        target = target_like(logistic(7), layout_of(LOGISTIC_START), jax.random.key(0))
        step = lambda x, data: run_svgd(target, x, 2, SGD, "median", jax.random.wrap_key_data(data), 4)
        made = export.export(jax.jit(step), platforms=platforms)(
            points(10, 4).astype(jnp.float32), jax.random.key_data(jax.random.key(0))
        )
    text = made.mlir_module()
    assert made.platforms == tuple(platforms)
    assert not re.findall(r"\w*callback\w*", text) and not re.findall(r"tensor<[^>]*f64>", text)


# ---------------------------------------------------------------- samplers


def small_nuts(folder, function=bell, **more):
    return nuts(jax.random.key(0), function, jnp.zeros(3), 300, 2, 200, cache="test", folder=folder, **more)


@pytest.fixture(scope="module")
def kept_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


quiet = pytest.mark.filterwarnings("ignore:few effective draws", "ignore:the chains do not agree")


@quiet
def test_nuts_finds_a_gaussian(kept_folder):
    run = small_nuts(kept_folder)
    assert run.positions.shape == (600, 3) and run.draws.shape == (2, 300, 3)
    assert run.evaluations > 2000 and run.evaluations % 2 == 0  # a log density and a score for each integration step
    error = (run.positions.mean(0) - 1.0) / (run.positions.std(0) / jnp.sqrt(run.ess))
    assert np.abs(error).max() < 4.5
    off = run.positions.var(0) / np.array([0.5, 2.0, 1.0]) - 1
    assert np.abs(off).max() < 4.5 * np.sqrt(2 / run.ess.min())


@quiet
def test_nuts_is_read_from_disk_and_only_where_nothing_changed(kept_folder, monkeypatch):
    first, files = small_nuts(kept_folder), len(list(kept_folder.iterdir()))
    import mmdfw.samplers._chains as module

    class Ran(Exception):
        pass

    def refuse(*_, **__):
        raise Ran

    monkeypatch.setattr(module, "run_chains", refuse)
    same = [small_nuts(kept_folder, function) for function in (bell, lambda x: bell(x), as_target(bell, jnp.zeros(3)))]
    assert all(np.array_equal(one.positions, first.positions) for one in same)
    assert len(list(kept_folder.iterdir())) == files
    for change in (
        dict(function=lambda x: bell(x + 1e-3)),
        dict(function=lambda x, shift=np.full(3, 1e-3): bell(x + shift)),
        dict(function=lambda x, shift=np.full(3, 2e-3): bell(x + shift)),
        dict(spread=0.2),
        dict(target_acceptance=0.9),
        dict(dense=True),
    ):
        with pytest.raises(Ran):
            small_nuts(kept_folder, **change)


@quiet
def test_draws_on_disk_know_the_data(tmp_path):
    "Two data sets in one form: the operations are the same, the data are not."
    for scale in (np.ones(3, np.float32), np.ones(3, np.float32), np.full(3, 2.0, np.float32)):
        function = lambda x, scale=scale: -0.5 * jnp.sum((x / scale) ** 2)
        nuts(jax.random.key(0), function, jnp.zeros(3), 4, 2, 5, cache="data", folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


@quiet
def test_twenty_data_sets_compile_nuts_once():
    sizes = lambda: (jitted_warm_up._cache_size(), jitted_draws._cache_size())
    before, ends = sizes(), []
    for function in log_posteriors():
        ends.append(np.asarray(nuts(jax.random.key(0), function, jnp.zeros(3), 4, 2, 5).positions))
    assert sizes() == (before[0] + 1, before[1] + 1)
    assert len({end.tobytes() for end in ends}) == 20


@quiet
def test_a_target_brings_its_start():
    settings = dict(num_draws=4, num_chains=2, num_warmup=5)
    key, target = jax.random.key(0), as_target(log_posteriors()[0], jnp.zeros(3))
    assert np.array_equal(
        nuts(key, target, **settings).positions, nuts(key, target, jnp.zeros(3), **settings).positions
    )
    rows_target = as_target(logistic(7), LOGISTIC_START)
    left_out, given = sgld(key, rows_target, None, 1e-3, 4, 2, 5), sgld(key, logistic(7), LOGISTIC_START, 1e-3, 4, 2, 5)
    assert np.array_equal(left_out.positions, given.positions)


@quiet
def test_twenty_data_sets_compile_sgld_once():
    before = jitted_langevin._cache_size()
    for seed in range(20):
        y = jnp.asarray(np.random.default_rng(seed).normal(size=30), jnp.float32)
        draw = lambda level, key, y=y: -15.0 * jnp.mean((y[jax.random.randint(key, (5,), 0, 30)] - level) ** 2)
        sgld(jax.random.key(0), draw, jnp.zeros(()), 1e-3, 4, 2, 5)
    assert jitted_langevin._cache_size() == before + 1


@quiet
def test_evaluations_of_nuts_are_log_densities_and_scores(monkeypatch):
    "Two for each integration step, for the first state of each chain, and for the look at its start."
    import mmdfw.samplers._chains as module

    steps, whole = [], module.jitted_draws
    monkeypatch.setattr(module, "jitted_draws", lambda *given: [out := whole(*given), steps.append(out[1][2].sum())][0])
    warm = module.jitted_warm_up
    monkeypatch.setattr(module, "jitted_warm_up", lambda *given: [out := warm(*given), steps.append(out[2].sum())][0])
    run = nuts(jax.random.key(0), bell, jnp.zeros(3), 20, 2, 10)
    assert run.evaluations == 2 * (int(sum(steps)) + 2)


def made_up(rhat, ess, divergences=0, num=2000):
    names = layout_of({"level": jnp.zeros(()), "slopes": jnp.zeros(2)}).names
    return Draws(None, jnp.zeros((num, 3)), np.array(rhat), np.array(ess), divergences, 0, np.ones(4), names)


@pytest.mark.parametrize(
    "draws, texts",
    [
        (made_up([1.0, 1.0, 1.009], [400.0, 401, 5000]), []),
        (
            made_up([1.0, 1.02, 1.5], [500.0] * 3),
            [r"R-hat is above 1.01 for 2 of 3 coordinates, worst for slopes\[1\] with 1.500"],
        ),
        (made_up([1.0, 1.02, 1.0], [500.0] * 3, num=100), []),  # chains of 25 draws differ by chance
        (
            made_up([1.0] * 3, [399.0, 500, 500]),
            [r"ESS is below 400 for 1 of 3 coordinates, worst for level with 399"],
        ),
        (
            made_up([np.nan, 1.0, 1.0], [500.0, 500, np.nan], 3),
            ["R-hat is above 1.01 for 1 of 3", "ESS is below 400 for 1 of 3", "3 of 2000 draws diverged"],
        ),
    ],
)
def test_poor_draws_are_named(draws, texts):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_poor(draws)
    assert len(caught) == len(texts) and all(re.search(text, str(w.message)) for text, w in zip(texts, caught))
    assert all(w.filename == __file__ for w in caught)  # the user's line, not ours


def test_poor_draws_point_at_the_line_that_asked():
    with pytest.warns(UserWarning, match="few effective draws") as caught:
        nuts(jax.random.key(0), bell, jnp.zeros(3), 20, 2, 10)
    assert all(w.filename == __file__ for w in caught)


@quiet
def test_sgld_counts_thins_and_repeats():
    run = lambda **more: sgld(
        jax.random.key(0),
        logistic(7),
        LOGISTIC_START,
        optax.polynomial_schedule(1e-3, 1e-4, 1.0, 50),
        **(dict(num_draws=20, num_chains=2, num_warmup=10, thin=3) | more),
    )
    one = run()
    assert one.draws["weights"].shape == (2, 20, 2) and one.evaluations == 2 * 70 and one.divergences == 0
    assert np.array_equal(one.positions, run().positions)
    every = run(thin=1)
    assert_close(one.draws["weights"][:, :6], every.draws["weights"][:, 2::3], rtol=1e-5)
    assert_close(one.step_size, np.full(2, 1e-4), rtol=1e-5)


@pytest.mark.parametrize(
    "wrong, text",
    [
        (
            lambda: nuts(jax.random.key(0), bell, jnp.zeros(3), 3),
            "num_draws must be a whole number of at least 4, got 3",
        ),
        (lambda: nuts(jax.random.key(0), bell, jnp.array([0.0, jnp.inf, 0.0])), "position must be finite"),
        (
            lambda: nuts(jax.random.key(0), bell, jnp.zeros(3), spread=-1.0),
            "spread must be a finite number of at least zero, got -1.0",
        ),
        (lambda: nuts(jax.random.key(0), lambda x: jnp.log(x[0]), jnp.zeros(3) - 9), "not finite where chains"),
        (lambda: nuts(jax.random.key(0), bell, jnp.zeros(3), cache="a/b"), "got 'a/b'"),
        (lambda: sgld(jax.random.key(0), lambda x, key: bell(x), jnp.zeros(3), 0.0), "step_size must be positive"),
        (
            lambda: sgld(jax.random.key(0), lambda x, key: bell(x), jnp.zeros(3), 9.0, 50, 2, 500),
            "step_size, 9 at first, is too large",
        ),
        (lambda: sgld(jax.random.key(0), bell, jnp.zeros(3), 0.1), r"one position and a key; yours takes \(x\)"),
        (lambda: sgld(jax.random.key(0), lambda x, key: bell(x), jnp.zeros(3)), "step_size must be .* got None"),
        (lambda: sgld(jax.random.key(0), as_target(bell, jnp.zeros(3)), None, 0.1), "no rows to draw minibatches from"),
        (lambda: sgld(0, lambda x, key: bell(x), jnp.zeros(3), 0.1), "key must be a random key, got 0"),
        (lambda: nuts(0, bell, jnp.zeros(3)), "key must be a random key, got 0"),
        (lambda: nuts(jax.random.split(jax.random.key(0)), bell, jnp.zeros(3)), r"got \(2,\) of them"),
        (lambda: nuts(jax.random.key(0), bell), "needs a position"),
        (lambda: nuts(jax.random.key(0), logistic(7)), "the target has no start: give a position"),
        (lambda: nuts(jax.random.key(0), lambda x: -np.sum(np.exp(x)), jnp.zeros(3)), "written with jax.numpy"),
        (lambda: nuts(jax.random.key(0), lambda x: x, jnp.zeros(3)), "must return a scalar"),
    ],
)
def test_samplers_refuse(wrong, text):
    with pytest.raises(ValueError, match=text):
        wrong()


# ---------------------------------------------------------------- the cache


def counted():
    def compute():
        compute.calls += 1
        return {"a": np.arange(5), "b": jnp.ones((2, 2)), "c": 1.5}

    compute.calls = 0
    return compute


def test_cache_hits(tmp_path):
    compute = counted()
    first, second = (cached("x", {"n": 1, "rows": np.ones(3)}, compute, tmp_path) for _ in range(2))
    assert (
        compute.calls == 1
        and all(np.array_equal(first[k], second[k]) and first[k].dtype == second[k].dtype for k in first)
        and set(first) == set(second)
    )


def test_cache_knows_other_settings(tmp_path):
    compute = counted()
    for name, settings in (
        ("x", {"n": 1}),
        ("x", {"n": 2}),
        ("y", {"n": 1}),
        ("x", {"n": np.ones(2)}),
        ("x", {"n": np.ones(3)}),
        ("x", {"n": jax.random.key(1)}),
    ):
        cached(name, settings, compute, tmp_path)
    assert compute.calls == 6 == len(list(tmp_path.iterdir()))
    with pytest.raises(ValueError, match="got <function"):
        fingerprint("x", {"f": bell})
    with pytest.raises(ValueError, match="got '..'"):
        cached("..", {}, compute, tmp_path)


@pytest.mark.parametrize(
    "harm",
    [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: data[:150] + b"\x00" * 40 + data[190:]],
    ids=["cut", "empty", "overwritten"],
)
def test_a_damaged_file_is_made_again(tmp_path, harm):
    compute = counted()
    cached("x", {}, compute, tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(harm(path.read_bytes()))
    with pytest.warns(UserWarning, match="is damaged"):
        again = cached("x", {}, compute, tmp_path)
    assert compute.calls == 2 and np.array_equal(again["a"], np.arange(5))
    cached("x", {}, compute, tmp_path)
    assert compute.calls == 2


def test_a_file_of_other_settings_is_not_taken(tmp_path):
    compute = counted()
    cached("x", {"n": 1}, compute, tmp_path)
    (one,) = tmp_path.iterdir()
    cached("x", {"n": 2}, compute, tmp_path)
    (two,) = set(tmp_path.iterdir()) - {one}
    two.write_bytes(one.read_bytes())
    with pytest.warns(UserWarning, match="other settings"):
        cached("x", {"n": 2}, compute, tmp_path)
    assert compute.calls == 3


def test_a_failed_computation_leaves_nothing(tmp_path):
    def fail():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        cached("x", {}, fail, tmp_path)
    assert not list(tmp_path.iterdir())


def test_folder_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("MMDFW_CACHE", str(tmp_path / "there"))
    cached("x", {}, counted())
    assert len(list((tmp_path / "there").iterdir())) == 1


def test_programs_differ_where_their_constants_do():
    data = np.random.default_rng(0).normal(size=(200, 50))
    other = data.copy()
    other[150, 20] += 1.0
    inner = lambda data: lambda x: jnp.sum(jax.jit(lambda x: x @ data.T)(x))
    make = lambda data: (
        program_digest(lambda x: jnp.sum(x * data), jnp.ones(50))
        + program_digest(inner(jnp.asarray(data)), jnp.ones(50))
    )
    one, same, different = make(data), make(data.copy()), make(other)
    assert one == same and one[:64] != different[:64] and one[64:] != different[64:]


# ---------------------------------------------------------------- compression


def draws(num=200):
    return jnp.asarray(np.random.default_rng(2).normal(size=(num, 3)) * [1.0, 2.0, 0.5], jnp.float32)


@pytest.fixture(scope="module")
def compressed():
    with jax.enable_x64(False):
        made = {
            name: compress(jax.random.key(0), draws(), 12, **more)
            for name, more in {
                "free": dict(max_refinement_steps=50),
                "grown": dict(refine=False),
                "pool": dict(points="pool"),
            }.items()
        }
        made["tree"] = compress(jax.random.key(0), nested(draws()), 12, max_refinement_steps=50)
    return made


def test_compress_says_the_truth(compressed):
    for result in compressed.values():
        assert len(result) == 12 == result.history.count[-1]
        assert_close(
            result.discrepancy,
            mmd2(result.parts.kernel, result.positions, draws(), result.weights),
            rtol=0.05,
            atol=2e-6,
        )


def test_compress_beats_thinning(compressed):
    "In its own kernel, which has narrow scales too, and by far in the wide one that a stranger would take."
    thin, free, grown, pool = draws()[::17][:12], *(compressed[name] for name in ("free", "grown", "pool"))
    own = float(mmd2(free.parts.kernel, thin, draws()))
    assert free.discrepancy <= grown.discrepancy < own / 2 and pool.discrepancy < own / 2
    wide = RBF(2.6)  # the median distance
    of = lambda one: float(mmd2(wide, one.positions, draws(), one.weights))
    assert max(map(of, (free, grown, pool))) < float(mmd2(wide, thin, draws())) / 10


def test_compress_keeps_the_pytree(compressed):
    assert_close(compressed["tree"].positions, compressed["free"].positions, rtol=1e-4, atol=1e-4)
    assert {name: leaf.shape for name, leaf in compressed["tree"].particles.items()} == {"a": (12, 1, 2), "b": (12,)}


def test_a_pool_keeps_to_the_draws(compressed):
    apart = np.abs(np.asarray(compressed["pool"].positions)[:, None] - np.asarray(draws())).max(-1)
    assert (apart.min(1) == 0).all() and len(set(apart.argmin(1))) == 12  # and takes none twice


def test_one_particle():
    one = compress(jax.random.key(0), draws(), 1, refine=False)
    assert_close(one.discrepancy, mmd2(one.parts.kernel, one.positions, draws(), one.weights), rtol=1e-3)


def test_units_do_not_matter():
    "Standard deviations of 100, 1 and 0.01: fifty particles keep every mean and every standard deviation."
    y = np.random.default_rng(3).normal(size=(2000, 3)).astype(np.float32) * np.array([100, 1, 0.01], np.float32)
    for points in ("free", "pool"):
        small = compress(jax.random.key(0), y, 50, points=points)
        x, w = np.asarray(small.positions, float), np.asarray(small.weights, float)
        assert w.min() >= 0 and abs(w.sum() - 1) < 1e-5
        assert (np.abs(w @ x - y.mean(0)) < 0.05 * y.std(0)).all(), points
        assert (np.abs(np.sqrt(w @ (x - w @ x) ** 2) / y.std(0) - 1) < 0.05).all(), points


# One setting, and draws of three numbers, for the tests below, so that compiled code is shared.
TWELVE = dict(num_particles=12, pool_size=1000, num_landmarks=512, max_refinement_steps=30)


def test_bounds_are_kept():
    "Shares of a rate, and waiting times: no particle leaves the range of the draws, few or many, added or not."
    rng = np.random.default_rng(4)
    for num in (800, 17_000):
        columns = [rng.exponential(size=num), rng.beta(0.5, 0.5, size=num), -0.01 * rng.exponential(size=num)]
        y = np.stack(columns, 1).astype(np.float32)
        small = compress(jax.random.key(0), y, **TWELVE)
        for x in (small.positions, small.add(2).positions):
            assert (x >= y.min(0)).all() and (x <= y.max(0)).all(), num


def test_the_report_says_what_is_known_of_the_draws():
    "Nothing without chains or a target; R-hat and ESS with chains; Stein's identities with a target; weights mend."
    y = np.random.default_rng(5).normal(size=(4, 200, 3)).astype(np.float32)
    make = lambda draws, **more: compress(jax.random.key(0), draws, **TWELVE, **more)
    log_normal = lambda x: -jnp.sum(x**2) / 2
    assert "unchecked" in make(y.reshape(-1, 3)).report()
    report = make(y, target=log_normal).report()
    assert "R-hat" in report and "effective draws" in report and "draws: mean score" in report
    with pytest.warns(UserWarning, match="the chains do not agree"):
        assert make(y + np.array([0, 0, 0, 4.0], np.float32)[:, None, None]).verdict == "failed"
    wide = 1.4 * y.reshape(-1, 3)
    with pytest.warns(UserWarning, match="not of this target"):
        assert make(wide, target=log_normal).verdict != "trusted"
    mended = make(wide, target=log_normal, debias=True)
    assert mended.verdict == "trusted"
    assert_close(np.sqrt(mended.weights @ mended.positions**2), np.ones(3), atol=0.1)


def test_many_draws_are_kept_by_landmarks():
    "What is said of MMD^2 is true of all draws in float32, and means are theirs to a fiftieth of a standard deviation."
    y = np.random.default_rng(6).normal(size=(17_000, 3)).astype(np.float32) * np.array([1, 5, 1e-2], np.float32)
    small = compress(jax.random.key(0), y, **TWELVE)
    with jax.enable_x64(True):
        truth = mmd2(small.parts.kernel, *(np.asarray(each, float) for each in (small.positions, y, small.weights)))
    assert_close(small.discrepancy, truth, rtol=0.05, atol=4 * float(small.parts.embedding.integral_error) + 2e-6)
    assert_close(small.weights @ small.positions / y.std(0), y.mean(0) / y.std(0), atol=0.02)
    assert "landmarks" in small.report()


def test_what_was_compressed_by_landmarks_comes_back_from_its_file(tmp_path):
    y = np.random.default_rng(7).normal(size=(17_000, 3)).astype(np.float32)
    small = compress(jax.random.key(0), y, **TWELVE)
    again = load(small.save(tmp_path / "small.npz"))
    assert np.array_equal(again.positions, small.positions) and again.report() == small.report()
    more = small.add(2).positions
    assert np.array_equal(again.add(2).positions, more) and (more <= y.max(0)).all() and (more >= y.min(0)).all()


@pytest.mark.parametrize(
    "wrong, text",
    [
        (lambda: compress(jax.random.key(0), draws(), 0), "num_particles must be a whole number of at least 1, got 0"),
        (lambda: compress(jax.random.key(0), draws(5), 6), "at most the number of draws, 5, got 6"),
        (
            lambda: compress(jax.random.key(0), draws().at[7, 1].set(jnp.nan)),
            r"draws holds NaN or infinite entries in rows \[7\]",
        ),
        (lambda: compress(jax.random.key(0), draws()[0]), r"draws must be an \(n, d\) array"),
        (lambda: compress(jax.random.key(0), {"a": jnp.ones((3, 2)), "b": jnp.ones(4)}), "same leading axis"),
        (lambda: compress(jax.random.key(0), draws(), 5, weights=jnp.ones(3)), r"weights must have shape \(200,\)"),
        (lambda: compress(jax.random.key(0), draws(), 5, weights=-jnp.ones(200)), "the smallest is -1.0"),
        (lambda: compress(jax.random.key(0), draws(), 5, points="grid"), "got 'grid'"),
        (lambda: compress(jax.random.key(0), draws(), 5, kernel=RBF(jnp.ones(2))), "the points have 3 dimensions"),
        (
            lambda: compress(jax.random.key(0), draws(), 5, pool_size=0),
            "pool_size must be a whole number of at least 1, got 0",
        ),
        (
            lambda: compress(jax.random.key(0), draws(), 5, pool_size=3, points="pool"),
            "pool_size=3 leaves 3 draws to take 5 particles from",
        ),
    ],
)
def test_compress_refuses(wrong, text):
    with pytest.raises(ValueError, match=text):
        wrong()
