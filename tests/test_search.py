"""Objectives against brute force, every search against the same contract, and what they refuse."""

from functools import lru_cache
import jax, jax.numpy as jnp, numpy as np, pytest
from scipy.optimize import minimize
from test_gpu import assert_sound, lowered

from mmdfw._checks import assert_close, pytree_dataclass
from mmdfw.embeddings._embedding import Embedding, ParticleEmbedding, SteinEmbedding, exact_embedding
from mmdfw._loop import Components, empty_state, init, step
from mmdfw.kernels._kernel import IMQ, RBF
from mmdfw.kernels._stein_kernel import Stein
from mmdfw._mixture import gaussian_mixture
from mmdfw._mmd import mmd2_from_parts
from mmdfw.oracles._oracle import (
    GradientOracle,
    GridOracle,
    NearParticles,
    Problem,
    lmo_value,
    objective_gradient,
    pool_starts,
)
from mmdfw.steps._quadrature import Quadrature
from mmdfw.oracles._search import (
    MonteCarloOracle,
    NelderMeadOracle,
    PoolOracle,
    draw_around,
    greedy_value,
    nelder_mead,
    quadrature_value,
)
from mmdfw.steps._step import BlendedPairwise, ConstantStep, LineSearch

BOX = [(-2.0, 4.0), (-2.0, 3.0)]
KERNEL = RBF(0.7)
OBJECTIVES = {"linear": lmo_value, "greedy": greedy_value, "quadrature": quadrature_value}


def target(dtype=jnp.float32):
    return gaussian_mixture(jnp.array([[0.0, 0.0], [2.0, 1.0]], dtype), sd=0.5)


def points(num=6, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(num, 2)), dtype)


def score(x):
    return jax.grad(lambda x: -0.5 * jnp.sum(x**2) - 0.1 * jnp.sum(x**4))(x)


STEIN = Stein(IMQ(0.7), score)


exact = jax.jit(lambda mixture: exact_embedding(KERNEL, mixture))
start = jax.jit(lambda parts, x: init(parts, x, 8))
empty = jax.jit(lambda parts, like: empty_state(parts, 16, like))
grow = jax.jit(
    lambda parts, state: jax.lax.scan(lambda s, k: step(parts, k, s), state, jax.random.split(jax.random.key(0), 15))
)


def problem_after(parts, x):
    state = start(parts, x)
    return Problem(parts.kernel, parts.embedding, state.particles, state.factor, state.means)


@lru_cache
def problem_of(dtype=jnp.float32):
    "Five particles with free weights, in a state with padding."
    return problem_after(Components(KERNEL, exact(target(dtype)), None, Quadrature()), points(5, dtype=dtype))


@lru_cache
def stein_problem():
    return problem_after(Components(STEIN, SteinEmbedding(STEIN), None, ConstantStep()), points(5))


@lru_cache
def pool(dtype=jnp.float32):
    return pool_starts(exact(target(dtype)), KERNEL, points(40, 3, dtype))


SEARCHES = {
    "grid": lambda f: GridOracle(BOX, 9, objective=f),
    "gradient": lambda f: GradientOracle(NearParticles(0.5), num_steps=5, num_starts=3, scale=0.7, objective=f),
    "monte carlo": lambda f: MonteCarloOracle(num_bases=4, num_draws=5, scale=0.5, objective=f),
    "monte carlo in a box": lambda f: MonteCarloOracle(BOX, 4, 5, objective=f),
    "nelder-mead": lambda f: NelderMeadOracle(NearParticles(0.5), 8, 3, scale=0.5, objective=f),
    "nelder-mead in a box": lambda f: NelderMeadOracle(NearParticles(0.5), 8, 3, scale=0.5, box=BOX, objective=f),
    "pool": lambda f: PoolOracle(pool(), objective=f),
    "pool without replacement": lambda f: PoolOracle(pool(), replace=False, objective=f),
}
ask = jax.jit(lambda oracle, key, problem: oracle(key, problem))


