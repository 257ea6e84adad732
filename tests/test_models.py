"""Models on data: unbiased minibatches, chunks, devices, CUDA, and the call that fits, saves and goes on."""

import itertools, json, os, pickle, re, subprocess, sys, tokenize, zipfile
from dataclasses import dataclass, replace
import jax, jax.numpy as jnp, numpy as np, optax, pytest
from flax import nnx
from test_gpu import PLATFORMS, assert_sound, lowered

from mmdfw import _loop
from mmdfw._checks import assert_close
from mmdfw._files import digest_arrays
from mmdfw._fit_model import fit_model
from mmdfw._loop import Components, init, problem_of, step
from mmdfw._result import load
from mmdfw._saved import FORMAT, read_header
from mmdfw._target import Score, as_target, ravel
from mmdfw.embeddings._embedding import ParticleEmbedding
from mmdfw.kernels._kernel import IMQ, RBF
from mmdfw.kernels._stein_kernel import Stein
from mmdfw.models._bnn import all_outputs, bnn, mlp
from mmdfw.models._outcomes import Bernoulli, NoisyGaussian, Poisson, Softmax
from mmdfw.models._logistic import Logistic
from mmdfw.models._model import Model, draw_rows, minibatch_logdensity, posterior
from mmdfw.models._predictive import GaussianPredictive
from mmdfw.models._scores import classification_scores, regression_scores
from mmdfw.oracles._batches import BatchOracle
from mmdfw.oracles._oracle import GradientOracle, NearParticles
from mmdfw.oracles._walks import WalkOracle
from mmdfw.steps._quadrature import Quadrature
from mmdfw.steps._step import ConstantStep


@dataclass(frozen=True)
class Line(Model):
    "y = slope x + known noise, slope ~ N(0, 1): its posterior is known, and it compiles fast."

    noise: float = 0.5

    def sample_prior(self, key):
        return {"slope": jax.random.normal(key)}

    def log_prior(self, params):
        return -0.5 * params["slope"] ** 2

    def log_likelihood(self, params, x, y):
        return -0.5 * ((y - params["slope"] * x[:, 0]) / self.noise) ** 2

    def predict(self, particles, weights, x):
        means = particles["slope"][:, None] * x[:, 0]
        return GaussianPredictive(means, jnp.full((len(means), 1), self.noise, means.dtype), weights)


KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 2))
Y = 1.7 * X[:, 0] + 0.5 * RNG.normal(size=40)
LABELS = (Y > 0).astype(float)
LENGTHS = dict(
    particles_per_step=5, first_steps=200, later_steps=100, batch_size=100, learning_rate=0.05, later_rate=0.05
)
SHORT = LENGTHS | dict(walk=False)  # what climbs by itself; walkers have tests of their own
MODELS = {"logistic": (Logistic(2), LABELS), "network": (mlp(2, (3,), jnp.tanh), Y)}


def draw_params(model, dtype=float):
    "Parameters without the model's own sampler, which takes long to compile."
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda leaf: jnp.asarray(0.5 * rng.normal(size=leaf.shape), dtype),
        jax.eval_shape(model.sample_prior, jax.random.key(0)),
    )


def assert_near(actual, expected, rtol):
    assert_close(actual, expected, rtol=rtol, atol=rtol * float(np.max(np.abs(expected))))


def value_and_score(f, params):
    return (lambda out: jnp.concatenate([out[0][None], ravel(out[1])]))(jax.value_and_grad(f)(params))


def fit_line(num_particles=5, key=KEY, **options):
    return fit_model(key, Line(), X, Y, **(SHORT | dict(num_particles=num_particles) | options))


def plain(model, x, y):
    "The log posterior as one sum."
    x, y = jnp.asarray(x, float), jnp.asarray(y, float)
    return lambda params: model.log_prior(params) + jnp.sum(model.log_likelihood(params, x, y))


# Minibatches are unbiased ---------------------------------------------------------------------------------------------


def batch_values(model, y, rows, num_rows):  # -> (batches, 1 + d), (1 + d,)
    "Value and score of the log density on each batch of rows, and on all of them."
    params, x, y = draw_params(model), jnp.asarray(X, float), jnp.asarray(y, float)

    def one(r):
        return value_and_score(lambda p: minibatch_logdensity(model, p, x[r], y[r], num_rows), params)

    return jax.jit(lambda rows: (jax.vmap(one)(rows), value_and_score(plain(model, x, y), params)))(rows)


@pytest.mark.parametrize("name", list(MODELS))
def test_mean_over_all_batches_of_one_row(name, x64):
    model, y = MODELS[name]
    each, whole = batch_values(model, y, jnp.arange(40)[:, None], 40)
    assert_near(jnp.mean(each, 0), whole, 1e-12)
    assert float(jnp.max(jnp.std(each, 0))) > 1  # single batches are far from it
    unscaled, _ = batch_values(model, y, jnp.arange(40)[:, None], 1)
    with pytest.raises(AssertionError):
        assert_near(jnp.mean(unscaled, 0), whole, 1e-3)


@pytest.mark.parametrize("name", list(MODELS))
def test_mean_over_random_batches(name, x64):
    model, y = MODELS[name]
    rows, num = draw_rows(jax.random.key(1), 40, (4000, 8)), 4000
    each, whole = batch_values(model, y, rows, 40)
    error = jnp.std(each, 0) / np.sqrt(num) + 1e-12 * jnp.max(
        jnp.abs(whole)
    )  # the prior's own coordinates have no noise
    assert jnp.all(jnp.abs(jnp.mean(each, 0) - whole) < 4 * error)
    unscaled, _ = batch_values(model, y, rows, 8)
    assert jnp.any(jnp.abs(jnp.mean(unscaled, 0) - whole) > 40 * error)


def test_rows_are_drawn_from_all_rows():
    counts = np.bincount(np.asarray(draw_rows(KEY, 7, (70_000,))), minlength=7)
    assert len(counts) == 7 and np.all(np.abs(counts - 10_000) < 5 * np.sqrt(10_000))


# Chunks ---------------------------------------------------------------------------------------------------------------

SIZES = (1, 7, 39, 5000)  # 40 rows


@pytest.mark.parametrize("name", list(MODELS))
def test_chunks_change_nothing(name, dtype):
    model, y = MODELS[name]
    params = draw_params(model, dtype)
    targets = [posterior(model, X, y, size) for size in SIZES]
    assert [t.x.shape[1] for t in targets] == [min(size, 40) for size in SIZES]
    expected, *found = jax.jit(
        lambda targets, p: jnp.stack([value_and_score(t, p) for t in (plain(model, X, y), *targets)])
    )(targets, params)
    assert expected.dtype == dtype
    for values in found:
        assert_near(values, expected, 1e-12 if dtype == "float64" else 1e-5)


def test_padding_counts_for_nothing(x64):
    target, params = posterior(Line(), X, Y, 7), {"slope": jnp.asarray(0.3)}
    assert target.x.shape == (6, 7, 2)
    assert_close(target(params), plain(Line(), X, Y)(params), rtol=1e-12)
    assert (
        abs(float(replace(target, mask=jnp.ones_like(target.mask))(params) - target(params))) > 1e-3
    )  # the mask is what does it
    poisoned = replace(target, y=jnp.where(target.mask > 0, target.y, jnp.inf))
    assert_close(poisoned(params), target(params), rtol=0)
    assert_close(target.rows()[0], X, rtol=0), assert_close(target.rows()[1], Y, rtol=0)


def test_a_part_stands_for_the_whole(x64):
    params = {"slope": jnp.asarray(0.3)}
    part = posterior(Line(), X[:10], Y[:10], 3, num_rows=40)
    assert_close(
        part(params), minibatch_logdensity(Line(), params, jnp.asarray(X[:10]), jnp.asarray(Y[:10]), 40), rtol=1e-12
    )
    with pytest.raises(ValueError, match="num_rows.*10.*9"):
        posterior(Line(), X[:10], Y[:10], num_rows=9)


