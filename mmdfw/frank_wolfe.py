from typing import NamedTuple
import jax, jax.numpy as jnp
from blackjax.base import SamplingAlgorithm
from mmdfw.checks import check_count
from mmdfw.embedding import Embedding, Particles
from mmdfw.kernel import Kernel, Scored, Stein
from mmdfw.mmd import mmd2_from_parts
from mmdfw.oracle import Oracle, Problem, oracle_accuracy
from mmdfw.quadrature import Quadrature, grow_factor
from mmdfw.step import StepRule, System

class State(NamedTuple):
    "All that growth needs to go on: arrays of fixed capacity, rows from `count` on unused."
    particles: Particles
    gram: jax.Array  # (capacity, capacity)
    factor: jax.Array  # (capacity, capacity): Cholesky factor of the Gram matrix, jitter included
    means: jax.Array  # (capacity,): mu_p at the particles
    evaluations: jax.Array  # target evaluations so far
    rejected: jax.Array  # candidates given up so far

class Info(NamedTuple):
    "What one step did."
    accepted: jax.Array  # bool: at least one particle was added
    count: jax.Array  # particles after the step
    discrepancy: jax.Array  # MMD^2 by the embedding, or KSD^2 for the particle embedding
    gap: jax.Array  # duality gap at the oracle's answer, before the step
    step_size: jax.Array  # NaN for full correction
    delta: jax.Array  # the oracle's accuracy against the best that it has seen
    jitter: jax.Array  # largest jitter that the new rows of the factor took
    evaluations: jax.Array  # in total
    rejected: jax.Array  # in total

class Components(NamedTuple):
    "The four nouns."
    kernel: Kernel
    embedding: Embedding
    oracle: Oracle
    step_rule: StepRule

def empty_state(parts: Components, capacity: int, like: jax.Array) -> State:
    "No particles yet; `like` is one (d,) point that gives dimension and dtype."
    zeros = lambda *shape: jnp.zeros((capacity, *shape), like.dtype)
    features = jax.tree.map(lambda leaf: jnp.zeros((capacity, *leaf.shape[1:]), leaf.dtype), jax.eval_shape(parts.kernel.features, like[None]))
    nothing = jnp.zeros((), jnp.int32)
    particles = Particles(zeros(len(like)), features, zeros(len(like)), zeros(), nothing)
    return State(particles, zeros(capacity), jnp.eye(capacity, dtype=like.dtype), zeros(), nothing, nothing)

def append(parts: Components, state: State, point: jax.Array, valid) -> tuple:  # -> State, jitter
    "One more particle with weight zero: a row of features, of the Gram matrix and of its factor."
    particles, n = state.particles, state.particles.count
    capacity = len(particles.weights)
    feature = parts.kernel.features(point[None])
    score = jax.vmap(parts.embedding.score_fn)(point[None]) if not parts.embedding.fixed else jnp.zeros_like(point[None])
    used = jnp.arange(capacity) < n
    column = jnp.where(used, parts.kernel.gram(feature, particles.features)[0], 0.0)
    peak = parts.kernel.diagonal(feature)[0]
    factor, jitter = grow_factor(state.factor, column, peak, n)
    finite = jnp.all(jnp.isfinite(column)) & jnp.isfinite(peak) & jnp.all(jnp.isfinite(score)) & jnp.all(jnp.isfinite(point))
    write = valid & finite & (n < capacity)
    put = lambda old, new: jax.lax.dynamic_update_index_in_dim(old, new[0].astype(old.dtype), n, 0)
    full = jnp.where(jnp.arange(capacity) == n, peak, column)
    gram = put(state.gram, full[None]).at[:, n].set(full)
    new = Particles(put(particles.position, point[None]), jax.tree.map(put, particles.features, feature),
                    put(particles.score, score), particles.weights, n + 1)
    means = put(state.means, parts.embedding.mean(point[None], new))
    cost = parts.kernel.evaluations_per_point + (not parts.embedding.fixed)
    grown = State(new, gram, factor, means, state.evaluations, state.rejected)
    state = jax.tree.map(lambda a, b: jnp.where(write, a, b), grown, state)
    state = state._replace(evaluations=state.evaluations + cost, rejected=state.rejected + (valid & ~finite))
    return state, jnp.where(write, jitter, 0.0)

