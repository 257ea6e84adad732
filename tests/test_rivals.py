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
from mmdfw.samplers._chains import Draws, coordinate_names, nuts, sgld, warn_poor
from mmdfw.models._model import minibatches
from mmdfw.samplers._svgd import jitted_svgd, run_svgd, svgd, svgd_direction

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
    estimate, begin = minibatches(Logistic(2), *rows(), 7), logistic_start(Logistic(2))
    run = lambda seed, size=None: moved(estimate, begin, key=jax.random.key(seed), chunk_size=size).positions  # noqa: E731
    assert np.array_equal(run(1), run(1)) and not np.allclose(run(1), run(2))
    assert_close(run(1, 4), run(1), rtol=1e-10)  # in chunks: the same rows for all particles


def test_all_rows_as_a_minibatch_of_equal_rows(x64):
    "Where all rows are the same, every minibatch is the whole: SVGD on minibatches is SVGD."
    from mmdfw.models._model import posterior

    model, (x, y) = Logistic(2), rows()
    x, y = np.repeat(x[:1], 20, 0), np.repeat(y[:1], 20)
    some = moved(minibatches(model, x, y, 4), logistic_start(model), key=jax.random.key(3))
    assert_close(some.positions, moved(posterior(model, x, y), logistic_start(model)).positions, rtol=1e-9)


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
    shape, target = (
        jax.ShapeDtypeStruct((2000, 100), jnp.float32),
        jax.tree_util.Partial(lambda x: -0.5 * jnp.sum(x**2)),
    )
    run = lambda size: lambda x: run_svgd(target, x, 2, SGD, "median", None, size)  # noqa: E731
    assert largest(jax.make_jaxpr(run(None))(shape).jaxpr) == 2000**2
    assert largest(jax.make_jaxpr(run(50))(shape).jaxpr) == 2000 * 100
    used = jitted_svgd.lower(target, shape, 2, SGD, "median", None, 50).compile().memory_analysis().temp_size_in_bytes
    assert used < 4 * 10 * (50 * 2000 + 2000 * 100)


def test_two_thousand_particles_in_a_hundred_dimensions_run():
    found = svgd(lambda x: -0.5 * jnp.sum(x**2), points(2000, 100), 2, SGD, bandwidth=10.0, chunk_size=200)
    assert found.positions.shape == (2000, 100) and bool(jnp.all(jnp.isfinite(found.positions)))


def test_scores_that_are_not_finite_are_counted(x64):
    edge = lambda x: -0.5 * jnp.sum((x - 3.0) ** 2) + 1e-9 * jnp.sqrt(x[0])  # noqa: E731
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
        (lambda: svgd(lambda x, key: 0.0, points(), key=None), "a key only where key= is given"),
        (lambda: svgd(bell, points(), key=jax.random.key(0)), "one particle and a key"),
        (lambda: svgd(lambda x: x, points()), "one floating point number"),
        (lambda: svgd(nested_bell, {"a": jnp.ones((3, 2)), "b": jnp.ones(4)}), r"same leading axis.*\(4,\)"),
        (lambda: svgd(nested_bell, {"a": jnp.ones((3, 2), int), "b": jnp.ones(3)}), "must be floating point"),
        (lambda: svgd(bell, points(), chunk_size=2.5), "got 2.5"),
        (lambda: minibatches(Logistic(2), *rows(), 0), "batch_size must be a whole number of at least 1, got 0"),
    ],
)
def test_svgd_refuses(wrong, text):
    with pytest.raises(ValueError, match=text):
        wrong()


@pytest.mark.parametrize("platforms", [["cuda"], ["cpu", "cuda"]], ids="+".join)
def test_svgd_lowers_for_cuda(platforms):
    "Minibatches, chunks and the median rule, without a callback or a float64."
    with jax.enable_x64(False):
        estimate, layout_free = (
            minibatches(Logistic(2), *rows(), 7),
            lambda target, x, key: target({"weights": x[:2], "bias": x[2], "log_precision": x[3]}, key),
        )
        step = lambda x, data: run_svgd(
            lambda x, key: layout_free(estimate, x, key), x, 2, SGD, "median", jax.random.wrap_key_data(data), 4
        )  # noqa: E731
        made = export.export(jax.jit(step), platforms=platforms)(
            points(10, 4).astype(jnp.float32), jax.random.key_data(jax.random.key(0))
        )
    text = made.mlir_module()
    assert (
        made.platforms == tuple(platforms)
        and not re.findall(r"\w*callback\w*", text)
        and not re.findall(r"tensor<[^>]*f64>", text)
    )


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
    assert run.positions.shape == (600, 3) and run.draws.shape == (2, 300, 3) and run.evaluations > 1000
    error = (run.positions.mean(0) - 1.0) / (run.positions.std(0) / jnp.sqrt(run.ess))
    assert np.abs(error).max() < 4.5
    assert_close(run.positions.var(0), np.array([0.5, 2.0, 1.0]), rtol=0.5)


