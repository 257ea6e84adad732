"""Every kernel, embedding, step rule and oracle keeps the contract of its noun."""

import dataclasses
import jax, jax.numpy as jnp, numpy as np, pytest

from mmdfw.oracles._cache import cached_oracle
from mmdfw._checks import assert_close, pytree_dataclass
from mmdfw.contracts import (
    ask,
    check_embedding,
    check_kernel,
    check_oracle,
    check_step_rule,
    example_particles,
    example_problem,
    example_system,
    pair_value,
)
from mmdfw.embeddings._embedding import (
    Embedding,
    ParticleEmbedding,
    SteinEmbedding,
    exact_embedding,
    mmd2_to,
    reference_embedding,
)
from mmdfw._loop import Components, init
from mmdfw.kernels._fourier import random_fourier
from mmdfw.kernels._kernel import IMQ, RBF, InverseLog, Kernel, Radial
from mmdfw.kernels._stein_kernel import ScoreIMQ, Stein, stein_gram_any
from mmdfw.oracles._lazy import LazyOracle
from mmdfw._mixture import gaussian_mixture
from mmdfw._mmd import mmd2
from mmdfw.oracles._oracle import (
    GradientOracle,
    GridOracle,
    NearParticles,
    NearPoint,
    PriorStarts,
    Problem,
    lmo_value,
    pool_starts,
)
from mmdfw.steps._quadrature import Quadrature
from mmdfw.steps._step import BlendedPairwise, ConstantStep, DecayEarly, GreedyHerding, LineSearch, OpenLoop


def logdensity(x):
    return -0.5 * jnp.sum(x**2) - 0.1 * jnp.sum(x**4) + 0.3 * jnp.sin(x[0] * x[1])


def score(x):
    return jax.grad(logdensity)(x)


def ard(dtype):
    return jnp.array([0.7, 1.0, 1.6], dtype)


BASES = {
    "rbf": lambda t: RBF(0.8),
    "rbf ard": lambda t: RBF(ard(t)),
    "imq": lambda t: IMQ(0.8, 1.2, -0.3),
    "imq ard": lambda t: IMQ(ard(t)),
    "inverse log": lambda t: InverseLog(0.8, 1.5),
    "inverse log ard": lambda t: InverseLog(ard(t)),
    "score imq": lambda t: ScoreIMQ(score, 0.8),
    "score imq ard": lambda t: ScoreIMQ(score, ard(t)),
    "fourier": lambda t: random_fourier(jax.random.key(7), 40, 3, 0.8),
    "fourier ard": lambda t: random_fourier(jax.random.key(7), 40, 3, ard(t)),
}
KERNELS = BASES | {f"stein over {name}": (lambda t, make=make: Stein(make(t), score)) for name, make in BASES.items()}


@pytest.fixture(params=list(KERNELS))
def make_kernel(request):
    return KERNELS[request.param]


def points(dtype, seed=0, num=6):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(num, 3)), dtype)


def tolerance(dtype):
    return 2e-5 if dtype == jnp.float32 else 1e-11


def by_pairs(f, x, y):
    return jax.jit(jax.vmap(jax.vmap(f, (None, 0)), (0, None)))(x, y)


def stein_value(kernel, x, y):
    "The Stein kernel from its definition, by automatic differentiation of the base's value for one pair."
    base = kernel.base
    slope_x, slope_y = jax.grad(base, (0, 1))(x, y)
    mixed = jnp.trace(jax.jacfwd(jax.grad(base, 0), 1)(x, y))
    return mixed + slope_x @ score(y) + slope_y @ score(x) + base(x, y) * (score(x) @ score(y))


def test_kernel(make_kernel):
    kernel = make_kernel(jnp.float32)
    check_kernel(kernel, points(jnp.float32, num=7), stein_value if isinstance(kernel, Stein) else pair_value)


def test_kernel_takes_features_once(make_kernel):
    "After `features`, the target is not looked at again: a score that raises does no harm."

    def forbidden(_):
        raise AssertionError("the score was taken again")

    kernel, x = make_kernel(jnp.float32), points(jnp.float32)
    features = jax.jit(lambda k, x: k.features(x))(kernel, x)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(features)} == {6}
    blind = dataclasses.replace(kernel, score_fn=forbidden) if hasattr(kernel, "score_fn") else kernel
    if isinstance(getattr(blind, "base", None), ScoreIMQ):
        blind = dataclasses.replace(blind, base=dataclasses.replace(blind.base, score_fn=forbidden))
    jax.eval_shape(lambda f: (blind.gram(f, f), blind.diagonal(f)), features)
    assert kernel.evaluations_per_point == (1 if hasattr(kernel, "score_fn") else 0)


