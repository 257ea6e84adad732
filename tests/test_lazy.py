"""Oracles that remember: cached and lazy ones keep the contract, survive what is broken, and go on where they stopped.

The gap stops a fit."""

import warnings

import jax, jax.numpy as jnp, numpy as np, pytest

import mmdfw
from mmdfw.experiments._bench_mixture import toy_embedding, toy_target
from mmdfw.oracles._cache import cached_oracle
from mmdfw._checks import assert_close, pytree_dataclass
from mmdfw.embeddings._embedding import Embedding, ParticleEmbedding, SteinEmbedding, reference_embedding
from mmdfw._fit import fit
from mmdfw._loop import Until, grow
from mmdfw._loop import Components, init, step
from mmdfw.kernels._kernel import IMQ, RBF
from mmdfw.kernels._stein_kernel import Stein
from mmdfw.oracles._lazy import LazyMemory, LazyOracle, certified_mmd, lazy_delta, negative_calls_bound, progress_bound
from mmdfw.oracles._oracle import GradientOracle, NearParticles, Problem, pool_starts
from mmdfw.oracles._search import PoolOracle
from mmdfw.steps._step import ConstantStep, DecayEarly, LineSearch, OpenLoop

WALK = GradientOracle(NearParticles(0.5), num_steps=2, num_starts=2, scale=0.5)
STEIN = Stein(IMQ(1.0), jnp.negative)
POINTS = np.array([[2.4, 0.1], [-2.0, 1.5], [0.1, -0.2]])
begin = jax.jit(init, static_argnums=2)


@pytest.fixture(scope="module")
def target():
    return toy_target(False)


def setting(target, name):
    "Kernel and embedding by name."
    if name == "stein":
        kernel = Stein(IMQ(1.0), target.score)
        return kernel, SteinEmbedding(kernel)
    exact = toy_embedding(bool(jax.config.jax_enable_x64))
    return exact.kernel, exact if name == "exact" else ParticleEmbedding(exact.kernel, target.score, "left out")


ask = jax.jit(lambda oracle, key, problem: oracle(key, problem))  # much less to compile than a whole step


def first_problem(kernel, embedding, dtype=jnp.float32):
    "What an oracle is asked after the first particle."
    state = begin(Components(kernel, embedding, None, LineSearch()), jnp.zeros((1, 2), dtype), 8)
    return Problem(kernel, embedding, state.particles, state.factor, state.means)


@pytest.mark.parametrize("name", ["exact", "stein", "particles"])
def test_a_cache_is_used_up_and_then_the_ordinary_oracle_serves(target, name):
    kernel, embedding = setting(target, name)
    by = "gradient" if name == "particles" else "value"
    oracle = cached_oracle(embedding, kernel, jnp.asarray(POINTS, jnp.float32), WALK, by)
    problem = first_problem(kernel, embedding)._replace(memory=oracle.first_memory())
    key = jax.random.key(0)
    left, spent = [], []
    for _ in range(4):
        answer = ask(oracle, key, problem)
        problem = problem._replace(memory=answer.memory)
        left.append(int(answer.memory.sum())), spent.append(int(answer.evaluations))
    assert left == [2, 1, 0, 0] and bool(answer.valid[0]) and answer.points.dtype == jnp.float32
    assert (
        spent == dict(exact=[0, 0, 0, 0], stein=[6, 6, 6, 12], particles=[0, 0, 0, 0])[name]
    )  # two steps of two, and both ends; two starts
    assert_close(answer.points, ask(WALK, key, problem._replace(memory=None)).points, rtol=1e-6)


def test_points_that_are_not_finite_are_never_taken(target):
    "A Stein kernel's score is NaN to the right of 2: that cached point is out from the beginning."
    kernel = Stein(IMQ(1.0), lambda x: jnp.where(x[0] > 2.0, jnp.nan, target.score(x)))
    oracle = cached_oracle(SteinEmbedding(kernel), kernel, jnp.asarray(POINTS, jnp.float32), WALK)
    assert list(np.asarray(oracle.first_memory())) == [False, True, True]
    lazy = LazyOracle(PoolOracle(oracle.cache), oracle.cache)
    assert list(np.asarray(lazy.first_memory().left)) == [False, True, True]
    answer = ask(lazy, jax.random.key(0), first_problem(kernel, SteinEmbedding(kernel)))
    assert bool(answer.valid[0]) and float(answer.points[0, 0]) < 2.0 and np.isfinite(float(answer.memory.threshold))