def reweigh(parts: Components, state: State, before: jax.Array) -> tuple:  # -> State, step size
    "All weights anew by the step rule."
    means = state.means if parts.embedding.fixed else parts.embedding.mean(state.particles.position, state.particles)
    system = System(state.particles.weights, state.gram, means, state.factor, before, state.particles.count)
    weights, size = parts.step_rule(system)
    weights = jnp.where(jnp.arange(len(weights)) < state.particles.count, weights, 0.0).astype(state.means.dtype)
    return state._replace(means=means, particles=state.particles._replace(weights=weights)), size

def discrepancy(parts: Components, state: State) -> jax.Array:
    "MMD^2 by the embedding; KSD^2 where the embedding is made of the particles themselves."
    w = state.particles.weights
    if parts.embedding.fixed: return mmd2_from_parts(w, state.gram, state.means, parts.embedding.double_integral)
    scored = Scored(state.particles.position, state.particles.score)
    return jnp.maximum(w @ Stein(parts.kernel, parts.embedding.score_fn).gram(scored, scored) @ w, 0.0)

def init(parts: Components, positions: jax.Array, capacity: int) -> State:
    "A state that holds the given first particles, weighed by the step rule."
    state = empty_state(parts, capacity, positions[0])
    state = jax.lax.scan(lambda s, x: (append(parts, s, x, True)[0], None), state, positions)[0]
    return reweigh(parts, state, jnp.zeros((), jnp.int32))[0]

def step(parts: Components, key: jax.Array, state: State) -> tuple:  # -> State, Info
    "One Frank-Wolfe step: ask the oracle, add its points, weigh all particles anew."
    before, problem = state.particles.count, Problem(parts.kernel, parts.embedding, state.particles)
    answer = parts.oracle(key, problem)
    w = state.particles.weights
    gap = w @ state.gram @ w - w @ state.means - jnp.min(answer.values)
    grow = lambda s, x: append(parts, s, *x)
    grown, jitter = jax.lax.scan(grow, state, (answer.points, answer.valid))
    grown, size = reweigh(parts, grown, before)
    accepted = grown.particles.count > before
    new = jax.tree.map(lambda a, b: jnp.where(accepted, a, b), grown, state)
    new = new._replace(evaluations=grown.evaluations + answer.evaluations.astype(jnp.int32),
                       rejected=grown.rejected + answer.rejected.astype(jnp.int32))
    delta = oracle_accuracy(jnp.min(answer.values), answer.best_known)
    return new, Info(accepted, new.particles.count, discrepancy(parts, new), gap, jnp.asarray(size, gap.dtype), delta,
                     jnp.max(jitter), new.evaluations, new.rejected)

def frank_wolfe(
    kernel: Kernel,
    embedding: Embedding,
    oracle: Oracle,
    step_rule: StepRule = Quadrature(),
    capacity: int = 128,  # most particles that the state can hold; further steps leave it as it is
) -> SamplingAlgorithm:
    "The loop as BlackJAX's init and step, over vectors: it runs under `blackjax.util.run_inference_algorithm`."
    check_count("capacity", capacity)
    parts = Components(kernel, embedding, oracle, step_rule)
    def init_fn(position, rng_key=None):
        return init(parts, jnp.atleast_2d(position), capacity)
    return SamplingAlgorithm(init_fn, lambda rng_key, state: step(parts, rng_key, state))

def with_capacity(state: State, capacity: int) -> State:
    "The same particles in larger arrays."
    extra = capacity - len(state.particles.weights)
    if extra <= 0: return state
    rows = lambda leaf: jnp.pad(leaf, [(0, extra)] + [(0, 0)] * (leaf.ndim - 1))
    grow = lambda leaf: rows(leaf) if leaf.ndim else leaf
    square = lambda leaf: jnp.pad(leaf, ((0, extra), (0, extra)))
    corner = jnp.diag(jnp.where(jnp.arange(capacity) < capacity - extra, 0.0, 1.0)).astype(state.factor.dtype)
    return state._replace(particles=jax.tree.map(grow, state.particles), gram=square(state.gram),
                          factor=square(state.factor) + corner, means=rows(state.means))

def capacity_for(count: int, smallest: int = 64) -> int:
    "The next power of two: growing to n particles compiles the step about log2(n / 64) times."
    return max(smallest, 1 << (int(count) - 1).bit_length())
