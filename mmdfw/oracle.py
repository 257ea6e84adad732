from dataclasses import field
from typing import Any, Callable, NamedTuple
import jax, jax.numpy as jnp, optax
from mmdfw.checks import check_count, check_points, check_positive, pytree_dataclass
from mmdfw.embedding import Embedding, Particles, ReferenceEmbedding
from mmdfw.kernel import Kernel

class Problem(NamedTuple):
    "The linear problem of one Frank-Wolfe step: find x where sum_i w_i k(x_i, x) - mu_p(x) is smallest."
    kernel: Kernel
    embedding: Embedding
    particles: Particles

def lmo_value(problem: Problem, points: jax.Array) -> jax.Array:  # (m, d) -> (m,)
    "Eq. 3: the witness of q against p at candidates."
    return model_mean(problem, points) - problem.embedding.mean(points, problem.particles)

def model_mean(problem: Problem, points: jax.Array) -> jax.Array:  # (m, d) -> (m,)
    "mu_q: the kernel mean of the particles found so far."
    features = problem.kernel.features(points)
    return problem.kernel.gram(features, problem.particles.features) @ problem.particles.weights

def lmo_gradient(problem: Problem, points: jax.Array) -> jax.Array:  # (m, d) -> (m, d)
    "Eq. 5 with its sign put right: grad mu_q - grad mu_p. Walk against it."
    pull = jax.grad(lambda x: jnp.sum(model_mean(problem, x)))(points)
    return pull - problem.embedding.mean_gradient(points, problem.particles)

def crowding_gradient(problem: Problem, batch: jax.Array) -> jax.Array:  # (B, d) -> (B, d)
    "Gradient of what B points chosen together cost each other: sum_{b<c} k(x_b, x_c) / (n + B)."
    size = len(batch)
    def cost(x):
        features = problem.kernel.features(x)
        gram = problem.kernel.gram(features, features)
        return (jnp.sum(gram) - jnp.trace(gram)) / 2
    total = (problem.particles.count + size).astype(batch.dtype)
    return jax.grad(cost)(batch) / total

class Proposal(NamedTuple):
    "What an oracle answers."
    points: jax.Array  # (B, d)
    values: jax.Array  # (B,): the linear objective there
    valid: jax.Array  # (B,) bool: finite, fit to be added
    best_known: jax.Array  # the smallest value the oracle has seen anywhere, to judge its accuracy by
    evaluations: jax.Array  # target evaluations taken
    rejected: jax.Array  # starts given up for non-finite values

class Starts:
    "Contract: key, problem, number -> (number, d) points for the oracle to start from."
    def __call__(self, key, problem: Problem, num: int): raise NotImplementedError
    def best_known(self, problem: Problem): return jnp.inf  # the smallest objective over what the starts know, if anything

@pytree_dataclass
class PriorStarts(Starts):
    "Draws from a prior."
    sample: Callable = field(metadata=dict(static=True))  # key -> (d,)

    def __call__(self, key, problem, num): return jax.vmap(self.sample)(jax.random.split(key, num))

@pytree_dataclass
class NearParticles(Starts):
    "Existing particles, drawn by weight, with normal noise."
    scale: Any = 1.0  # of the noise, scalar or (d,)

    def __post_init__(self): check_positive("scale", self.scale)
    def __call__(self, key, problem, num):
        which_key, noise_key = jax.random.split(key)
        particles = problem.particles
        which = jax.random.categorical(which_key, jnp.log(jnp.maximum(particles.weights, 0.0)), shape=(num,))
        noise = jax.random.normal(noise_key, (num, particles.position.shape[1]), particles.position.dtype)
        return particles.position[which] + self.scale * noise

@pytree_dataclass
class NearPoint(Starts):
    "One point, such as the MAP, with normal noise."
    point: Any  # (d,)
    scale: Any = 1.0

    def __post_init__(self): check_positive("scale", self.scale)
    def __call__(self, key, problem, num):
        return self.point + self.scale * jax.random.normal(key, (num, len(self.point)), jnp.asarray(self.point).dtype)

@pytree_dataclass
class PoolStarts(Starts):
    "The best of a pool by the linear objective: the pool is dealt into groups at random, each gives its best."
    points: Any  # (m, d)
    features: Any
    means: Any  # (m,): mu_p there

    def best_known(self, problem): return jnp.min(self.values(problem))
    def values(self, problem):
        return problem.kernel.gram(self.features, problem.particles.features) @ problem.particles.weights - self.means
    def __call__(self, key, problem, num):
        values, m = self.values(problem), len(self.points)
        order = jax.random.permutation(key, m)[: m - m % num].reshape(num, -1)
        best = jnp.take_along_axis(order, jnp.argmin(values[order], 1)[:, None], 1)[:, 0]
        return self.points[best.at[0].set(jnp.argmin(values))]