@pytest.mark.parametrize("make", [RBF, IMQ, InverseLog])
def test_kernel_of_gradients(make):
    "A gradient in the kernel's own numbers is a kernel-shaped pytree whose entries may have any sign."
    x = points(jnp.float32)
    slope = jax.grad(lambda kernel: -jnp.sum(kernel.matrix(x, x)))(make(0.8))
    assert all(np.isfinite(leaf) for leaf in jax.tree.leaves(slope))
    jax.tree.map(lambda leaf: -leaf, slope)


def test_squared_distances_keep_their_digits_far_from_the_origin():
    "float32 at 10^4 from the origin: the common shift keeps the digits (division by a power of two is exact)."
    far = jnp.asarray(np.random.default_rng(0).normal(size=(20, 5)) + 2.0**13, jnp.float32)
    exact = np.exp(-0.5 * np.sum((np.asarray(far, float)[:, None] - np.asarray(far, float)) ** 2, -1) / 2.0**2)
    assert_close(RBF(2.0).matrix(far, far), exact, atol=2e-6)


# Embeddings -----------------------------------------------------------------------------------------------------------


def mixture(dtype):
    return gaussian_mixture(
        jnp.array([[0.0, 0.0], [1.5, -1.0]], dtype),
        covariances=[[[0.4, 0.1], [0.1, 0.3]], [[0.2, 0.0], [0.0, 0.5]]],
        weights=[0.4, 0.6],
    )


def grid(dtype, side=90, reach=6.0):
    "Points and masses of a quadrature rule for the mixture (error below rounding: the trapezium rule on Gaussians)."
    line = np.linspace(-reach, reach, side)
    nodes = jnp.asarray(np.stack(np.meshgrid(line, line), -1).reshape(-1, 2), dtype)
    mass = jnp.exp(jax.vmap(mixture(dtype).logdensity)(nodes)) * (line[1] - line[0]) ** 2
    return nodes, mass


def reference_set(dtype):
    rng = np.random.default_rng(3)
    return jnp.asarray(rng.normal(size=(30, 2)), dtype), jnp.asarray(rng.uniform(0.1, 1.0, 30), dtype)


RANDOM = lambda: random_fourier(jax.random.key(2), 30, 2, 0.9)  # noqa: E731
FIXED = {
    "exact rbf": lambda t: exact_embedding(RBF(0.7), mixture(t)),
    "exact rbf ard": lambda t: exact_embedding(RBF(jnp.array([0.5, 1.1], t)), mixture(t)),
    "exact fourier": lambda t: exact_embedding(RANDOM(), mixture(t)),
    "reference rbf": lambda t: reference_embedding(RBF(0.7), *reference_set(t)),
    "reference imq": lambda t: reference_embedding(IMQ(0.7), *reference_set(t)),
    "stein": lambda t: SteinEmbedding(Stein(RBF(0.7), mixture(t).score)),
}


@pytest.mark.parametrize("name", list(FIXED))
def test_fixed_embedding(name, dtype):
    embedding, x = FIXED[name](dtype), jnp.asarray(np.random.default_rng(5).normal(size=(7, 2)), dtype)
    assert embedding.has_values
    check_embedding(embedding, x)


@pytest.mark.parametrize("name", ["exact rbf", "exact rbf ard", "exact fourier"])
def test_exact_embedding_against_quadrature(name, x64):
    embedding = FIXED[name](jnp.float64)
    nodes, mass = grid(jnp.float64)
    x = nodes[1234::1500]
    assert_close(embedding.mean(x, None), embedding.kernel.matrix(x, nodes) @ mass, rtol=1e-9, atol=1e-12)
    assert_close(embedding.double_integral, mass @ embedding.mean(nodes, None), rtol=1e-9)