# Objectives -----------------------------------------------------------------------------------------------------------


def test_greedy_value_is_what_a_constant_step_ends_at(x64):
    problem, x = problem_of(jnp.float64), points(30, 1, jnp.float64)

    def after(new):
        both = jnp.concatenate([problem.particles.position[:5], new[None]])
        weights = jnp.concatenate([problem.particles.weights[:5] * 5 / 6, jnp.full(1, 1 / 6)])
        return mmd2_from_parts(
            weights, KERNEL.matrix(both, both), problem.embedding.mean(both), problem.embedding.double_integral
        )

    tried = jax.jit(jax.vmap(after))(x)
    value = jax.jit(greedy_value)(problem, x)
    assert_close(tried - tried[0], (value - value[0]) / 3, rtol=1e-8, atol=1e-13)


def test_greedy_value_of_a_stein_kernel():
    problem, x = stein_problem(), points(30, 1)
    gram = jax.jit(problem.kernel.matrix)(x, jnp.concatenate([problem.particles.position[:5], x]))
    by_hand = jnp.sum(gram[:, :5], 1) + jnp.diag(gram[:, 5:]) / 2
    assert_close(jax.jit(greedy_value)(problem, x), by_hand / 6, rtol=1e-4, atol=1e-5)


def test_greedy_value_of_the_first_point():
    parts = Components(KERNEL, exact(target()), None, ConstantStep())
    problem = Problem(KERNEL, parts.embedding, empty(parts, jnp.zeros(2, jnp.float32)).particles)
    value, mean = jax.jit(lambda x: (greedy_value(problem, x), parts.embedding.mean(x)))(points())
    assert_close(value, 0.5 - mean, rtol=1e-6)


def test_quadrature_value_is_what_free_weights_gain(x64):
    problem, x = problem_of(jnp.float64), points(30, 1, jnp.float64)

    def error(at):
        z = problem.embedding.mean(at)
        return -z @ jnp.linalg.solve(KERNEL.matrix(at, at), z)

    old = problem.particles.position[:5]
    gained = jax.jit(jax.vmap(lambda new: error(jnp.concatenate([old, new[None]])) - error(old)))(x)
    assert_close(jax.jit(quadrature_value)(problem, x), gained, rtol=1e-6, atol=1e-12)


def test_quadrature_value_near_a_particle_in_float32():
    problem = problem_of()
    near = problem.particles.position[0] + jnp.array([0.0, 1e-7, 1e-5, 1e-4, 1e-3, 1e-2])[:, None].astype(jnp.float32)
    value, slope = jax.jit(lambda x: (quadrature_value(problem, x), objective_gradient(quadrature_value, problem, x)))(
        near
    )
    assert np.all(np.isfinite(value)) and np.all(np.isfinite(slope)) and np.all(np.abs(value) < 0.1) and value[0] == 0


@pytest.mark.parametrize("name", ["greedy", "quadrature"])
def test_objective_gradient(name, x64):
    problem = problem_of(jnp.float64)
    x = points(5, 1, jnp.float64)
    h = 1e-5
    f = jax.jit(OBJECTIVES[name])
    numeric = np.stack([(f(problem, x + e) - f(problem, x - e)) / (2 * h) for e in h * np.eye(2)], 1)
    assert_close(
        jax.jit(lambda p, x: objective_gradient(OBJECTIVES[name], p, x))(problem, x), numeric, rtol=1e-5, atol=1e-8
    )


def test_stein_gradient_forms_no_hessian():
    kernel = Stein(IMQ(0.7), score)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 7)), jnp.float32)
    state = init(Components(kernel, SteinEmbedding(kernel), None, ConstantStep()), x, 4)
    gradient = lambda x: objective_gradient(greedy_value, Problem(kernel, SteinEmbedding(kernel), state.particles), x)  # noqa: E731
    assert "7,7]" not in str(jax.make_jaxpr(gradient)(x)) and "7,7]" in str(
        jax.make_jaxpr(jax.vmap(jax.jacrev(score)))(x)
    )


