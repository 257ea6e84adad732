"""The loop: BlackJAX's runner, `fit`, going on, repeating, refining, compiling, counting, telling and stopping."""

import collections
import blackjax, jax, jax.numpy as jnp, numpy as np, pytest
from conftest import gaussian

import mmdfw._loop as loop
from mmdfw._checks import assert_close
from mmdfw.embeddings._cloud import importance_cloud
from mmdfw.embeddings._embedding import ParticleEmbedding, SteinEmbedding, exact_embedding
from mmdfw._fit import fit
from mmdfw._loop import frank_wolfe
from mmdfw.kernels._kernel import IMQ, RBF
from mmdfw.kernels._stein_kernel import Stein
from mmdfw._mixture import eleven_gaussians, gaussian_mixture
from mmdfw._mmd import mmd2_from_parts
from mmdfw.oracles._oracle import GradientOracle, GridOracle, NearParticles, pool_starts
from mmdfw.steps._quadrature import Quadrature
from mmdfw._refinement import refine, weigh
from mmdfw.steps._step import ConstantStep, DecayEarly, LineSearch, OpenLoop

RULES = {
    "constant": ConstantStep(),
    "open loop": OpenLoop(2.0),
    "line search": LineSearch(),
    "decay early": DecayEarly(ConstantStep(), 1, 0.9),
    "free": Quadrature(),
    "sum to one": Quadrature("sum_to_one"),
    "simplex": Quadrature("simplex"),
}
SMALL = dict(max_refinement_steps=50)  # of a fit


def exact_loop(rule, capacity=16):
    "A small loop on the eleven Gaussians with the exact embedding."
    target = eleven_gaussians()
    embedding = exact_embedding(RBF(0.5), target)
    pool = target.sample(jax.random.key(9), 64)
    return frank_wolfe(
        RBF(0.5),
        embedding,
        GradientOracle(pool_starts(embedding, RBF(0.5), pool), num_steps=5, num_starts=2, scale=0.5),
        rule,
        capacity,
    )


@pytest.mark.parametrize("name", list(RULES))
def test_blackjax_runs_every_rule(name):
    loop = exact_loop(RULES[name])
    final, (states, infos) = blackjax.util.run_inference_algorithm(
        jax.random.key(0),
        loop,
        10,
        initial_position=jnp.zeros(2),
        transform=lambda state, info: (state.particles.weights, info),
    )
    assert np.array_equal(infos.count, np.arange(2, 12)) and bool(jnp.all(infos.accepted))
    assert bool(jnp.all(jnp.isfinite(states))) and bool(jnp.all(states[:, 11:] == 0))
    embedding, n = exact_embedding(RBF(0.5), eleven_gaussians()), 11
    x, w = np.asarray(final.particles.position, float)[:n], np.asarray(final.particles.weights, float)[:n]
    gram = np.exp(-0.5 * np.sum((x[:, None] - x) ** 2, -1) / 0.25)
    by_hand = (
        w @ gram @ w
        - 2 * w @ np.asarray(embedding.mean(jnp.asarray(x, jnp.float32)), float)
        + float(embedding.double_integral)
    )
    assert_close(infos.discrepancy[-1], by_hand, rtol=1e-4, atol=1e-6)
    assert np.all(np.isfinite(infos.gap)) and np.all((infos.delta >= 0) & (infos.delta <= 1))
    assert infos.discrepancy[-1] < infos.discrepancy[0]


def test_a_full_state_stays_as_it_is():
    final, infos = blackjax.util.run_inference_algorithm(
        jax.random.key(0),
        exact_loop(Quadrature(), capacity=4),
        6,
        initial_position=jnp.zeros(2),
        transform=lambda state, info: info,
    )
    assert np.array_equal(infos.count, [2, 3, 4, 4, 4, 4]) and np.array_equal(infos.accepted, [True] * 3 + [False] * 3)