@pytest.mark.parametrize("name", ["reference rbf", "reference imq"])
def test_reference_embedding_against_sums(name, x64):
    embedding, (y, w) = FIXED[name](jnp.float64), reference_set(jnp.float64)
    w, x = w / jnp.sum(w), y[:5] + 0.1
    gram = by_pairs(embedding.kernel, y, y)
    assert_close(embedding.mean(x, None), by_pairs(embedding.kernel, x, y) @ w, rtol=1e-12)
    assert_close(embedding.double_integral, w @ gram @ w, rtol=1e-12)
    assert_close(embedding.own_means, gram @ w, rtol=1e-12)
    assert embedding.starts_pool(jax.random.key(0), 3).points.shape == y.shape


def test_reference_embedding_knows_its_own_error(x64):
    "For n independent draws E|mu_hat - mu_p|^2 = (E k(x, x) - E k(x, x')) / n, both known here."
    target, n = mixture(jnp.float64), 400
    exact = exact_embedding(RBF(0.7), target)
    made = reference_embedding(RBF(0.7), target.sample(jax.random.key(3), n))
    assert_close(made.error2, (1 - exact.double_integral) / n, rtol=0.1)


@pytest.mark.parametrize("base", [RBF(0.7), IMQ(0.9), InverseLog(0.9)], ids=["rbf", "imq", "inverse log"])
def test_stein_mean_is_zero(base, x64):
    "E_p k_p(x, .) = 0 by quadrature: what SteinEmbedding asserts."
    target = mixture(jnp.float64)
    nodes, mass = grid(jnp.float64)
    kernel = Stein(base, target.score)
    values = kernel.matrix(nodes[1234::1500], nodes)
    assert_close(values @ mass, np.zeros(len(values)), atol=1e-8 * float(jnp.max(jnp.abs(values))))
    assert SteinEmbedding(kernel).double_integral == 0.0


@pytest.mark.parametrize("name", ["exact rbf", "exact rbf ard", "exact fourier"])
def test_mmd_to_an_embedding_against_quadrature(name, x64):
    embedding = FIXED[name](jnp.float64)
    nodes, mass = grid(jnp.float64)
    x, w = reference_set(jnp.float64)
    kernel = embedding.kernel
    parts = w @ kernel.matrix(x, x) @ w - 2 * w @ (kernel.matrix(x, nodes) @ mass) + mass @ embedding.mean(nodes, None)
    assert_close(mmd2_to(embedding, x, w), parts, rtol=1e-8)


def test_mmd_to_a_reference_set_is_that_of_two_sets(dtype):
    y, w = reference_set(dtype)
    x = jnp.asarray(np.random.default_rng(8).normal(size=(5, 2)), dtype)
    found = mmd2_to(reference_embedding(IMQ(0.7), y, w), x)
    assert found.dtype == dtype
    assert_close(found, mmd2(IMQ(0.7), x, y, weights_y=w / jnp.sum(w)), rtol=2e-6 if dtype == jnp.float32 else 1e-12)
    assert float(mmd2_to(reference_embedding(IMQ(0.7), y, w), y, w / jnp.sum(w))) < 10 * jnp.finfo(dtype).eps


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda e, x: mmd2_to(e, x[0]), "x must be an"),
        (lambda e, x: mmd2_to(e, x, jnp.ones(2)), "weights must have shape"),
        (lambda e, x: mmd2_to(FIXED["exact rbf ard"](x.dtype), x[:, :1]), "dimensions"),
        (lambda e, x: mmd2_to(ParticleEmbedding(e.kernel, jnp.negative), x), "ParticleEmbedding estimates slopes"),
    ],
)
def test_mmd_to_an_embedding_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call(FIXED["exact rbf"](jnp.float32), jnp.zeros((3, 2)))


@pytree_dataclass
class SumOfTwo(Kernel):
    "A kernel as a user may write it: the mean of two others, with its closed form and its Stein form made of theirs."

    first: Kernel
    second: Kernel

    def __call__(self, x, y):
        return (self.first(x, y) + self.second(x, y)) / 2

    @property
    def unit(self):
        return self.first.unit

    def check(self, d):
        self.first.check(d)
        self.second.check(d)

    def features(self, points):
        return self.first.features(points), self.second.features(points)

    def gram(self, features_x, features_y):
        return (self.first.gram(features_x[0], features_y[0]) + self.second.gram(features_x[1], features_y[1])) / 2

    def closed_mean(self, mixture):
        first, second = self.first.closed_mean(mixture), self.second.closed_mean(mixture)
        return None if first is None or second is None else MeanOfTwo(self, first, second)

    def stein_gram(self, x, y):
        return (self.first.stein_gram(x, y) + self.second.stein_gram(x, y)) / 2