def test_objectives_refuse():
    problem, x = problem_of(), points()
    moving = problem._replace(embedding=ParticleEmbedding(KERNEL, score))
    for oracle in (
        GradientOracle(NearParticles(), objective=greedy_value),
        GradientOracle(NearParticles(), objective=quadrature_value),
    ):
        with pytest.raises(ValueError, match="ParticleEmbedding estimates its slopes"):
            oracle(jax.random.key(0), moving)
    with pytest.raises(ValueError, match="needs the factor"):
        quadrature_value(Problem(*problem[:3]), x)
    with pytest.raises(ValueError, match="use greedy_value"):
        quadrature_value(stein_problem(), x)
    with pytest.raises(ValueError, match="got particles_per_step 3"):
        GradientOracle(NearParticles(), particles_per_step=3, objective=greedy_value)


# Nelder-Mead ----------------------------------------------------------------------------------------------------------


def rosenbrock(x):
    return jnp.sum(100 * (x[..., 1:] - x[..., :-1] ** 2) ** 2 + (1 - x[..., :-1]) ** 2, -1)


def numpy_rosenbrock(x):
    return np.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)


@pytest.mark.parametrize("d", [2, 4])
def test_nelder_mead_walks_as_scipy_does(d, x64):
    first = np.linspace(-1.2, 1.0, d)
    run = jax.jit(lambda first, steps: nelder_mead(rosenbrock, first, 0.4, steps))
    for steps in (1, 3, 10, 40):
        simplex = np.concatenate([first[None], first + 0.4 * np.eye(d)])
        theirs = minimize(
            numpy_rosenbrock,
            first,
            method="Nelder-Mead",
            options=dict(initial_simplex=simplex, maxiter=steps + 1, xatol=0, fatol=0),
        )
        corners, values = run(first, steps)
        assert_close(corners, theirs.final_simplex[0], rtol=1e-8, atol=1e-10)
        assert_close(values, theirs.final_simplex[1], rtol=1e-7)


def test_nelder_mead_turns_away_from_what_is_not_finite(x64):
    f = lambda x: jnp.where(x[:, 0] < 0.5, jnp.nan, jnp.sum(x**2, 1))  # noqa: E731
    corners, values = jax.jit(lambda x: nelder_mead(f, x, 0.3, 200))(jnp.array([2.0, 1.0]))
    assert_close(values[0], 0.25, rtol=1e-3)
    lost = jax.jit(lambda x: nelder_mead(f, x, 0.3, 10))(jnp.array([-5.0, 1.0]))[1]
    assert np.all(np.isinf(lost))


# Searches -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, objective",
    [
        ("grid", "quadrature"),
        ("gradient", "greedy"),
        ("gradient", "quadrature"),
        ("monte carlo", "quadrature"),
        ("monte carlo in a box", "greedy"),
        ("nelder-mead", "quadrature"),
        ("nelder-mead in a box", "linear"),
        ("pool", "linear"),
        ("pool without replacement", "greedy"),
    ],
)
def test_search(name, objective):
    "Shapes, the linear value at the answer, the box, and the same answer for the same key."
    problem = problem_of()
    oracle = SEARCHES[name](OBJECTIVES[objective])
    answer = ask(oracle, jax.random.key(1), problem)
    assert (
        answer.points.shape == (1, 2)
        and answer.points.dtype == jnp.float32
        and answer.values.shape == answer.valid.shape == (1,)
    )
    assert bool(answer.valid[0]) and int(answer.evaluations) == 0 and int(answer.rejected) == 0
    assert_close(answer.values, jax.jit(lmo_value)(problem, answer.points), rtol=1e-4, atol=1e-5)
    assert float(answer.best_known) <= float(answer.values[0]) + 1e-6
    if "box" in name:
        assert all(low <= x <= high for x, (low, high) in zip(answer.points[0], BOX))
    if "pool" in name:
        assert np.any(np.all(np.asarray(pool().points) == answer.points[0], 1))
    again = ask(oracle, jax.random.key(1), problem)
    assert np.array_equal(again.points, answer.points) and np.array_equal(again.values, answer.values)