def test_the_duality_gap_is_a_certificate(x64):
    "With an oracle that is exact up to a fine mesh, the gap before a step is no smaller than the MMD^2 there."
    target = eleven_gaussians()
    loop = frank_wolfe(
        RBF(0.5),
        exact_embedding(RBF(0.5), target),
        GridOracle([(-3.5, 3.5)] * 2, num_per_side=71),
        LineSearch(),
        capacity=16,
    )
    _, infos = blackjax.util.run_inference_algorithm(
        jax.random.key(0), loop, 12, initial_position=jnp.zeros(2), transform=lambda state, info: info
    )
    assert bool(jnp.all(infos.gap[1:] >= infos.discrepancy[:-1])) and bool(jnp.all(infos.gap[1:] > 0))
    assert bool(jnp.all(jnp.diff(infos.discrepancy) <= 1e-12)), "line search never raises the error"


# fit ------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fits():
    "Fits of 50, of 20, of 20 and then 30 more, and of 20 with another key."
    with jax.enable_x64(False):
        run = lambda seed, n: fit(jax.random.key(seed), gaussian, jnp.zeros(2), num_particles=n, **SMALL)  # noqa: E731
        return {
            "50": run(0, 50),
            "20": run(0, 20),
            "20 again": run(0, 20),
            "20, other key": run(1, 20),
            "20 + 30": run(0, 20).add(30),
        }