@pytree_dataclass
class MeanOfTwo(Embedding):
    kernel: SumOfTwo
    first: Embedding
    second: Embedding

    @property
    def double_integral(self):
        return (self.first.double_integral + self.second.double_integral) / 2

    def mean(self, points, particles=None):
        return (self.first.mean(points, particles) + self.second.mean(points, particles)) / 2


def test_a_kernel_of_ones_own_brings_its_forms(x64):
    kernel, target = SumOfTwo(RBF(0.5), RBF(1.5)), mixture(jnp.float64)
    check_kernel(kernel)
    embedding = exact_embedding(kernel, target)
    x, draws = target.sample(jax.random.key(1), 9), target.sample(jax.random.key(2), 3000)
    check_embedding(embedding, x, draws=draws)
    nodes, mass = grid(jnp.float64)
    assert_close(embedding.mean(x, None), kernel.matrix(x, nodes) @ mass, rtol=1e-9)
    assert_close(embedding.double_integral, mass @ embedding.mean(nodes, None), rtol=1e-9)
    stein = Stein(kernel, target.score)
    truth = stein_gram_any(kernel, stein.features(x), stein.features(x))
    assert_close(stein.matrix(x, x), truth, rtol=1e-9, atol=1e-11)
    assert stein.unit == 0.5 and stein.zero_mean and not kernel.zero_mean
    with pytest.raises(ValueError, match="no closed form for SumOfTwo"):
        exact_embedding(SumOfTwo(RBF(0.5), IMQ(1.5)), target)
    with pytest.raises(ValueError, match="shape .3,., but the points have 2 dimensions"):
        exact_embedding(SumOfTwo(RBF(0.5), RBF(jnp.ones(3))), target)


def test_contracts_are_abstract():
    class Unfinished(Kernel):
        def __call__(self, x, y):
            return x @ y

    for contract in (Kernel, Embedding, Radial, Unfinished):
        with pytest.raises(TypeError, match="abstract"):
            contract()


def test_an_embedding_has_its_kernel():
    with pytest.raises(TypeError, match="kernel"):
        SteinEmbedding()
    with pytest.raises(ValueError, match="Stein kernels alone, got RBF"):
        SteinEmbedding(RBF(0.7))
    for make in FIXED.values():
        make(jnp.float32).kernel.check(2)
    for name in ("exact rbf ard", "exact fourier"):
        with pytest.raises(ValueError, match="dimensions"):
            FIXED[name](jnp.float32).kernel.check(3)


@pytest.mark.parametrize("own_term", ["left out", "included", "alone"])
def test_particle_embedding(own_term, dtype):
    target = mixture(dtype)
    kernel, x = RBF(0.7), jnp.asarray(np.random.default_rng(5).normal(size=(4, 2)), dtype)
    embedding, y = (
        ParticleEmbedding(kernel, target.score, own_term),
        jnp.asarray(np.random.default_rng(6).normal(size=(9, 2)), dtype),
    )
    plain, padded = example_particles(embedding, kernel, y), example_particles(embedding, kernel, y, padding=5)
    check_embedding(embedding, y)
    assert not embedding.has_values and np.isnan(embedding.double_integral)
    assert_close(embedding.mean(x, padded), jnp.mean(by_pairs(kernel, x, y), 1), rtol=tolerance(dtype))
    k, s_y, s_x = by_pairs(kernel, x, y), jax.vmap(target.score)(y), jax.vmap(target.score)(x)
    expected = {
        "left out": k @ s_y / 9,
        "included": (k @ s_y + s_x) / 10,
        "alone": (k.sum(1, keepdims=True) + 1) * s_x / 10,
    }[own_term]
    got = embedding.mean_gradient(x, padded)
    assert got.dtype == dtype
    assert_close(got, expected, rtol=tolerance(dtype), atol=tolerance(dtype))
    assert_close(embedding.mean_gradient(x, plain), expected, rtol=tolerance(dtype), atol=tolerance(dtype))