def pool_starts(embedding: Embedding, kernel: Kernel, points=None) -> PoolStarts:
    "A pool of starts for embeddings that do not change; a reference set is its own pool."
    if isinstance(embedding, ReferenceEmbedding) and points is None:
        return PoolStarts(embedding.points, embedding.features, embedding.own_means)
    if not embedding.fixed: raise ValueError(f"{type(embedding).__name__} changes with the particles; use NearParticles or PriorStarts")
    points = check_points("points", points)
    return PoolStarts(points, kernel.features(points), embedding.mean(points, None))

class Oracle:
    "Contract: key, problem -> Proposal of `batch_size` points."
    batch_size = 1
    def __call__(self, key, problem: Problem) -> Proposal: raise NotImplementedError

@pytree_dataclass
class GradientOracle(Oracle):
    "Approx-LMO: an optax optimiser walks down from several starts at once, the best end is taken."
    starts: Starts
    optimizer: optax.GradientTransformation = field(default=optax.adam(0.1), metadata=dict(static=True))
    num_steps: int = field(default=30, metadata=dict(static=True))  # the paper's L
    num_starts: int = field(default=4, metadata=dict(static=True))
    batch_size: int = field(default=1, metadata=dict(static=True))  # B new points a call
    scale: Any = 1.0  # the unit of length in which the optimiser walks, scalar or (d,)

    def __post_init__(self):
        for name in ("num_steps", "num_starts", "batch_size"): check_count(name, getattr(self, name))
        check_positive("scale", self.scale)
    def __call__(self, key, problem):
        d = problem.particles.position.shape[1]
        first = self.starts(key, problem, self.num_starts * self.batch_size)
        first = first.reshape(self.num_starts, self.batch_size, d)
        last, sound = walk(self, problem, first)
        return choose(self, problem, jnp.concatenate([last, first]), jnp.concatenate([sound, sound]))

def walk(oracle: GradientOracle, problem: Problem, first: jax.Array):  # (S, B, d) -> (S, B, d), (S,) bool
    "L optimiser steps down the linear objective; a set that meets a non-finite gradient stops where it is."
    def gradient(sets):
        slope = lmo_gradient(problem, sets.reshape(-1, sets.shape[-1])).reshape(sets.shape)
        return slope if oracle.batch_size == 1 else slope + jax.vmap(lambda x: crowding_gradient(problem, x))(sets)
    def body(carry, _):
        sets, state, sound = carry
        slope = gradient(sets) * oracle.scale
        updates, state = jax.vmap(oracle.optimizer.update)(slope, state, sets / oracle.scale)
        moved = sets + oracle.scale * updates
        sound = sound & jnp.all(jnp.isfinite(slope) & jnp.isfinite(moved), axis=(1, 2))
        return (jnp.where(sound[:, None, None], moved, sets), state, sound), None
    state = jax.vmap(oracle.optimizer.init)(first / oracle.scale)
    (last, _, sound), _ = jax.lax.scan(body, (first, state, jnp.all(jnp.isfinite(first), axis=(1, 2))), length=oracle.num_steps)
    return last, sound

def choose(oracle: GradientOracle, problem: Problem, sets: jax.Array, sound: jax.Array) -> Proposal:
    "The sound set of least total cost; where the objective is only an estimated field, the first sound end."
    flat = sets.reshape(-1, sets.shape[-1])
    values = lmo_value(problem, flat).reshape(sets.shape[:2])
    features = jax.vmap(problem.kernel.features)(sets)
    crowd = jax.vmap(lambda f: jnp.sum(jnp.triu(problem.kernel.gram(f, f), 1)))(features) / (problem.particles.count + oracle.batch_size)
    cost = jnp.sum(values, 1) + crowd if problem.embedding.fixed else jnp.arange(len(sets), dtype=values.dtype)
    sound = sound & jnp.all(jnp.isfinite(values), axis=1)
    best = jnp.argmin(jnp.where(sound, cost, jnp.inf))
    kernel_cost, starts = problem.kernel.evaluations_per_point, sets.shape[0] * sets.shape[1] // 2
    steps = starts * oracle.num_steps * (problem.embedding.evaluations_per_gradient + 2 * kernel_cost)
    return Proposal(sets[best], values[best], jnp.full(oracle.batch_size, sound[best]),
                    jnp.minimum(oracle.starts.best_known(problem), jnp.min(values[best])),
                    jnp.asarray(steps + 2 * starts * kernel_cost), jnp.sum(~sound[: len(sets) // 2]))

def oracle_accuracy(value, best) -> jax.Array:
    "delta in Eq. 4: the objective reached over the smallest there is, in [0, 1]; 1 where both vanish"
    return jnp.where(best < 0, jnp.clip(value / jnp.where(best < 0, best, -1.0), 0.0, 1.0), 1.0)