def same(a, b):
    return all(
        np.array_equal(x, y, equal_nan=True) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def test_going_on_is_the_same_as_asking_at_once(fits):
    a, b = fits["50"], fits["20 + 30"]
    assert same(a.state, b.state), "the growth"
    assert same(a.history, b.history)
    assert same((a.positions, a.weights, a.discrepancy), (b.positions, b.weights, b.discrepancy)), "the result"
    assert a.evaluations == b.evaluations
    assert np.array_equal(a.state.particles.position[:20], fits["20"].state.particles.position[:20])


def test_keys_decide(fits):
    a, b, c = fits["20"], fits["20 again"], fits["20, other key"]
    assert same((a.positions, a.weights, a.state, a.history), (b.positions, b.weights, b.state, b.history))
    assert not np.allclose(a.positions, c.positions)


def test_history(fits):
    history = fits["50"].history
    assert history._fields == ("count", "discrepancy", "gap", "step_size", "delta", "jitter", "evaluations", "rejected")
    assert all(len(column) == 49 for column in history)
    assert np.array_equal(history.count, np.arange(2, 51))
    assert np.all(np.diff(history.evaluations) >= 0) and np.all(np.diff(history.rejected) >= 0)
    assert np.all(np.isfinite(history.discrepancy)) and np.all(history.discrepancy >= 0)
    assert np.all(np.isnan(history.step_size)), "full correction has no step size"
    assert np.all((history.delta >= 0) & (history.delta <= 1)) and np.all(history.jitter >= 0)
    assert history.evaluations[-1] <= fits["50"].evaluations


def test_refinement_helps(fits):
    result = fits["50"]
    assert result.discrepancy <= result.history.discrepancy[-1]
    assert np.all(np.diff(result.refinement.objective) <= 0)


def test_pytree_is_the_vector_in_other_clothes(fits):
    "A dict with a scalar and an array leaf gives the vector's particles, bit for bit."

    def dressed(p):
        return gaussian(jnp.concatenate([p["a"][None], p["b"]]))

    tree = fit(jax.random.key(0), dressed, dict(b=jnp.zeros(1), a=jnp.zeros(())), num_particles=20, **SMALL)
    assert tree.particles["a"].shape == (20,) and tree.particles["b"].shape == (20, 1)
    assert np.array_equal(tree.particles["a"], tree.positions[:, 0]) and np.array_equal(
        tree.particles["b"], tree.positions[:, 1:]
    )
    assert np.array_equal(tree.positions, fits["20"].positions) and np.array_equal(tree.weights, fits["20"].weights)
    mean = tree.expectation(lambda p: p["a"])
    assert_close(mean.mean, fits["20"].expectation(lambda x: x[0]).mean, rtol=1e-5)
    drawn = tree.sample(jax.random.key(1), 7)
    assert drawn["a"].shape == (7,) and drawn["b"].shape == (7, 1)


def test_expectations_of_polynomials(gaussian_fit):
    "Mean (1, -1), covariance [[1, 0.3], [0.3, 0.25]]: within a few reported standard deviations, and near."
    truth = {"x": 1.0, "y": -1.0, "xx": 2.0, "xy": -0.7, "yy": 1.25, "one": 1.0}
    forms = {
        "x": lambda x: x[0],
        "y": lambda x: x[1],
        "xx": lambda x: x[0] ** 2,
        "xy": lambda x: x[0] * x[1],
        "yy": lambda x: x[1] ** 2,
        "one": lambda x: jnp.ones(()),
    }
    for name, f in forms.items():
        believed = gaussian_fit.expectation(f)
        mean, sd = float(believed.mean), float(believed.sd)
        assert np.isfinite(sd) and abs(mean - truth[name]) <= 4 * sd + 1e-4, (name, mean, sd)
        assert abs(mean - truth[name]) < 0.1, (name, mean)
    both = gaussian_fit.expectation(lambda x: x)
    assert both.mean.shape == both.sd.shape == (2,)


def test_batches_stop_at_the_number_asked_for():
    "An oracle that finds three points at once still gives ten particles when ten are asked for."
    target = eleven_gaussians()
    embedding = exact_embedding(RBF(0.5), target)
    oracle = GradientOracle(
        pool_starts(embedding, embedding.kernel, target.sample(jax.random.key(0), 64)),
        num_steps=5,
        num_starts=2,
        particles_per_step=3,
        scale=0.5,
    )
    result = fit(
        jax.random.key(0),
        target.logdensity,
        jnp.zeros(2),
        embedding=embedding,
        oracle=oracle,
        num_particles=9,
        refine=False,
    )
    assert len(result) == 9


# Refinement -----------------------------------------------------------------------------------------------------------


def mmd2_by_hand(kernel_h, mixture, x, w):
    "In numpy and float64, from the closed form for round components."
    x, w = np.asarray(x, float), np.asarray(w, float)

    def mean(points, extra):
        total = kernel_h**2 + extra
        r2 = np.sum((points[:, None] - np.asarray(mixture.means, float)) ** 2, -1)
        return np.exp(-0.5 * r2 / total) @ np.asarray(mixture.weights, float) * kernel_h**2 / total

    sd2 = float(mixture.roots[0, 0, 0]) ** 2
    double = mean(np.asarray(mixture.means, float), 2 * sd2) @ np.asarray(mixture.weights, float)
    gram = np.exp(-0.5 * np.sum((x[:, None] - x) ** 2, -1) / kernel_h**2)
    return w @ gram @ w - 2 * w @ mean(x, sd2) + double


STARTING_POINTS = {
    "one": lambda seed: np.random.default_rng(seed).normal(size=(1, 2)),
    "two": lambda seed: np.random.default_rng(seed).normal(size=(2, 2)),
    "duplicates": lambda seed: np.repeat(np.random.default_rng(seed).normal(size=(4, 2)), 2, 0),
    "eight": lambda seed: 2 * np.random.default_rng(seed).normal(size=(8, 2)),
    "far away": lambda seed: 30 + np.random.default_rng(seed).normal(size=(2, 2)),
}


@pytest.mark.parametrize("points", list(STARTING_POINTS))
def test_refinement_never_raises_the_objective(points, dtype):
    target = gaussian_mixture(jnp.array([[0.0, 0.0], [2.0, 1.0], [-1.0, 1.5]], dtype), sd=0.5)
    kernel = RBF(0.7)
    embedding = exact_embedding(kernel, target)
    for seed in range(3):
        x = jnp.asarray(STARTING_POINTS[points](seed), dtype)
        before = weigh(kernel, embedding, x, Quadrature(), jnp.full(len(x), 1 / len(x), dtype))
        done = refine(kernel, embedding, x, max_steps=50)
        assert (
            done.positions.dtype == dtype
            and bool(jnp.all(jnp.isfinite(done.positions)))
            and bool(jnp.all(jnp.isfinite(done.weighed.weights)))
        )
        assert np.all(np.diff(done.objective) <= 0)
        was, now = (
            mmd2_by_hand(0.7, target, *pair) for pair in ((x, before.weights), (done.positions, done.weighed.weights))
        )
        assert now <= was + 20 * float(jnp.finfo(dtype).eps) * len(x)


def test_refinement_with_weights_that_are_kept():
    target = gaussian_mixture(jnp.array([[0.0, 0.0], [2.0, 1.0], [-1.0, 1.5]]), sd=0.5)
    embedding, x = exact_embedding(RBF(0.7), target), jnp.asarray(STARTING_POINTS["eight"](0), jnp.float32)
    done = refine(RBF(0.7), embedding, x, rule=ConstantStep(), max_steps=50)
    assert_close(done.weighed.weights, np.full(8, 1 / 8), rtol=1e-6)
    uniform = np.full(8, 1 / 8)
    assert mmd2_by_hand(0.7, target, done.positions, uniform) < 0.5 * mmd2_by_hand(0.7, target, x, uniform)


# Compilation ----------------------------------------------------------------------------------------------------------


def test_adding_200_particles_compiles_the_step_twice():
    "The arrays double from 128 to 256, so 200 more particles need ceil(log2(201 / 128)) + 1 = 2 compilations."
    target = eleven_gaussians()
    embedding = exact_embedding(RBF(0.5), target)
    oracle = GradientOracle(
        pool_starts(embedding, embedding.kernel, target.sample(jax.random.key(0), 64)),
        num_steps=2,
        num_starts=2,
        scale=0.5,
    )
    run = lambda: fit(
        jax.random.key(0),
        target.logdensity,
        jnp.zeros(2),
        embedding=embedding,
        oracle=oracle,
        num_particles=1,
        refine=False,
    )  # noqa: E731
    before = loop.jitted_ask._cache_size()
    first = run()
    assert loop.jitted_ask._cache_size() == before, "one particle needs no step"
    grown = first.add(200)
    assert len(grown) == 201
    assert loop.jitted_ask._cache_size() - before == 2 <= np.log2(200)
    run().add(200)
    assert loop.jitted_ask._cache_size() - before == 2, "a second run compiles nothing"


# Counting -------------------------------------------------------------------------------------------------------------


class Counted:
    """A log density that knows how often it was looked at, whatever the code around it claims.

    Each log density, each score and each Hessian-vector product is one: custom derivative rules put a callback beside
    each of the three, and a callback under `vmap` runs once for each row. A value that `value_and_grad` takes
    along with the score is not seen, so where the library counts both (the search for the mode) it counts more.
    """

    def __init__(self, f):
        self.made = collections.Counter()
        self.places = set()
        tick = lambda what: lambda x: (self.made.update([what]), self.places.add((what, np.asarray(x).tobytes())))  # noqa: E731

        @jax.custom_jvp
        def score(x):
            jax.debug.callback(tick("score"), x)
            return jax.grad(f)(x)

        @score.defjvp
        def _(primals, tangents):
            jax.debug.callback(tick("product"), primals[0])
            return score(primals[0]), jax.jvp(jax.grad(f), primals, tangents)[1]

        @jax.custom_jvp
        def value(x):
            jax.debug.callback(tick("value"), x)
            return f(x)

        @value.defjvp
        def _(primals, tangents):
            return f(primals[0]), score(primals[0]) @ tangents[0]

        self.logdensity = value

    @property
    def total(self):
        jax.effects_barrier()
        return sum(self.made.values())

    @property
    def distinct(self):
        "Looks at different places: a batch is filled up by repeating its last point."
        jax.effects_barrier()
        return len(self.places)


def test_the_counter_counts():
    target = Counted(gaussian)
    x = jnp.ones((5, 2))
    jax.jit(jax.vmap(target.logdensity))(x)
    assert target.total == 5
    jax.jit(jax.vmap(jax.grad(target.logdensity)))(x)
    assert target.total == 10
    jax.jit(jax.grad(lambda x: jnp.sum(jax.vmap(jax.grad(target.logdensity))(x) ** 2)))(x)
    assert target.total == 20, "a score and a Hessian-vector product each"


def test_cloud_evaluations_are_those_made():
    target = Counted(gaussian)
    cloud = importance_cloud(jax.random.key(0), target.logdensity, jnp.zeros(2), num_evaluations=128)
    assert cloud.evaluations == 128 == target.distinct


@pytest.mark.parametrize("name", ["left out", "included", "alone", "stein"])
def test_growth_evaluations_are_those_made(name):
    target = Counted(gaussian)
    score = jax.grad(target.logdensity)
    kernel = Stein(IMQ(1.0), score) if name == "stein" else RBF(1.0)
    embedding = SteinEmbedding(kernel) if name == "stein" else ParticleEmbedding(kernel, score, name)
    loop = frank_wolfe(
        kernel, embedding, GradientOracle(NearParticles(0.5), num_steps=3, num_starts=2), ConstantStep(), capacity=8
    )
    state = jax.jit(loop.init)(jnp.zeros(2))
    assert int(state.evaluations) == target.total, "the first particle"
    for i in range(2):
        state, info = jax.jit(loop.step)(jax.random.key(i), state)
    assert int(state.particles.count) == 3
    assert int(info.evaluations) == int(state.evaluations) == target.total


@pytest.mark.filterwarnings("ignore:this result is")  # a small one is enough to count
@pytest.mark.parametrize("embedding", ["cloud", "stein"])
def test_fit_owns_up_to_every_evaluation(embedding):
    "Refinement and start included: the count is never below what was made, nor far above."
    target = Counted(gaussian)
    oracle = GradientOracle(NearParticles(0.5), num_steps=3, num_starts=2)
    result = fit(
        jax.random.key(0),
        target.logdensity,
        jnp.zeros(2),
        embedding=embedding,
        oracle=oracle,
        num_particles=3,
        num_evaluations=128,
        max_refinement_steps=3,
    )
    assert target.distinct <= result.evaluations <= 1.4 * target.distinct


# Telling and stopping -------------------------------------------------------------------------------------------------

QUICK = dict(num_particles=4, max_refinement_steps=50)


def test_progress_is_off_in_tests_and_on_when_asked(capsys):
    fit(jax.random.key(0), gaussian, jnp.zeros(2), **QUICK)
    assert capsys.readouterr() == ("", "")
    fit(jax.random.key(0), gaussian, jnp.zeros(2), progress=True, **QUICK)
    out, err = capsys.readouterr()
    assert out == "" and "growing" in err and "refining" in err and "4/4" in err
    fit(jax.random.key(0), gaussian, jnp.zeros(2), progress=False, **QUICK)
    assert capsys.readouterr().err == ""


def test_interrupted_growth_keeps_what_it_has(monkeypatch, fits):
    real, calls = loop.next_step, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) > 5:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(loop, "next_step", interrupted)
    with pytest.warns(UserWarning, match="interrupted.* 6 .*20"):
        stopped = fit(jax.random.key(0), gaussian, jnp.zeros(2), num_particles=20)
    monkeypatch.setattr(loop, "next_step", real)
    assert len(stopped) == 6 and len(stopped.history.count) == 5 and bool(jnp.all(jnp.isfinite(stopped.weights)))
    gone_on = stopped.add(14)
    assert same(gone_on.state, fits["20"].state), "and goes on as if nothing had happened"


def test_the_stated_discrepancy_is_that_of_the_result(gaussian_fit):
    parts, x, w = gaussian_fit.parts, gaussian_fit.positions, gaussian_fit.weights
    gram, means = parts.kernel.matrix(x, x), parts.embedding.mean(x, None)
    assert_close(
        mmd2_from_parts(w, gram, means, parts.embedding.double_integral),
        np.float32(gaussian_fit.discrepancy),
        rtol=0.05,
        atol=1e-6,
    )