@quiet
def test_nuts_is_read_from_disk_and_only_where_nothing_changed(kept_folder, monkeypatch):
    first, files = small_nuts(kept_folder), len(list(kept_folder.iterdir()))
    import mmdfw.samplers._chains as module

    class Ran(Exception):
        pass

    def refuse(*_):
        raise Ran

    monkeypatch.setattr(module, "run_chains", refuse)
    assert (
        np.array_equal(small_nuts(kept_folder).positions, first.positions) and len(list(kept_folder.iterdir())) == files
    )
    for change in (
        dict(function=lambda x: bell(x + 1e-3)),
        dict(spread=0.2),
        dict(target_acceptance=0.9),
        dict(dense=True),
    ):
        with pytest.raises(Ran):
            small_nuts(kept_folder, **change)


def made_up(rhat, ess, divergences=0, num=2000):
    position = {"level": jnp.zeros(()), "slopes": jnp.zeros(2)}
    return Draws(
        None, jnp.zeros((num, 3)), np.array(rhat), np.array(ess), divergences, 0, np.ones(4), coordinate_names(position)
    )


@pytest.mark.parametrize(
    "draws, texts",
    [
        (made_up([1.0, 1.0, 1.009], [400.0, 401, 5000]), []),
        (
            made_up([1.0, 1.02, 1.5], [500.0] * 3),
            [r"R-hat is above 1.01 for 2 of 3 coordinates, worst for position\['slopes'\]\[1\] with 1.500"],
        ),
        (made_up([1.0, 1.02, 1.0], [500.0] * 3, num=100), []),  # chains of 25 draws differ by chance
        (
            made_up([1.0] * 3, [399.0, 500, 500]),
            [r"ESS is below 400 for 1 of 3 coordinates, worst for position\['level'\] with 399"],
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


@quiet
def test_sgld_counts_thins_and_repeats():
    estimate = minibatches(Logistic(2), *rows(), 7)
    start = {"weights": jnp.zeros(2), "bias": jnp.zeros(()), "log_precision": jnp.zeros(())}
    run = lambda **more: sgld(
        jax.random.key(0),
        estimate,
        start,
        optax.polynomial_schedule(1e-3, 1e-4, 1.0, 50),
        **(dict(num_draws=20, num_chains=2, num_warmup=10, thin=3) | more),
    )  # noqa: E731
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
        (lambda: sgld(jax.random.key(0), bell, jnp.zeros(3), 0.1), "one particle and a key"),
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
    inner = lambda data: lambda x: jnp.sum(jax.jit(lambda x: x @ data.T)(x))  # noqa: E731
    make = lambda data: (
        program_digest(lambda x: jnp.sum(x * data), jnp.ones(50))
        + program_digest(inner(jnp.asarray(data)), jnp.ones(50))
    )  # noqa: E731
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
        assert_close(result.mmd2, mmd2(result.kernel, result.positions, draws(), result.weights), rtol=0.05, atol=2e-6)


def test_compress_beats_thinning(compressed):
    thinned = float(mmd2(compressed["free"].kernel, draws()[::17][:12], draws()))
    assert compressed["free"].mmd2 <= compressed["grown"].mmd2 < thinned / 5 and compressed["pool"].mmd2 < thinned / 3


def test_compress_keeps_the_pytree(compressed):
    assert_close(compressed["tree"].positions, compressed["free"].positions, rtol=1e-4, atol=1e-4)
    assert {name: leaf.shape for name, leaf in compressed["tree"].particles.items()} == {"a": (12, 1, 2), "b": (12,)}


def test_a_pool_keeps_to_the_draws(compressed):
    apart = np.abs(np.asarray(compressed["pool"].positions)[:, None] - np.asarray(draws())).max(-1)
    assert (apart.min(1) == 0).all() and len(set(apart.argmin(1))) == 12  # and takes none twice


def test_one_particle():
    one = compress(jax.random.key(0), draws(), 1, refine=False)
    assert_close(one.mmd2, mmd2(one.kernel, one.positions, draws(), one.weights), rtol=1e-3)


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