def room(rows, chunk_size):
    "Bytes that the compiler needs for one score, beside the data and the answer."
    model = mlp(2, (64,))
    target = posterior(model, np.ones((rows, 2)), np.ones(rows), chunk_size)
    return (
        jax.jit(lambda t, p: jax.grad(t)(p))
        .lower(target, draw_params(model))
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
    )


def test_memory_is_that_of_a_chunk():
    assert room(8192, 8192) > 10 * room(8192, 128)


def test_memory_does_not_grow_with_rows():
    assert room(8192, 128) < 1.01 * room(512, 128)


def test_likelihood_of_a_wrong_shape():
    class Column(Line):
        def log_likelihood(self, params, x, y):
            return super().log_likelihood(params, x, y)[:, None]

    with pytest.raises(ValueError, match=r"one number for each row, shape \(40,\), got \(40, 1\)"):
        posterior(Column(), X, Y)


# Devices --------------------------------------------------------------------------------------------------------------

SPREAD = """
import json, jax, jax.numpy as jnp, numpy as np
from mmdfw.models._bnn import mlp
from mmdfw.models._outcomes import Bernoulli, NoisyGaussian, Poisson, Softmax
from mmdfw._target import ravel
from mmdfw.models._logistic import Logistic
from mmdfw.models._model import posterior, spread
assert jax.device_count() == 4
rng = np.random.default_rng(0)
x = rng.normal(size=(1003, 2)); y = (x[:, 0] > 0).astype(float)
look = jax.jit(lambda t, p: (lambda out: jnp.concatenate([out[0][None], ravel(out[1])]))(jax.value_and_grad(t)(p)))
def mesh_of(n, kind=jax.sharding.AxisType.Auto):
    return jax.make_mesh((n,), ("rows",), axis_types=(kind,), devices=jax.devices()[:n])

meshes = {n: mesh_of(n) for n in (1, 2, 4)}
meshes["explicit"] = mesh_of(4, jax.sharding.AxisType.Explicit)
meshes["two axes"] = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("rows", "other"))
models = {"logistic": Logistic(2), "network": mlp(2, (3,), jnp.tanh)}
found = []
def compare(dtype, name, rows, chunk, places):
    with jax.enable_x64(dtype == "float64"):
        draw = np.random.default_rng(1)
        shapes = jax.eval_shape(models[name].sample_prior, jax.random.key(0))
        params = jax.tree.map(lambda leaf: jnp.asarray(draw.normal(size=leaf.shape), dtype), shapes)
        part = posterior(models[name], x[:rows], y[:rows], chunk, num_rows=2000)
        alone = np.asarray(look(part, params))
        for place in places:
            wide = spread(part, meshes[place])
            assert len(wide.x.sharding.device_set) == (place if isinstance(place, int) else 4)
            there = np.asarray(look(wide, params))
            assert there.dtype == dtype
            error = float(np.max(np.abs(there - alone)) / np.max(np.abs(alone)))
            found.append([dtype, name, rows, chunk, str(place), error])
compare("float64", "logistic", 1003, 4096, (1, 2, 4))
compare("float64", "logistic", 3, 4096, (4,))
compare("float32", "logistic", 1003, 100, (2, 4))
compare("float32", "network", 1003, 100, (1, 4))
compare("float64", "network", 101, 8, ("explicit", "two axes"))
def rows_of(place):
    few = spread(posterior(models["logistic"], x[:5], y[:5]), meshes[place])
    return [float(np.max(np.abs(np.asarray(a) - b))) for a, b in zip(few.rows(), (x[:5], y[:5]))]

print(json.dumps(dict(found=found, rows={str(place): rows_of(place) for place in (4, "explicit")})))
"""


@pytest.fixture(scope="module")
def on_four_devices():
    "What a process with four devices finds."
    env = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0",
        "JAX_PLATFORMS": "cpu",
        "MPLBACKEND": "agg",
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir or "",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    out = subprocess.run([sys.executable, "-c", SPREAD], env=env, capture_output=True, text=True, timeout=240)
    assert out.returncode == 0, out.stderr[-3000:]
    return json.loads(out.stdout.splitlines()[-1])


def test_rows_over_four_devices(on_four_devices):
    assert len(on_four_devices["found"]) == 10
    for dtype, *what, error in on_four_devices["found"]:
        assert error < (1e-12 if dtype == "float64" else 1e-5), (dtype, *what, error)


def test_rows_come_back_from_devices(on_four_devices):
    assert max(on_four_devices["rows"]["4"]) < 1e-6


def test_rows_come_back_from_an_explicit_mesh(on_four_devices):
    assert max(on_four_devices["rows"]["explicit"]) < 1e-6


# CUDA -----------------------------------------------------------------------------------------------------------------


class Cuda:
    "A tiny network, its data and its oracle, in float32."

    def __init__(self, name="network"):
        self.model, y = MODELS[name]
        self.target = as_target(posterior(self.model, X, y, 16))
        self.u = ravel(draw_params(self.model))
        self.oracle = BatchOracle(self.target, particles_per_step=3, batch_size=8, later_steps=4, piece=2)
        kernel = RBF(jnp.float32(1.0))
        embedding = ParticleEmbedding(kernel, Score(self.target), "alone")
        self.parts = Components(kernel, embedding, self.oracle, ConstantStep())

    def state(self):
        shapes = jax.eval_shape(lambda p: init(self.parts, p, 16), jnp.zeros((3, len(self.u)), jnp.float32))
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


@pytest.fixture
def x32():
    with jax.enable_x64(False):
        yield


KEY_DATA = jax.random.key_data(KEY)


def lower_posterior(name, platforms):
    c = Cuda(name)
    return lowered(lambda t, u: jax.value_and_grad(t)(u), (c.target, c.u), platforms)


def lower_advance(platforms):
    c = Cuda()
    state = c.state()
    begin = lambda parts, state: parts.oracle.begin(KEY, problem_of(parts, state))  # noqa: E731
    flock = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(begin, c.parts, state))

    def piece(parts, data, flock, state):
        return parts.oracle.advance(jax.random.wrap_key_data(data), flock, problem_of(parts, state), 100.0)

    return lowered(piece, (c.parts, KEY_DATA, flock, state), platforms)


def lower_call(platforms):
    c = Cuda()

    def call(parts, data, state):
        return parts.oracle(jax.random.wrap_key_data(data), problem_of(parts, state))

    return lowered(call, (c.parts, KEY_DATA, c.state()), platforms)


def lower_step(platforms):
    c = Cuda()
    return lowered(
        lambda parts, data, state: step(parts, jax.random.wrap_key_data(data), state),
        (c.parts, KEY_DATA, c.state()),
        platforms,
    )


def lower_prediction(name, platforms):
    c, scores = Cuda(name), {"network": regression_scores, "logistic": classification_scores}[name]
    particles = jax.tree.map(lambda leaf: jnp.stack([leaf, 0.9 * leaf]), draw_params(c.model))
    return lowered(
        lambda p, w, x, y: scores(c.model.predict(p, w, x), y),
        (particles, jnp.full(2, 0.5), *c.target.function.rows()),
        platforms,
    )


LOWER = {
    "score, logistic": lambda p: lower_posterior("logistic", p),
    "score, network": lambda p: lower_posterior("network", p),
    "advance": lower_advance,
    "call": lower_call,
    "step": lower_step,
    "prediction, network": lambda p: lower_prediction("network", p),
    "prediction, logistic": lambda p: lower_prediction("logistic", p),
}