def test_particle_gradient_has_the_sign_of_the_true_one(x64):
    "The erratum to Eq. 5: with draws from p as particles, the estimate comes to the gradient of mu_p itself."
    target, kernel = mixture(jnp.float64), RBF(0.7)
    draws = target.sample(jax.random.key(0), 4000)
    x = target.sample(jax.random.key(1), 20)
    embedding = ParticleEmbedding(kernel, target.score, "left out")
    estimate = embedding.mean_gradient(x, example_particles(embedding, kernel, draws))
    truth = exact_embedding(kernel, target).mean_gradient(x, None)
    assert float(jnp.linalg.norm(estimate - truth) / jnp.linalg.norm(truth)) < 0.15


# Step rules -----------------------------------------------------------------------------------------------------------

RULES = {
    "constant": ConstantStep(),
    "open loop": OpenLoop(2.0),
    "line search": LineSearch(),
    "inexact line search": LineSearch(0.5),
    "free": Quadrature(),
    "sum to one": Quadrature("sum_to_one"),
    "simplex": Quadrature("simplex"),
    "decayed constant": DecayEarly(ConstantStep(), 2, 0.5),
    "decayed sum to one": DecayEarly(Quadrature("sum_to_one"), 1, 0.9),
    "blended pairwise": BlendedPairwise(),
    "greedy herding": GreedyHerding(),
}


@pytest.mark.parametrize("name", list(RULES))
def test_step_rule(name):
    check_step_rule(
        RULES[name],
        sum_to_one=name not in ("free", "greedy herding"),
        nonnegative=name not in ("free", "sum to one", "decayed sum to one"),
    )


@pytest.mark.parametrize("count, before", [(1, 0), (5, 4)])
def test_constant_steps_give_equal_weights(count, before, dtype):
    assert_close(
        ConstantStep()(example_system(count, before, 6, dtype))[0][:count], np.full(count, 1 / count), rtol=1e-6
    )


def test_each_rule_minimises_over_its_own_set(x64):
    "free <= sum to one <= simplex <= line search <= constant in MMD^2, and the first two against plain linear algebra."
    s = example_system(6, 5, 9, jnp.float64)
    objective = lambda w: float(w @ s.gram @ w / 2 - w @ s.means)  # noqa: E731
    values = [objective(RULES[name](s)[0]) for name in ("free", "sum to one", "simplex", "line search", "constant")]
    assert all(a <= b + 1e-12 for a, b in zip(values, values[1:]))
    gram, means = np.asarray(s.gram)[:6, :6], np.asarray(s.means)[:6]
    assert_close(RULES["free"](s)[0][:6], np.linalg.solve(gram, means), rtol=1e-8)
    kkt = np.block([[gram, np.ones((6, 1))], [np.ones((1, 6)), np.zeros((1, 1))]])
    assert_close(RULES["sum to one"](s)[0][:6], np.linalg.solve(kkt, np.append(means, 1.0))[:6], rtol=1e-8)
    w = np.asarray(RULES["simplex"](s)[0])[:6]
    slope = gram @ w - means  # at the minimum: equal on the support, no smaller off it
    assert np.ptp(slope[w > 0]) < 1e-9 and slope.min() >= slope[w > 0].min() - 1e-9


def test_line_search_is_the_minimum_along_the_segment(x64):
    s = example_system(5, 4, 5, jnp.float64)
    weights, size = LineSearch()(s)
    others = [(1 - t) * s.weights + t * jnp.eye(5)[4] for t in np.linspace(0, 1, 401)]
    objective = lambda w: float(w @ s.gram @ w / 2 - w @ s.means)  # noqa: E731
    best = min(map(objective, others))
    assert 0 < float(size) < 1 and objective(weights) <= best and objective(weights) == pytest.approx(best, abs=1e-5)


# Oracles --------------------------------------------------------------------------------------------------------------


def pool_problem(kernel, embedding, dtype):
    positions = jnp.array([[0.0, 0.0], [1.0, -1.0]], dtype)
    state = jax.jit(lambda x: init(Components(kernel, embedding, None, ConstantStep()), x, 8))(positions)
    return Problem(kernel, embedding, state.particles)