@pytest.mark.parametrize("name", ["exact", "stein"])
def test_lazy_steps_keep_the_contract(target, name):
    "In one scan: the memory's structure and types must not change on the way."
    kernel, embedding = setting(target, name)
    cache = pool_starts(embedding, kernel, target.sample(jax.random.key(3), 40))
    parts = Components(kernel, embedding, LazyOracle(WALK, cache), LineSearch())
    state = begin(parts._replace(oracle=None), jnp.zeros((1, 2)), 8)._replace(memory=parts.oracle.first_memory())
    ended, infos = jax.jit(
        lambda parts, state: jax.lax.scan(lambda s, k: step(parts, k, s), state, jax.random.split(jax.random.key(0), 6))
    )(parts, state)
    memory = ended.memory
    weights = np.asarray(ended.particles.weights)
    assert (
        isinstance(memory, LazyMemory) and int(memory.cache_calls + memory.positive_calls + memory.negative_calls) == 6
    )
    cached = np.isnan(np.asarray(infos.gap))
    assert cached.sum() == int(memory.cache_calls) > 0 and not cached[0]
    assert (np.isnan(np.asarray(infos.delta)) == cached).all()
    assert (
        abs(weights.sum() - 1) < 1e-5
        and weights.min() >= -1e-6
        and np.diff(np.asarray(infos.discrepancy)).max() <= 1e-6
    )
    spent = np.append(int(infos.evaluations[0]), np.diff(np.asarray(infos.evaluations)))
    assert spent[cached].max() <= kernel.evaluations_per_point  # at most the new particle's own score
    if name == "stein":
        assert spent[~cached].min() >= 2 * (2 * 2 + 2)


def test_both_precisions(dtype):
    target = toy_target(dtype == jnp.float64)
    kernel, embedding = setting(target, "exact")
    cache = pool_starts(embedding, kernel, target.sample(jax.random.key(3), 40))
    oracle = LazyOracle(PoolOracle(cache), cache)
    answer = ask(oracle, jax.random.key(0), first_problem(kernel, embedding, dtype))
    assert answer.values.dtype == answer.points.dtype == answer.best_known.dtype == dtype
    assert int(answer.memory.positive_calls) == 1 and answer.memory.threshold > 0


def test_no_particle_comes_twice_and_growth_ends(target):
    "A pool of five: what is there already gets weight, no copy; once nothing is to gain, growth stops and says so."
    kernel = RBF(0.7)
    five = jnp.asarray(np.append(POINTS, [[2.0, -1.5], [-1.0, -2.0]], 0), jnp.float32)
    embedding = reference_embedding(kernel, five)
    pool = pool_starts(embedding, kernel)
    parts = Components(kernel, embedding, LazyOracle(PoolOracle(pool), max_in_a_row=5), LineSearch())
    with pytest.warns(UserWarning, match="the oracle has nothing new to offer: stopped with 5 of 20 particles"):
        _, state, infos, _ = grow(jax.random.key(0), parts, begin(parts, pool.points[:1], 128), Until(20))
    position = np.asarray(state.particles.position[:5])
    assert len(np.unique(position, axis=0)) == 5 and len(infos) > 6
    assert_close(state.particles.weights[:5], np.full(5, 0.2), rtol=1e-2)
    assert float(infos[-1].discrepancy) < 1e-5 and np.isfinite(float(state.memory.threshold))


@pytree_dataclass
class Broken(Embedding):
    "No values anywhere but at the origin."

    def mean(self, points, particles=None):
        return jnp.where(jnp.sum(points**2, 1) > 0, jnp.nan, 0.5)


def test_an_oracle_that_fails_ends_growth_and_leaves_the_threshold_alone():
    parts = Components(RBF(0.7), Broken(), LazyOracle(WALK), LineSearch())
    with pytest.warns(UserWarning, match="met non-finite values: stopped with 1 of 5"):
        _, state, infos, _ = grow(jax.random.key(0), parts, begin(parts, jnp.zeros((1, 2)), 128), Until(5))
    assert len(infos) == 1 and np.isinf(float(state.memory.threshold))


def test_stopping_and_going_on_is_the_same_run(target):
    kernel, embedding = setting(target, "exact")
    cache = pool_starts(embedding, kernel, target.sample(jax.random.key(3), 40))
    run = lambda num, **more: fit(
        jax.random.key(5),
        target.logdensity,
        jnp.zeros(2),
        num_particles=num,
        embedding=embedding,
        start="given",  # noqa: E731
        oracle=LazyOracle(cached_oracle(embedding, kernel, jnp.asarray(POINTS, jnp.float32), WALK), cache),
        step_rule=LineSearch(),
        refine=False,
        progress=False,
        **more,
    )
    whole, parted = run(12), run(4).add(8)
    assert not np.asarray(whole.state.memory.behind).all()  # the cache behind keeps a memory of its own
    assert np.array_equal(whole.positions, parted.positions) and np.array_equal(whole.weights, parted.weights)
    for a, b in zip(jax.tree.leaves(whole.state.memory), jax.tree.leaves(parted.state.memory)):
        assert np.array_equal(a, b)
    known = whole.history.gap[~np.isnan(whole.history.gap)]
    stopped = run(12, gap_tolerance=float(known[2]))
    assert stopped.history.gap[-1] == known[2] and len(stopped.history.gap) < len(whole.history.gap)
    assert len(stopped) < 12 and np.array_equal(stopped.add(12 - len(stopped)).positions, whole.positions)