@pytest.mark.parametrize("platforms", PLATFORMS, ids="+".join)
@pytest.mark.parametrize("name", list(LOWER))
def test_lowers_for_cuda(name, platforms, x32):
    text = LOWER[name](platforms)
    assert_sound(text)
    assert not re.findall(r"custom_call @\w*(?:host|python|py_)\w*", text)
    if name in ("advance", "call", "step"):
        assert "stablehlo.while" in text  # the scan is inside, not unrolled


def test_the_check_sees_a_callback():
    text = (
        jax.jit(lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct((2,), np.float32), x))
        .lower(jnp.ones(2))
        .as_text()
    )
    with pytest.raises(AssertionError):
        assert_sound(text)


# Shapes and modules ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, dimension",
    [
        (lambda: Logistic(54), 56),
        (lambda: mlp(17, prior="paper"), 953),
        (lambda: mlp(9, prior="paper"), 553),
        (lambda: mlp(90, (100,), prior="paper"), 9203),
        (lambda: mlp(3, (4, 5), prior="paper"), 4 * 4 + 5 * 5 + 6 + 2),
        (lambda: mlp(3, (4, 5), jnp.tanh), 4 * 4 + 5 * 5 + 6 + 4),
        (lambda: mlp(2, ()), 3 + 2),
    ],
    ids=["covertype", "naval", "protein", "year", "two layers", "two layers, tanh", "no hidden layer"],
)
def test_dimensions(make, dimension):
    shapes = jax.eval_shape(make().sample_prior, KEY)
    assert sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes)) == dimension


def test_two_layers_by_hand(x64):
    model = mlp(2, (3, 4), jnp.sin)
    params = draw_params(model)
    h = X
    for i, last in ((0, False), (1, False), (2, True)):
        h = h @ np.asarray(params["net"]["layers"][i]["kernel"]) + np.asarray(params["net"]["layers"][i]["bias"])
        h = h if last else np.sin(h)
    assert_close(model.network(params["net"], jnp.asarray(X)), h[:, 0], rtol=1e-10)


def test_equal_models_share_compiled_code():
    assert mlp(2, (3,)) == mlp(2, (3,)) and hash(mlp(2, (3,))) == hash(mlp(2, (3,)))
    assert len({mlp(2, (3,)), mlp(2, (4,)), mlp(2, (3,), jnp.tanh), mlp(2, (3,), rate=0.2), mlp(3, (3,))}) == 5


class Dropping(nnx.Module):
    "Random streams in its state; without dropout it is a plain network."

    def __init__(self, rngs, deterministic=True):
        self.inside, self.out = nnx.Linear(2, 3, rngs=rngs), nnx.Linear(3, 1, rngs=rngs)
        self.drop = nnx.Dropout(0.5, deterministic=deterministic, rngs=rngs)

    def __call__(self, x):
        return self.out(self.drop(jnp.tanh(self.inside(x))))[:, 0]


def test_module_with_random_streams():
    model = bnn(Dropping, 2)
    params = model.sample_prior(KEY)
    assert len(ravel(params)) == 3 * 3 + 4 + 3  # the streams are no parameters
    net = model.prior.weights(params)
    by_hand = jnp.tanh(X @ net["inside"]["kernel"] + net["inside"]["bias"]) @ net["out"]["kernel"] + net["out"]["bias"]
    assert_close(model.network(net, jnp.asarray(X)), by_hand[:, 0], rtol=1e-5)
    grown = fit_model(KEY, model, X, Y, num_particles=2, **SHORT)
    assert jnp.all(jnp.isfinite(grown.positions)) and grown.predict(X).mean.shape == (40,)


@pytest.mark.parametrize(
    "make",
    [lambda rngs: Dropping(rngs, deterministic=False), lambda rngs: Normed(rngs)],
    ids=["dropout on", "batch norm in training"],
)
def test_module_that_changes_its_state(make):
    with pytest.raises(ValueError, match="state|deterministic|RngCount|BatchStat"):
        bnn(make, 2)


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.inside, self.norm = nnx.Linear(2, 1, rngs=rngs), nnx.BatchNorm(1, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.inside(x))[:, 0]


class Shifted(nnx.Module):
    "A constant in its state, such as the mean of the data."

    def __init__(self, rngs, by):
        self.inside, self.by = nnx.Linear(2, 1, rngs=rngs), nnx.Variable(jnp.asarray(by))

    def __call__(self, x):
        return self.inside(x)[:, 0] + self.by[...]


def test_state_that_is_no_parameter_is_not_mixed_up():
    look = jax.jit(lambda target, params: target(params))
    near, far = (posterior(bnn(lambda rngs, by=by: Shifted(rngs, by), 2), X, Y) for by in (0.0, 5.0))
    params = draw_params(near.model)
    assert_close(look(near, params), near(params), rtol=1e-5)
    assert_close(look(far, params), far(params), rtol=1e-5)


class Begun(nnx.Module):
    "Its own initialisation, of which its graph knows nothing."

    def __init__(self, rngs, at):
        self.inside = nnx.Linear(2, 1, rngs=rngs)
        self.inside.kernel[...] = jnp.full((2, 1), at, jnp.float32)

    def __call__(self, x):
        return self.inside(x)[:, 0]