STARTS = {
    "pool": lambda t, e: pool_starts(e, e.kernel, mixture(t).sample(jax.random.key(4), 64)),
    "near particles": lambda t, e: NearParticles(0.5),
    "near point": lambda t, e: NearPoint(jnp.zeros(2, t), 1.0),
    "prior": lambda t, e: PriorStarts(lambda key: 2 * jax.random.normal(key, (2,), t)),
}


@pytest.mark.parametrize(
    "starts, particles_per_step, precision",
    [
        ("pool", 1, "float32"),
        ("pool", 1, "float64"),
        ("pool", 3, "float32"),
        ("near particles", 1, "float32"),
        ("near point", 3, "float64"),
        ("prior", 1, "float32"),
    ],
)
def test_gradient_oracle(starts, particles_per_step, precision):
    with jax.enable_x64(precision == "float64"):
        check_gradient_oracle(starts, particles_per_step, jnp.dtype(precision))


def check_gradient_oracle(starts, particles_per_step, dtype):
    "The contract, no target evaluations, and an answer never worse than its starts."
    embedding = exact_embedding(RBF(0.7), mixture(dtype))
    oracle = GradientOracle(
        STARTS[starts](dtype, embedding), num_steps=10, num_starts=4, particles_per_step=particles_per_step, scale=0.7
    )
    problem, key = pool_problem(embedding.kernel, embedding, dtype), jax.random.key(11)
    check_oracle(oracle, problem, key)
    answer = ask(oracle, key, problem)
    assert bool(jnp.all(answer.valid)) and int(answer.evaluations) == 0 and int(answer.rejected) == 0
    first = oracle.starts(key, problem, 4 * particles_per_step).reshape(4, particles_per_step, 2)

    @jax.jit
    def cost(points):
        gram = problem.kernel.matrix(points, points)
        return jnp.sum(lmo_value(problem, points)) + (jnp.sum(gram) - jnp.trace(gram)) / 2 / (2 + particles_per_step)

    assert float(cost(answer.points)) <= min(float(cost(x)) for x in first) + 1e-6


def test_oracles_with_a_memory():
    problem = example_problem()
    pool = problem.embedding.mixture.sample(jax.random.key(4), 20)
    walker = GradientOracle(NearPoint(jnp.zeros(2), 1.0), num_steps=3, num_starts=2)
    check_oracle(cached_oracle(problem.embedding, problem.kernel, pool, walker))
    check_oracle(LazyOracle(walker, pool_starts(problem.embedding, problem.kernel, pool)))


def test_oracle_rejects_starts_that_are_not_finite():
    embedding = exact_embedding(RBF(0.7), mixture(jnp.float32))
    problem, key = pool_problem(embedding.kernel, embedding, jnp.float32), jax.random.key(1)
    half = PriorStarts(lambda key: jnp.where(jax.random.bernoulli(key), jnp.nan, 0.5) * jnp.ones(2))
    answer = ask(GradientOracle(half, num_steps=3, num_starts=8), key, problem)
    bad = int(jnp.sum(jnp.isnan(half(key, problem, 8)[:, 0])))
    assert (
        0 < bad < 8
        and int(answer.rejected) == bad
        and bool(answer.valid[0])
        and bool(jnp.all(jnp.isfinite(answer.points)))
    )
    none = ask(GradientOracle(PriorStarts(lambda key: jnp.full(2, jnp.nan)), num_steps=3), key, problem)
    assert not bool(none.valid[0]) and int(none.rejected) == 4


def test_grid_oracle_finds_the_best_node():
    embedding = exact_embedding(RBF(0.7), mixture(jnp.float32))
    problem = pool_problem(embedding.kernel, embedding, jnp.float32)
    answer = ask(GridOracle([(-2.0, 3.0), (-3.0, 2.0)], num_per_side=11, chunk_size=50), jax.random.key(0), problem)
    nodes = np.stack(np.meshgrid(np.linspace(-2, 3, 11), np.linspace(-3, 2, 11), indexing="ij"), -1).reshape(-1, 2)
    values = lmo_value(problem, jnp.asarray(nodes, jnp.float32))
    assert answer.points.shape == (1, 2) and bool(answer.valid[0])
    assert_close(answer.values[0], jnp.min(values), rtol=1e-5)
    assert_close(answer.points[0], nodes[np.argmin(values)], atol=1e-5)
    assert int(answer.evaluations) == 0 and int(answer.rejected) == 0