@pytest.mark.parametrize("rule", [ConstantStep(), OpenLoop(), DecayEarly(LineSearch())])
def test_rules_that_may_do_harm_are_refused(target, rule):
    kernel, embedding = setting(target, "exact")
    with pytest.raises(ValueError, match=f"needs a step rule that never raises .* got {type(rule).__name__}"):
        init(Components(kernel, embedding, LazyOracle(WALK), rule), jnp.zeros((1, 2)), 8)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: LazyOracle(None), "must be an Oracle of particles_per_step 1, got NoneType"),
        (lambda: LazyOracle(GradientOracle(NearParticles(0.5), particles_per_step=3)), "of particles_per_step 3"),
        (lambda: LazyOracle(WALK, POINTS), "cache must come from pool_starts"),
        (lambda: LazyOracle(WALK, lazy_tolerance=0.9), "lazy_tolerance must be at least 1, got 0.9"),
        (lambda: LazyOracle(WALK, max_in_a_row=0), "max_in_a_row must be a whole number of at least 1, got 0"),
        (lambda: cached_oracle(SteinEmbedding(STEIN), STEIN, POINTS[:0], WALK), "with n, d >= 1"),
        (
            lambda: cached_oracle(SteinEmbedding(STEIN), STEIN, np.append(POINTS, [[np.inf, 0]], 0), WALK),
            "NaN or infinite entries in rows",
        ),
        (lambda: cached_oracle(SteinEmbedding(STEIN), STEIN, POINTS, WALK, by="luck"), "by must be one of"),
        (lambda: lazy_delta(1.0, 0.5), "lazy_tolerance must be at least 1, got 0.5"),
        (lambda: progress_bound(1.0, [0.1], 0.0), "diameter must be positive"),
    ],
)
def test_wrong_input_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("tolerance", [0.0, -1.0, float("nan"), "small"])
def test_a_tolerance_must_be_a_positive_number(tolerance):
    with pytest.raises(ValueError, match="gap_tolerance must be positive and finite"):
        fit(jax.random.key(0), lambda x: -0.5 * x @ x, jnp.zeros(2), gap_tolerance=tolerance)


def test_a_gap_needs_values_of_the_mean():
    with pytest.raises(ValueError, match="needs values of mu_p, and ParticleEmbedding estimates its slopes"):
        fit(
            jax.random.key(0),
            lambda x: -0.5 * x @ x,
            jnp.zeros(2),
            embedding="particles",
            gap_tolerance=0.1,
            start="given",
        )


def test_the_gap_stops_a_default_fit(gaussian_fit):
    "The same particles as without it, up to where the gap got small."
    tolerance = float(np.sort(gaussian_fit.history.gap)[5])
    from conftest import gaussian

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stopped = fit(
            jax.random.key(0),
            gaussian,
            jnp.zeros(2),
            num_particles=20,
            gap_tolerance=tolerance,
        )
    assert len(stopped) == gaussian_fit.history.count[np.argmax(gaussian_fit.history.gap <= tolerance)] < 20
    grown = [result.state.particles.position[: len(stopped)] for result in (stopped, gaussian_fit)]
    assert np.array_equal(*grown)
    assert stopped.discrepancy <= stopped.history.gap[-1] <= tolerance


def test_by_hand():
    assert_close(certified_mmd(0.04, 0.01), 0.3, rtol=1e-12)
    assert_close(lazy_delta([1.0, 0.5], 2.0), [0.25, 0.125], rtol=1e-15)
    assert_close(progress_bound(1.0, [1.0, 0.5], 2.0, 1.0), [0.75, 0.6875], rtol=1e-15)
    assert negative_calls_bound(8.0, 1.0) == 3


def test_top_names():
    assert {"CachedOracle", "cached_oracle", "LazyOracle", "certified_mmd"} <= set(mmdfw.oracles.__all__)
    assert "cloud_around" in mmdfw.embeddings.__all__ and "LazyOracle" in mmdfw.__all__