def test_initialisations_are_not_mixed_up():
    weights = lambda model, key: model.prior.weights(model.sample_prior(key))
    draw = jax.jit(lambda key, model: weights(model, key)["inside"]["kernel"], static_argnums=1)
    for at in (0.0, 5.0):
        assert_close(draw(KEY, bnn(lambda rngs, at=at: Begun(rngs, at), 2)), np.full((2, 1), at), rtol=1e-6)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: bnn(lambda rngs: nnx.Linear(2, 1, rngs=rngs), 2), r"\(3, 1\)"),
        (lambda: bnn(lambda rngs: 3, 2), "Module"),
        (lambda: mlp(0), "num_features"),
        (lambda: mlp(2, (0,)), "hidden"),
        (lambda: mlp(2, rate=-1.0), "rate"),
        (lambda: mlp(2, shape=0.0), "shape"),
        (lambda: Logistic(0), "num_features"),
        (lambda: Logistic(2, rate=float("nan")), "rate"),
        (lambda: Logistic(2.5), "num_features"),
    ],
)
def test_bad_models(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# One call -------------------------------------------------------------------------------------------------------------


@dataclass
class Grown:
    five: object
    fifteen: object
    compiled: tuple  # how often a piece of a call was compiled for each


@pytest.fixture(scope="module")
def grown():
    "Five particles, ten more, and how much was compiled on the way."
    with jax.enable_x64(False):
        sizes = [_loop._advance._cache_size()]
        five = fit_line(5)
        sizes.append(_loop._advance._cache_size())
        return Grown(five, five.add(10), (sizes[1] - sizes[0], _loop._advance._cache_size() - sizes[1]))


def same(a, b):
    return all(np.array_equal(u, v) for u, v in zip(jax.tree.leaves(a.state), jax.tree.leaves(b.state), strict=True))


def test_compiled_at_most_twice(grown):
    assert sum(grown.compiled) <= 2
    before = _loop._advance._cache_size()
    fit_model(
        jax.random.key(5),
        Line(),
        X + 1,
        2 * Y,
        num_particles=10,
        **(SHORT | dict(first_steps=300, later_steps=100, learning_rate=0.01)),
    )
    assert _loop._advance._cache_size() == before  # other keys, data, rates and lengths need no other code


def test_same_key_same_result(grown):
    assert same(fit_line(15), grown.fifteen)
    assert not np.array_equal(fit_line(15, jax.random.key(1)).positions, grown.fifteen.positions)


def test_ten_and_five_more(grown):
    ten = fit_line(10)
    assert same(ten.add(5), grown.fifteen)
    assert np.array_equal(ten.positions, grown.fifteen.positions[:10]) and len(ten) == 10  # and stays as it was


def test_what_comes_back(grown):
    result = grown.fifteen
    assert len(result) == 15 and result.positions.shape == (15, 1) and result.particles["slope"].shape == (15,)
    assert result.positions.dtype == result.weights.dtype == jnp.float32
    assert_close(result.weights, np.full(15, 1 / 15), rtol=1e-6)
    assert len(np.unique(result.positions)) == 15
    assert result.evaluations == 5 * (200 + 100 + 100) and result.history.count.tolist() == [5, 10, 15]
    assert "15 particles, 2,000 minibatch scores, Line on 40 rows" in repr(result)


def test_what_nobody_reads_is_not_computed(grown):
    "Constant steps want no Gram matrix, and nobody wants the particles' scores: no pass over all rows is made."
    state = grown.fifteen.state
    assert state.gram is None and state.factor is None and state.means is None
    assert not np.any(state.particles.score) and np.isnan(grown.fifteen.discrepancy)
    assert np.isnan(grown.fifteen.history.discrepancy).all() and np.isnan(grown.fifteen.history.gap).all()


def test_seconds_in_place_of_steps(grown):
    before = _loop._advance._cache_size()
    watched = dict(seconds=0.3, monitor=lambda particles, weights: {"n": len(weights)})
    result = fit_model(KEY, Line(), X, Y, num_particles=15, **watched, **SHORT)
    assert result.records[-1].seconds > 0.2  # no call ends before two thirds of its time
    assert _loop._advance._cache_size() == before  # the length is data
    assert len(result) == 15
    assert len(result.add(5, seconds=0.1)) == 20
    with pytest.raises(ValueError, match="seconds.*-1"):
        result.add(5, seconds=-1)


def test_last_batch_is_cut_to_size(grown):
    seven = fit_line(7)
    assert len(seven) == 7 and np.array_equal(seven.positions, grown.fifteen.positions[:7])
    assert_close(jnp.sum(seven.weights), 1.0, rtol=1e-6)


def test_one_at_a_time():
    alone = fit_line(1)  # fewer than move together
    assert len(alone) == 1 and alone.parts.oracle.particles_per_step == 1
    two = fit_line(2, particles_per_step=1)
    assert np.array_equal(two.positions[:1], alone.positions) and same(alone.add(1), two)
    assert jnp.all(jnp.isfinite(two.positions)) and two.positions[0, 0] != two.positions[1, 0]


def test_monitor_and_records(grown):
    seen = []

    def look(particles, weights):
        seen.append((particles["slope"].shape, float(jnp.sum(weights))))
        return {"mean": weights @ particles["slope"]}

    result = fit_line(10, monitor=look, monitor_every=0.0)
    assert np.array_equal(result.positions, grown.fifteen.positions[:10])  # looking changes nothing
    assert [shape for shape, _ in seen] == [(5,), (5,), (5,), (10,)] and all(abs(total - 1) < 1e-6 for _, total in seen)
    assert [r.particles for r in result.records] == [5, 5, 5, 10] and [r.steps for r in result.records] == [
        500,
        1000,
        1000,
        1500,
    ]
    assert np.all(np.diff([r.seconds for r in result.records]) >= 0) and isinstance(
        result.records[-1].metrics["mean"], float
    )
    assert "mean" in repr(result)


def test_float64(x64):
    key = jax.random.key(0)
    result = fit_line(2, key)
    assert all(leaf.dtype in (jnp.float64, jnp.int32) for leaf in jax.tree.leaves(result.state))
    assert result.positions.dtype == result.weights.dtype == result.predict(X).mean.dtype == jnp.float64
    assert jax.eval_shape(Logistic(2).sample_prior, key)["weights"].dtype == jnp.float64


def test_networks_in_float64(x64):
    assert {leaf.dtype for leaf in jax.tree.leaves(jax.eval_shape(mlp(2, (3,)).sample_prior, jax.random.key(0)))} == {
        jnp.dtype("float64")
    }


# From an iterator -----------------------------------------------------------------------------------------------------


def all_rows():
    return itertools.repeat((X, Y))


def fit_stream(batches, num_particles=5, **options):
    return fit_model(
        KEY,
        Line(),
        batches=batches,
        **(SHORT | dict(num_rows=40, num_particles=num_particles, batch_size=40, first_steps=500) | options),
    )


@pytest.fixture(scope="module")
def exact():
    "Fifteen particles whose batches are all rows, so that no score has noise."
    with jax.enable_x64(False):
        return fit_stream(all_rows(), 15)


def test_iterator_is_used_and_repeatable():
    def endless(seed):
        rng = np.random.default_rng(seed)
        while True:
            rows = rng.integers(40, size=40)
            yield X[rows], Y[rows]

    one, again, other = (fit_stream(endless(seed)) for seed in (0, 0, 1))
    assert same(one, again) and not np.array_equal(one.positions, other.positions)
    with pytest.raises(ValueError, match="give batches= again"):
        one.add(5)


def test_iterator_goes_on(exact):
    five = fit_stream(all_rows(), 5)
    assert np.array_equal(five.add(10, batches=all_rows()).positions, exact.positions)


@pytest.mark.parametrize("num_rows", [30, 40, 60, 5000])
def test_the_first_batch_stands_for_all_rows(num_rows):
    "However many rows there are: those of the first batch stand for their share each."
    target = fit_stream(all_rows(), first_steps=1, num_rows=num_rows).target
    assert target.function.scale * target.function.num_rows == num_rows
    if num_rows >= 40:
        alone = posterior(Line(), X, Y)({"slope": jnp.zeros(())})
        assert_near(target(jnp.zeros(1)), num_rows / 40 * alone, 1e-5)


def test_no_batch_is_lost():
    "The first one is looked at, and used."
    count = itertools.count()
    counted = ((X, Y) for _ in count)
    fit_stream(counted)
    assert next(count) == 500  # one for each step, the first one among them


def test_rows_are_gathered_while_the_device_works():
    "After each piece of a hundred steps the next hundred batches are there, and none beyond the last piece's."
    fetched, seen = [], []

    def counted():
        while True:
            fetched.append(1)
            yield X, Y

    fit_stream(counted(), monitor=lambda *_: {"batches": seen.append(len(fetched)) or 0.0}, monitor_every=0.0)
    assert seen[:5] == [200, 300, 400, 500, 500]


def test_saved_from_an_iterator(tmp_path):
    five = fit_stream(all_rows())
    path = five.save(tmp_path / "five.npz")
    again = load(path, posterior(Line(), X, Y, num_rows=40))
    assert same(again.add(5, batches=all_rows()), five.add(5, batches=all_rows()))


# Against the closed form ----------------------------------------------------------------------------------------------

PRECISION = 1 + np.sum(X[:, 0] ** 2) / 0.5**2
MEAN, SD = np.sum(X[:, 0] * Y) / 0.5**2 / PRECISION, PRECISION**-0.5


def test_mean_of_a_line_without_noise(exact):
    """At rest a flock's directions add up to zero. Repulsion is antisymmetric, so the kernel-weighted scores do: with
    the line's linear score and a symmetric flock its mean is the posterior's. What is left is rounding,
    eps MEAN / SD = 2e-6 SD, and steps not taken; a hundredth of SD is allowed, where leaving out the prior would move
    the mean by a sixth."""
    assert MEAN / (PRECISION - 1) > 0.1 * SD
    first = np.asarray(exact.positions[:5, 0])
    assert abs(np.mean(first) - MEAN) < 0.01 * SD
    assert abs(np.mean(exact.positions) - MEAN) < 0.03 * SD  # three batches
    assert 0.5 * SD < np.std(first) < 1.5 * SD  # neither collapsed nor scattered
    predictive = exact.predict(X)
    assert_close(predictive.mean, MEAN * np.asarray(X[:, 0]), rtol=0.03 * SD / MEAN)
    assert np.all(np.asarray(predictive.variance) > 0.25 * (1 - 1e-5)) and np.all(
        np.asarray(predictive.variance) < 0.25 + 4 * SD**2 * X[:, 0] ** 2 + 1e-5
    )


def test_mean_of_a_line_from_drawn_rows(grown):
    """The mode of one minibatch of b rows has standard error R / sqrt(b) sd(row scores) / PRECISION, and the annealed
    flock averages over many: four of them are allowed."""
    rows = (Y - MEAN * X[:, 0]) * X[:, 0] / 0.5**2
    allowed = 4 * 40 / np.sqrt(100) * np.std(rows) / PRECISION
    assert abs(float(grown.fifteen.weights @ grown.fifteen.positions[:, 0]) - MEAN) < allowed < MEAN / 4
    assert_close(grown.fifteen.predict(X).mean, MEAN * X[:, 0], rtol=allowed / MEAN)


# Save and load --------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(grown, tmp_path):
    return grown.five.save(tmp_path / "five.npz", notes={"why": "a test"})


def test_load_goes_on_bit_for_bit(grown, saved):
    again = load(saved, Line(), X, Y)
    assert same(again, grown.five) and again.records == grown.five.records
    assert same(again.add(10), grown.fifteen)
    header, arrays = read_header(saved)
    assert header["notes"] == {"why": "a test"} and all(a.dtype != object for a in arrays.values())
    assert [p.name for p in saved.parent.iterdir()] == ["five.npz"]
    grown.fifteen.save(saved)  # a file that is there gives way
    assert len(load(saved, Line(), X, Y)) == 15


def test_loading_compiles_nothing(grown, saved):
    before = _loop._advance._cache_size()
    again = load(saved, Line(), X, Y)
    assert again.parts.oracle.optimizer == grown.five.parts.oracle.optimizer
    again.add(10)
    assert _loop._advance._cache_size() == before


@pytest.mark.parametrize(
    "settings",
    [
        dict(step_rule=Quadrature("simplex")),
        dict(kernel=IMQ(0.5)),
        dict(schedule="constant", restart="prior", learning_rate=0.02),
    ],
    ids=["step rule", "kernel", "settings"],
)
def test_load_brings_all_parts_back(settings, tmp_path):
    some = fit_line(5, **settings)
    assert same(load(some.save(tmp_path / "some.npz"), Line(), X, Y).add(5), some.add(5))


def test_an_optimiser_without_a_name_is_refused_when_saving(tmp_path):
    with pytest.raises(ValueError, match="parts.oracle.optimizer cannot be saved"):
        fit_line(5, optimizer=optax.scale_by_rms()).save(tmp_path / "some.npz")
    assert left_behind(tmp_path) == []


def test_model_of_other_columns():
    with pytest.raises(ValueError, match="BNN cannot take rows of 2 columns"):
        fit_model(KEY, mlp(3), X[:, :1].repeat(2, 1), Y, **SHORT)


def test_load_where_the_last_batch_was_cut(grown, tmp_path):
    sixteen = grown.fifteen.add(1)
    assert same(load(sixteen.save(tmp_path / "sixteen.npz"), Line(), X, Y), sixteen)


def refuses(path, match="broken.npz", model=Line(), x=X, y=Y):
    with pytest.raises((ValueError, FileNotFoundError), match=match):
        load(path, model, x, y)


def test_truncated_anywhere(saved, tmp_path):
    data, path = saved.read_bytes(), tmp_path / "broken.npz"
    for size in (0, 1, 10, 100, *range(500, len(data), 701), len(data) - 1):
        path.write_bytes(data[:size])
        refuses(path)


def flip(data, place, bits):
    out = bytearray(data)
    out[place] ^= bits
    return bytes(out)


def test_flipped_in_the_middle(saved, tmp_path):
    data, path = saved.read_bytes(), tmp_path / "broken.npz"
    with zipfile.ZipFile(saved) as archive:
        members = archive.infolist()
    for member in members:  # the last byte of each member's data: the checksum sees it
        end = data.index(b"PK", member.header_offset + 4 + member.file_size)
        path.write_bytes(flip(data, end - 1, 255))
        refuses(path)
    path.write_bytes(data[: len(data) // 2] + bytes(64) + data[len(data) // 2 + 64 :])
    refuses(path)


def equal(a, b):
    return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")


def equal_files(a, b):
    return a[0] == b[0] and a[1].keys() == b[1].keys() and all(equal(a[1][n], b[1][n]) for n in a[1])


def test_flipped_anywhere(saved, tmp_path):
    data, path, good, odd = saved.read_bytes(), tmp_path / "broken.npz", read_header(saved), []
    directory = data.index(b"PK\x01\x02")
    headers = [place for start in re.finditer(rb"NUMPY", data) for place in range(start.start(), start.start() + 70, 3)]
    for place, bits in itertools.product(
        [*range(0, directory, 97), *headers, *range(directory, len(data), 2)], (1, 255)
    ):
        path.write_bytes(flip(data, place, bits))
        try:
            found = "same" if equal_files(read_header(path), good) else "read as something else"
        except ValueError as problem:
            found = "refused" if "broken.npz" in str(problem) else f"no name: {problem}"
        except (NotImplementedError, RuntimeError, tokenize.TokenError, MemoryError, OverflowError) as problem:
            found = repr(problem)
        if found not in ("same", "refused"):
            odd.append((place, bits, found))
    assert not odd, odd[:20]


def write_zip(path, **members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in members.items():
            archive.writestr(name, text)


def test_other_files(saved, tmp_path):
    path = tmp_path / "broken.npz"
    refuses(path, "no saved result at .*broken.npz")
    refuses(tmp_path, "no saved result")
    write_zip(path, hello="world")
    refuses(path)
    write_zip(path, **{"header.npy": "world"})
    refuses(path)
    path.write_bytes(pickle.dumps({"format": FORMAT}))
    refuses(path)
    np.savez(path, header=np.array({"format": FORMAT}, dtype=object), positions=np.ones((1, 1)), weights=np.ones(1))
    refuses(path)
    np.save(tmp_path / "array.npy", np.ones(3))
    refuses(tmp_path / "array.npy", "array.npy")
    path.write_text("slope,weight\n1,1\n")
    refuses(path)


def written(path, header, arrays):
    "A file with a right digest, whatever is in it."
    held = arrays | {"header": np.array(header)}
    np.savez(path, digest=np.array(digest_arrays(held)), **held)
    return path


@pytest.mark.parametrize(
    "header",
    ['{"other": 1}', "[1, 2]", "5", "null", '"text"', "{", "", '{"format": 999}', '{"format": null}', '{"format": 2}'],
)
def test_header_is_other_json(header, saved, tmp_path):
    refuses(written(tmp_path / "broken.npz", header, read_header(saved)[1]))


def rewritten(saved, path, change_header=lambda h: None, drop=(), **arrays):
    header, held = read_header(saved)
    change_header(header["spec"]["dict"])
    held = {name: array for name, array in (held | arrays).items() if name not in drop}
    return written(path, json.dumps(header), held)


def test_not_finite(saved, tmp_path):
    positions = {"result.positions": np.full((5, 1), np.nan, np.float32)}
    refuses(rewritten(saved, tmp_path / "broken.npz", **positions))


def oracle_of(spec):
    return spec["parts"]["fields"]["oracle"]["fields"]


@pytest.mark.parametrize(
    "change, drop",
    [
        (lambda s: s.pop("parts"), ()),
        (lambda s: s.pop("names"), ()),
        (lambda s: s.pop("records"), ()),
        (lambda s: s.pop("probes"), ()),
        (lambda s: oracle_of(s).update(more=1), ()),
        (lambda s: oracle_of(s).update(particles_per_step=0), ()),
        (lambda s: s["records"].update(tuple=[{"a": 1}]), ()),
        (lambda s: None, ("result.run.key",)),
        (lambda s: None, ("result.parts.kernel.lengthscale",)),
        (lambda s: None, ("result.state.particles.position",)),
    ],
    ids=[
        "parts",
        "dimension",
        "records",
        "rows",
        "more settings",
        "bad setting",
        "bad records",
        "key",
        "width",
        "leaf",
    ],
)
def test_right_format_but_something_lacking(change, drop, saved, tmp_path):
    path = rewritten(saved, tmp_path / "broken.npz", change, drop)
    with pytest.raises(ValueError, match="broken.npz"):
        load(path, Line(), X, Y)


def test_wrong_model_and_wrong_rows(saved):
    refuses(saved, r"five.npz holds particles of 1 numbers \(slope\), the target has 4", Logistic(2), y=LABELS)
    refuses(saved, "five.npz belongs to another target", x=X[:-1], y=Y[:-1])
    refuses(saved, "to match x", y=Y[:-1])
    refuses(saved, "NaN", x=np.where(np.arange(40)[:, None] == 3, np.nan, X))


def test_other_rows_of_the_same_number(saved):
    refuses(saved, "five.npz", x=X[::-1], y=Y)


def test_other_model_of_the_same_dimension(saved):
    class Curve(Line):
        def sample_prior(self, key):
            return {"curvature": jax.random.normal(key)}

        def log_prior(self, params):
            return -0.5 * params["curvature"] ** 2

        def log_likelihood(self, params, x, y):
            return -0.5 * (y - params["curvature"] * x[:, 0] ** 2) ** 2

    refuses(saved, "five.npz", Curve())


def left_behind(folder):
    return sorted(p.name for p in folder.rglob("*") if p.is_file())


def test_folder_is_a_file(grown, tmp_path):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file" / "five.npz", tmp_path / "file" / "more" / "five.npz"):
        with pytest.raises(OSError, match="file"):
            grown.five.save(path)
    assert left_behind(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("case", ["notes", "destination is a folder", "disk is full"])
def test_nothing_half_written(case, grown, tmp_path, monkeypatch):
    path = tmp_path / "five.npz"
    if case == "destination is a folder":
        path.mkdir()
    if case == "disk is full":

        def full(file, **arrays):
            file.write(b"half")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(np, "savez", full)
    with pytest.raises((OSError, TypeError, ValueError)):
        grown.five.save(path, notes={"bad": object()} if case == "notes" else None)
    assert left_behind(tmp_path) == []


def test_an_old_file_survives_a_failure(saved, grown):
    before = saved.read_bytes()
    with pytest.raises(TypeError, match="JSON"):
        grown.five.save(saved, notes={"bad": object()})
    assert saved.read_bytes() == before


# Faults ---------------------------------------------------------------------------------------------------------------


def with_nan(a):
    return np.where(np.arange(40).reshape(-1, *[1] * (a.ndim - 1)) == 3, np.nan, a)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(x=with_nan(X)), r"x holds NaN.*\[3\]"),
        (dict(y=with_nan(Y)), r"y holds NaN.*\[3\]"),
        (dict(x=with_nan(X) * np.inf), "x holds NaN or infinite"),
        (dict(y=Y[:-1]), r"y must have shape \(40,\).*\(39,\)"),
        (dict(y=Y[:, None]), r"\(40,\).*\(40, 1\)"),
        (dict(y=None), r"y must have shape \(40,\)"),
        (dict(x=X[:, 0]), r"\(rows, columns\).*\(40,\)"),
        (dict(x=X.astype(str)), "x must hold numbers"),
        (dict(y=["a"] * 40), "y must hold numbers"),
        (dict(x=X.astype(object)), "x must hold numbers.*object"),
        (dict(x=X + 1j), "x must hold numbers.*complex"),
        (dict(x=np.zeros((0, 2)), y=np.zeros(0)), r"\(0, 2\)"),
        (dict(x=np.zeros((40, 0))), r"\(40, 0\)"),
        (dict(x=[]), "x must be"),
        (dict(x=None, y=None), "either x and y, or batches"),
        (dict(batches=iter([])), "either x and y, or batches"),
        (dict(batch_size=0), "batch_size.*0"),
        (dict(batch_size=2.5), "batch_size.*2.5"),
        (dict(num_particles=0), "num_particles.*0"),
        (dict(num_particles=True), "num_particles.*True"),
        (dict(first_steps=0), "first_steps.*0"),
        (dict(later_steps=-1), "later_steps.*-1"),
        (dict(optimizer=optax.adam(1e-3)), r"optax.scale_by_adam\(\) for optax.adam"),
        (dict(optimizer="adam"), "optimizer.*'adam'"),
        (dict(kernel="rbf"), "kernel must be an object.*'rbf'"),
        (dict(oracle=GradientOracle), "oracle must be an object"),
        (dict(step_rule=0.5), "step_rule must be an object.*0.5"),
        (dict(kernel=RBF(jnp.ones(3))), r"lengthscale has shape \(3,\)"),
        (dict(workers="two"), "workers.*'two'"),
        (dict(seconds=0.0), "seconds.*0.0"),
        (dict(seconds=float("nan")), "seconds.*nan"),
        (dict(seconds="10"), "seconds.*10"),
        (dict(later_rate=0.0), "later_rate.*0.0"),
        (dict(learning_rate=-0.1), "-0.1"),
        (dict(learning_rate=float("nan")), "nan"),
        (dict(schedule="linear"), "schedule.*'linear'"),
        (dict(schedule=None), "schedule.*None"),
        pytest.param(dict(learning_rate=-0.1), "learning_rate.*-0.1"),
        pytest.param(dict(particles_per_step=0), "particles_per_step.*0"),
        pytest.param(dict(particles_per_step="5"), "particles_per_step.*5"),
        pytest.param(dict(first_steps="500"), "first_steps.*500"),
        pytest.param(dict(later_steps=None), "later_steps.*None"),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(ValueError, match=message):
        fit_model(KEY, Line(), **(dict(x=X, y=Y) | SHORT | change))


def test_a_key_is_a_key():
    with pytest.raises(ValueError, match="key must be a random key, got 0"):
        fit_line(5, key=0)


def test_chunks_are_counted():
    with pytest.raises(ValueError, match="chunk_size.*0"):
        posterior(Line(), X, Y, chunk_size=0)


def test_whole_numbers_are_taken():
    target = posterior(Line(), X.round().astype(int), Y.round().astype(np.int8))
    assert target.x.dtype == target.y.dtype == jnp.float32
    assert posterior(Line(), X.tolist(), Y.tolist()).num_rows == 40


def batches_of(*sizes):
    return iter([(X[:n], Y[:n]) for n in sizes])


@pytest.mark.parametrize(
    "batches, num_rows, message",
    [
        (iter([]), 40, "ended after 0 of 1"),
        (batches_of(40), 40, "ended after 1 of 100"),
        (batches_of(*[40] * 150), 40, "ended after 50 of 100"),
        (batches_of(*[40] * 99, 39), 40, "same shape"),
        (batches_of(39), 40, "39 rows, batch_size is 40"),
        (all_rows(), None, "num_rows.*None"),
        (all_rows(), 0, "num_rows.*0"),
        (iter([(with_nan(X), Y)]), 40, "NaN"),
        (itertools.chain(batches_of(40), itertools.repeat((X, with_nan(Y)))), 40, "y holds NaN"),
    ],
    ids=[
        "empty",
        "one",
        "ends in the first call",
        "last one smaller",
        "other size",
        "rows unknown",
        "no rows",
        "nan at first",
        "nan later",
    ],
)
def test_bad_batches(batches, num_rows, message):
    with pytest.raises(ValueError, match=message):
        fit_stream(batches, num_rows=num_rows)


def test_bad_count_to_add(grown):
    for bad in (0, -1, 2.5, None):
        with pytest.raises(ValueError, match=f"num.*{bad}"):
            grown.five.add(bad)


class Broken(Line):
    def log_likelihood(self, params, x, y):
        return jnp.nan * super().log_likelihood(params, x, y)


def test_likelihood_is_nan():
    with pytest.raises(ValueError, match="first particles was NaN or infinite"):
        fit_model(KEY, Broken(), X, Y, num_particles=5, **SHORT)


def stop_at(number):
    def look(particles, weights):
        if len(weights) >= number:
            raise KeyboardInterrupt
        return {"particles": len(weights)}

    return look


def test_interrupted_run_keeps_what_it_has(grown):
    with pytest.warns(UserWarning, match="10 of 15 particles are kept"):
        stopped = fit_line(15, monitor=stop_at(10))
    assert len(stopped) == 10 and np.array_equal(stopped.positions, grown.fifteen.positions[:10])
    assert same(stopped.add(5), grown.fifteen)
    with pytest.warns(UserWarning, match="10 of 15 particles are kept"):
        stopped = grown.five.add(10, monitor=stop_at(10))
    assert same(stopped.add(5), grown.fifteen) and len(grown.five) == 5


def test_interrupted_before_there_is_anything():
    with pytest.raises(KeyboardInterrupt):
        fit_line(15, monitor=stop_at(5), monitor_every=0.0)


def test_interrupted_run_can_be_saved(grown, tmp_path):
    with pytest.warns(UserWarning, match="5 of 15"):
        stopped = fit_line(15, monitor=stop_at(5))
    assert same(load(stopped.save(tmp_path / "stopped.npz"), Line(), X, Y).add(10), grown.fifteen)


def test_monitor_that_fails():
    with pytest.raises(ZeroDivisionError):
        fit_line(5, monitor=lambda particles, weights: {"x": 1 / 0})


def test_another_step_rule(grown):
    "Weights are the rule's, positions do not depend on them."
    result = fit_line(5, step_rule=Quadrature("simplex"))
    assert np.array_equal(result.positions, grown.five.positions)
    assert jnp.all(result.weights >= 0) and abs(float(jnp.sum(result.weights)) - 1) < 1e-4


# Parts of one's own ---------------------------------------------------------------------------------------------------


def test_another_kernel_is_another_repulsion(grown):
    result = fit_line(5, kernel=RBF(0.01))
    assert not np.array_equal(result.positions, grown.five.positions)
    assert result.parts.kernel.lengthscale == 0.01
    with pytest.raises(ValueError, match="depends on x - y alone"):
        fit_line(5, kernel=Stein(RBF(1.0), lambda u: -u))


def test_an_oracle_of_ones_own_on_all_rows():
    "Then the embedding takes the particles' scores, on all rows, and KSD is measured."
    result = fit_model(KEY, Line(), X, Y, num_particles=6, oracle=GradientOracle(NearParticles(0.1), scale=0.1))
    assert len(result) == 6 and np.isfinite(result.discrepancy) and result.state.gram is not None
    scores = jax.vmap(as_target(Line(), X, Y).score)(result.positions)
    assert_near(result.state.particles.score[:6], scores, 1e-4)
    assert abs(float(np.mean(result.positions)) - MEAN) < SD  # from the mode on
    assert "target evaluations" in repr(result)
    again = fit_model(KEY, Line(), X, Y, num_particles=3, oracle=GradientOracle(NearParticles(0.1), scale=0.1))
    assert same(again.add(3), result)


def test_the_batch_oracle_given_as_ones_own(grown):
    target = as_target(Line(), X, Y)
    lengths = dict(first_steps=200, later_steps=100, first_rate=0.05, later_rate=0.05, piece=100)
    result = fit_model(KEY, Line(), X, Y, num_particles=5, oracle=BatchOracle(target, 5, 100, **lengths))
    assert len(result) == 5 and np.isfinite(result.discrepancy)  # measured, and no worse
    assert np.std(result.positions) > 0


def test_settings_beside_an_oracle_are_refused():
    with pytest.raises(ValueError, match="oracle= has settings of its own: leave out first_steps, restart"):
        fit_model(KEY, Line(), X, Y, oracle=GradientOracle(NearParticles()), first_steps=10, restart="prior")
    with pytest.raises(ValueError, match="give x and y in place of batches="):
        oracle = GradientOracle(NearParticles())
        fit_model(KEY, Line(), batches=all_rows(), num_rows=40, batch_size=40, oracle=oracle)


# Walkers --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def walked():
    "Forty draws of eight walkers on all rows of the line."
    with jax.enable_x64(False):
        lengths = dict(particles_per_step=8, first_steps=2000, later_steps=200, learning_rate=0.05)
        return fit_model(KEY, Line(), X, Y, num_particles=40, **lengths)


def test_walkers_have_the_width_of_the_posterior(walked):
    "Forty draws, nearly independent: four standard errors of their mean, and of their standard deviation."
    assert abs(np.mean(walked.positions) - MEAN) < 4 * SD / np.sqrt(40)
    assert abs(np.std(walked.positions) / SD - 1) < 4 / np.sqrt(80)
    assert int(walked.state.memory.refused.sum()) == 0
    assert walked.evaluations == 8 * (1000 + 2 * 1000 + 4 * 2 * 200)  # whole pieces of 200 steps


def test_walkers_go_on_where_they_stand(walked, tmp_path):
    again = load(walked.save(tmp_path / "walked.npz"), Line(), X, Y)
    assert same(again.add(8), walked.add(8)) and same(again, walked)


def test_networks_do_not_fall_to_zero():
    "A hundred rows and 151 weights: where the paper's prior ends at no network, the default one does not."
    x = np.linspace(-2, 2, 100)[:, None]
    y = np.sin(3 * x[:, 0]) + 0.1 * RNG.normal(size=100)
    y = (y - y.mean()) / y.std()
    kept = dict(num_particles=4, particles_per_step=4, first_steps=3000, later_steps=500, learning_rate=0.01)
    upright = fit_model(KEY, mlp(1, (50,), jnp.tanh), x, y, **kept)
    fallen = fit_model(KEY, mlp(1, (50,), jnp.tanh, prior="paper"), x, y, **kept, walk=False)
    error = lambda result: float(np.sqrt(np.mean((result.predict(x).mean - y) ** 2)))
    assert error(upright) < 0.2 < 0.9 < error(fallen)


def flops(form, count):
    "Operations of one piece of a call, by the compiler's count, with so many particles there."
    target = as_target(mlp(4, (10,)), np.ones((50, 4)), np.ones(50), batch_size=20)
    oracle = WalkOracle(BatchOracle(target, batch_size=20, piece=1))
    parts = Components(RBF(1.0), ParticleEmbedding(RBF(1.0), None, "alone"), oracle, ConstantStep())
    shape = jax.ShapeDtypeStruct((count, target.dimension), target.dtype)
    state = jax.eval_shape(lambda points: init(parts, points, count), shape)
    search = jax.eval_shape(lambda key, state: oracle.begin(key, problem_of(parts, state)), KEY, state)

    def climbing(search, state, key, drawn):
        return oracle.climbing(search, problem_of(parts, state), drawn, oracle.flock.rows, 1.0)

    def walking(search, state, key, drawn):
        return oracle.walking(search, key, drawn, oracle.flock.rows)

    one = {"climbing": climbing, "walking": walking}[form]
    drawn = jax.ShapeDtypeStruct((1, 20), jnp.int32)
    return jax.jit(one).lower(search, state, KEY, drawn).compile().cost_analysis()["flops"]


def test_a_walk_costs_the_same_however_many_are_there():
    "A flock that climbs asks all that are there, at every step; walkers ask nobody."
    assert flops("walking", 200) == flops("walking", 20)
    assert flops("climbing", 200) > 1.1 * flops("climbing", 20)


LIKELIHOODS = {
    "classes": (Softmax(3), lambda out: np.argmax(out + 0 * RNG.gumbel(size=out.shape), 1)),
    "two": (Bernoulli(), lambda out: (out[:, 0] > 0).astype(float)),
    "counts": (Poisson(), lambda out: RNG.poisson(np.exp(out[:, 0])).astype(float)),
    "noise": (NoisyGaussian(), lambda out: out[:, 0] + np.exp(0.5 * out[:, 1] - 1) * RNG.normal(size=len(out))),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_networks_for_every_likelihood(name):
    "Each beats what a constant could say of rows that it has not seen."
    likelihood, draw = LIKELIHOODS[name]
    x = RNG.normal(size=(400, 2))
    y = draw(np.stack([1.5 * x[:, 0], -x[:, 1], x[:, 1]], 1))
    model = mlp(2, (10,), likelihood=likelihood)
    lengths = dict(num_particles=8, first_steps=1500, later_steps=200, learning_rate=0.03)
    result = fit_model(KEY, model, x[:300], y[:300], **lengths)
    constant = fit_model(KEY, model, 0 * x[:300], y[:300], **lengths)
    told = lambda fitted, rows: float(np.mean(fitted.predict(rows).log_likelihood(y[300:])))
    assert told(result, x[300:]) > told(constant, 0 * x[300:]) + 0.1


def test_a_fit_that_predicts_like_a_constant_has_failed():
    x = np.linspace(-2, 2, 60)[:, None]
    y = np.sin(3 * x[:, 0])
    kept = dict(num_particles=3, particles_per_step=3, later_steps=100, learning_rate=0.01, walk=False)
    with pytest.warns(UserWarning, match="no better than one constant"):
        fallen = fit_model(KEY, mlp(1, (50,), jnp.tanh, prior="paper"), x, y, first_steps=3000, **kept)
    assert fallen.verdict == "failed" and "constant" in fallen.report()
    assert fit_model(KEY, mlp(1, (50,), jnp.tanh), x, y, first_steps=1000, **kept).verdict == "trusted"


NOTHING = {  # likelihood, targets, steps, rate: two that the columns say nothing of, two that were not trained
    "noise": (None, lambda rng: rng.normal(size=4000), 1000, 0.01),
    "two classes of chance": (Bernoulli(), lambda rng: rng.integers(0, 2, 4000).astype(float), 1000, 0.01),
    "classes, untrained": (Softmax(3), lambda rng: np.argmax(MANY, 1).astype(float), 50, 1e-6),
    "counts, untrained": (Poisson(), lambda rng: rng.poisson(np.exp(MANY[:, 0])).astype(float), 50, 1e-6),
}
MANY = np.random.default_rng(2).normal(size=(4000, 3))


@pytest.mark.parametrize("name", NOTHING)
def test_who_learns_nothing_has_failed(name):
    "Of the rows that they saw, fifteen weights explain 15 / 8,000 nats by chance: less than a five-hundredth."
    likelihood, draw, steps, rate = NOTHING[name]
    lengths = dict(first_steps=steps, later_steps=50, learning_rate=rate, later_rate=rate, walk=False)
    y = draw(np.random.default_rng(3))
    with pytest.warns(UserWarning, match="no better than one constant"):
        result = fit_model(KEY, mlp(3, (2,), likelihood=likelihood), MANY, y, num_particles=4, **lengths)
    assert result.verdict == "failed" and "the columns say nothing of the target" in result.report()


# Any module -----------------------------------------------------------------------------------------------------------


class Convolution(nnx.Module):
    "Digits as images of eight by eight."

    def __init__(self, rngs):
        self.look = nnx.Conv(1, 8, (3, 3), strides=2, rngs=rngs)
        self.out = nnx.Linear(8 * 16, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(jax.nn.relu(self.look(x.reshape(-1, 8, 8, 1))).reshape(len(x), -1))


class Recurrent(nnx.Module):
    "Flax's own loop over a sequence; it draws a random start that it then has no use for."

    def __init__(self, rngs):
        self.along = nnx.RNN(nnx.GRUCell(1, 4, rngs=rngs))
        self.out = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        return self.out(self.along(x[..., None])[:, -1])


class Averaged(nnx.Module):
    "Batch normalisation by running averages, which stay as they are: a scale and a shift that are inferred."

    def __init__(self, rngs):
        self.inside, self.out = nnx.Linear(2, 3, rngs=rngs), nnx.Linear(3, 1, rngs=rngs)
        self.norm = nnx.BatchNorm(3, use_running_average=True, rngs=rngs)

    def __call__(self, x):
        return self.out(jnp.tanh(self.norm(self.inside(x))))[:, 0]


def test_digits_as_images():
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = images[:700] / 16, labels[:700].astype(float)
    model = bnn(Convolution, 64, likelihood=Softmax(10))
    lengths = dict(num_particles=4, first_steps=400, later_steps=50, batch_size=50, learning_rate=0.02)
    result = fit_model(KEY, model, x[:500], y[:500], **lengths)
    scores = model.scores(result.predict(x[500:]), y[500:])
    assert scores["accuracy"] > 0.8 and scores["brier"] < 0.4 and result.verdict == "trusted"


def test_a_recurrent_network_with_two_outputs():
    "The mean of a sequence, and noise that grows with its last entry."
    x = RNG.normal(size=(200, 4))
    y = x.mean(1) + np.exp(0.5 * x[:, -1] - 1) * RNG.normal(size=200)
    model = bnn(Recurrent, 4, likelihood=NoisyGaussian())
    lengths = dict(num_particles=3, first_steps=300, later_steps=50, batch_size=50, learning_rate=0.03, walk=False)
    result = fit_model(KEY, model, x, y, **lengths)
    predictive = result.predict(x)
    assert predictive.means.shape == predictive.sds.shape == (3, 200) and result.verdict == "trusted"
    assert np.corrcoef(np.log(predictive.sds).mean(0), x[:, -1])[0, 1] > 0.5


def test_batch_norm_by_running_averages_scales_and_shifts():
    model = bnn(Averaged, 2)
    params = model.sample_prior(KEY)
    assert len(ravel(params["net"])) == 9 + 4 + 6  # the averages are no parameters
    net = model.prior.weights(params)
    inside = (X @ net["inside"]["kernel"] + net["inside"]["bias"]) / np.sqrt(1 + 1e-5)
    by_hand = jnp.tanh(inside * net["norm"]["scale"] + net["norm"]["bias"]) @ net["out"]["kernel"] + net["out"]["bias"]
    assert_close(model.network(net, jnp.asarray(X)), by_hand[:, 0], rtol=1e-5)


def test_dropout_that_hardly_drops_is_noticed():
    class Rarely(Dropping):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.drop = nnx.Dropout(0.005, deterministic=False, rngs=rngs)

    with pytest.raises(ValueError, match="switch dropout off"):
        bnn(Rarely, 2)


def memory_to_predict(rows, networks):
    "Bytes that the compiler needs for what so many networks say of so many rows, beside rows and answers."
    model = mlp(10, (200,))
    shape = lambda leaf: jax.ShapeDtypeStruct((networks, *leaf.shape), leaf.dtype)
    particles = jax.tree.map(shape, jax.eval_shape(model.sample_prior, KEY))
    x = jax.ShapeDtypeStruct((rows, 10), jnp.float32)
    compiled = jax.jit(lambda particles, x: all_outputs(model, particles, x)).lower(particles, x).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_predictions_of_many_rows_in_bounded_memory():
    "Twenty networks of 200 units on 100,000 rows would hold 1.6 GB of hidden units; 400 networks twenty times that."
    copies = 3 * 100_000 * (10 + 20) * 4  # of rows and of answers
    assert memory_to_predict(100_000, 20) < copies + 2.5 * 2**16 * 200 * 4 < 1.6e9 / 8
    assert memory_to_predict(20_000, 400) < 3 * 20_000 * (10 + 400) * 4 + 2.5 * 2**16 * 200 * 4