def test_pool_takes_the_best_by_its_objective():
    problem = problem_of()
    x = pool().points
    for name, objective in OBJECTIVES.items():
        best = int(jnp.argmin(jax.jit(objective)(problem, x)))
        assert np.array_equal(ask(SEARCHES["pool"](objective), jax.random.key(0), problem).points[0], x[best]), name


def test_searches_count_target_evaluations():
    counts = {"monte carlo": 20, "nelder-mead": 3 * (3 + 8 * 6 + 1), "grid": 81}
    for name, count in counts.items():
        assert int(ask(SEARCHES[name](greedy_value), jax.random.key(0), stein_problem()).evaluations) == count, name


def test_pool_without_replacement_runs_dry():
    embedding = exact(target())
    parts = Components(
        KERNEL, embedding, PoolOracle(pool_starts(embedding, KERNEL, points(3)), replace=False), ConstantStep()
    )
    state, info = grow(parts, empty(parts, jnp.zeros(2, jnp.float32)))
    assert (
        info.accepted.tolist() == 3 * [True] + 12 * [False] and int(info.count[-1]) == 3 and int(info.rejected[-1]) == 0
    )
    assert sorted(state.particles.position[:3].tolist()) == sorted(points(3).tolist())


def test_monte_carlo_starts_anywhere_in_the_box():
    parts = Components(KERNEL, exact(target()), None, ConstantStep())
    problem = Problem(KERNEL, parts.embedding, empty(parts, jnp.full(2, 100.0, jnp.float32)).particles)
    x = np.asarray(jax.jit(lambda: draw_around(MonteCarloOracle(BOX), jax.random.key(0), problem))())
    assert_close(x.mean(0), [1.0, 0.5], atol=0.4)
    assert np.all((x >= [-2, -2]) & (x <= [4, 3]))


@pytree_dataclass
class Broken(Embedding):
    "NaN to the right of `above`."

    above: float

    def mean(self, points, particles=None):
        return jnp.where(points[:, 0] > self.above, jnp.nan, -points[:, 0])


@pytest.mark.parametrize("name", ["monte carlo", "nelder-mead", "pool"])
def test_searches_meet_values_that_are_not_finite(name):
    make = {
        "pool": lambda above: PoolOracle(pool_starts(Broken(above), KERNEL, points(40, 3))),
        "monte carlo": lambda above: MonteCarloOracle(num_bases=4, num_draws=5),
        "nelder-mead": lambda above: NelderMeadOracle(NearParticles(1.0), 8, 12),
    }[name]
    half, none = (
        ask(make(above), jax.random.key(2), problem_of()._replace(embedding=Broken(above))) for above in (0.2, -50.0)
    )
    assert bool(half.valid[0]) and bool(jnp.isfinite(half.values[0])) and float(half.points[0, 0]) <= 0.2
    assert not bool(none.valid[0]) and int(none.rejected) == {"monte carlo": 20, "nelder-mead": 12, "pool": 40}[name]


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: MonteCarloOracle([(1, 0)]), r"got \[\(1, 0\)\]"),
        (lambda: MonteCarloOracle(num_bases=0), "num_bases must be .* got 0"),
        (lambda: MonteCarloOracle(num_draws=2.5), "got 2.5"),
        (lambda: MonteCarloOracle(scale=0.0), "scale must be positive and finite, got 0.0"),
        (lambda: MonteCarloOracle(objective="greedy"), "got 'greedy'"),
        (lambda: GridOracle(BOX, objective=None), "got None"),
        (lambda: NelderMeadOracle(NearParticles(), num_steps=0), "num_steps must be .* got 0"),
        (lambda: NelderMeadOracle(NearParticles(), num_starts=0), "got 0"),
        (lambda: NelderMeadOracle(NearParticles(), box=[(0, jnp.inf)]), "box must be"),
        (lambda: PoolOracle(points()), "pool_starts"),
        (lambda: pool_starts(SteinEmbedding(STEIN), STEIN, jnp.zeros((0, 2))), r"got shape \(0, 2\)"),
        (lambda: BlendedPairwise(0), "max_moves must be .* got 0"),
        (lambda: MonteCarloOracle([(-1, 1)])(jax.random.key(0), problem_of()), "the particles have 2"),
        (
            lambda: NelderMeadOracle(NearParticles(), box=[(-1, 1)] * 3)(jax.random.key(0), problem_of()),
            "the particles have 2",
        ),
        (
            lambda: MonteCarloOracle()(
                jax.random.key(0), problem_of()._replace(embedding=ParticleEmbedding(KERNEL, score))
            ),
            "MonteCarloOracle cannot use it",
        ),
    ],
)
def test_bad_input(make, said):
    with pytest.raises(ValueError, match=said):
        make()


# In the loop ----------------------------------------------------------------------------------------------------------


def exact_parts(oracle, rule=ConstantStep()):
    return Components(KERNEL, exact(target()), oracle, rule)  # noqa: B008


def stein_parts(oracle, rule=ConstantStep()):
    return Components(STEIN, SteinEmbedding(STEIN), oracle, rule)  # noqa: B008


LOOPS = {
    "grid, greedy": lambda: exact_parts(SEARCHES["grid"](greedy_value)),
    "monte carlo": lambda: stein_parts(SEARCHES["monte carlo in a box"](greedy_value)),
    "nelder-mead": lambda: stein_parts(SEARCHES["nelder-mead in a box"](lmo_value)),
    "gradient, greedy": lambda: stein_parts(SEARCHES["gradient"](greedy_value)),
    "pool, quadrature": lambda: exact_parts(SEARCHES["pool without replacement"](quadrature_value), Quadrature()),
    "pool, blended": lambda: exact_parts(SEARCHES["pool"](lmo_value), BlendedPairwise()),
}


@pytest.mark.parametrize("name", list(LOOPS))
def test_lowers_for_cuda(name):
    with jax.enable_x64(False):
        parts = LOOPS[name]()
        shapes = jax.eval_shape(lambda x: init(parts, x, 16), points(1))
        state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        data = jax.random.key_data(jax.random.key(0))
        assert_sound(
            lowered(
                lambda data, state: step(parts, jax.random.wrap_key_data(data), state), (data, state), ["cpu", "cuda"]
            )
        )


def test_sequential_quadrature_beats_herding_on_a_pool():
    ends = []
    for objective, rule in (
        (lmo_value, ConstantStep()),
        (greedy_value, ConstantStep()),
        (quadrature_value, Quadrature()),
    ):
        parts = exact_parts(
            PoolOracle(pool_starts(exact(target()), KERNEL, points(200, 4) + points(200, 5)), objective=objective), rule
        )
        ends.append(float(grow(parts, empty(parts, jnp.zeros(2, jnp.float32)))[1].discrepancy[-1]))
    assert ends[0] > ends[1] > ends[2]


def test_blended_pairwise_never_rises_and_stays_on_the_simplex(x64):
    ends = {}
    for rule in (LineSearch(), BlendedPairwise()):
        parts = Components(KERNEL, exact(target(jnp.float64)), PoolOracle(pool(jnp.float64)), rule)
        state, info = grow(parts, empty(parts, jnp.zeros(2)))
        assert np.all(np.diff(info.discrepancy) <= 1e-12) and np.all(state.particles.weights >= 0)
        assert_close(jnp.sum(state.particles.weights), 1.0, rtol=1e-9)
        ends[type(rule)] = float(info.discrepancy[-1])
    assert ends[BlendedPairwise] <= ends[LineSearch]
