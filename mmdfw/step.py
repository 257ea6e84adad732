from dataclasses import field
from typing import Any, NamedTuple
import jax, jax.numpy as jnp
from mmdfw.checks import check_count, check_positive, pytree_dataclass

class System(NamedTuple):
    "All that a step rule may look at, in arrays of fixed capacity."
    weights: jax.Array  # (capacity,): before the step, zero for the new particles
    gram: jax.Array  # (capacity, capacity), zero outside the block in use
    means: jax.Array  # (capacity,): mu_p at the particles, the paper's z
    factor: jax.Array  # (capacity, capacity): lower Cholesky factor of the Gram matrix, the identity outside
    before: jax.Array  # particles before the step
    count: jax.Array  # particles after it

class StepRule:
    "Contract: a System -> all new weights and the step size (NaN where there is none)."
    def __call__(self, system: System): raise NotImplementedError  # -> (capacity,), scalar

def active(system: System): return jnp.arange(len(system.weights)) < system.count  # particles in use
def newcomers(system: System) -> jax.Array:
    "The atom to move to: the new particles in equal parts, the paper's g."
    new = active(system) & (jnp.arange(len(system.weights)) >= system.before)
    return new / jnp.maximum(jnp.sum(new), 1).astype(system.weights.dtype)

def move(weights: jax.Array, atom: jax.Array, size) -> jax.Array:
    "(1 - size) q + size g: the Frank-Wolfe step"
    return (1 - size) * weights + size * atom

@pytree_dataclass
class ConstantStep(StepRule):
    "1 / (n + 1): all particles weigh the same. With B new ones at once, B / (n + B)."
    def __call__(self, system):
        size = (system.count - system.before) / jnp.maximum(system.count, 1).astype(system.weights.dtype)
        return move(system.weights, newcomers(system), size), size

@pytree_dataclass
class OpenLoop(StepRule):
    "l / (n + l): later particles weigh more."
    l: Any = 2.0

    def __post_init__(self): check_positive("l", self.l)
    def __call__(self, system):
        size = (self.l / (system.before + self.l)).astype(system.weights.dtype)
        return move(system.weights, newcomers(system), size), size

@pytree_dataclass
class LineSearch(StepRule):
    "The best step on [0, 1]; `alpha` in (0, 2) multiplies it, to study steps that are not exact."
    alpha: Any = 1.0

    def __post_init__(self):
        if not isinstance(self.alpha, jax.core.Tracer) and not 0 < self.alpha < 2:
            raise ValueError(f"alpha must lie in (0, 2), got {self.alpha!r}: outside it the error need not fall")
    def __call__(self, system):
        atom = newcomers(system)
        best = self.alpha * line_search(system.weights, atom, system.gram, system.means)
        size = jnp.where(system.before == 0, 1.0, jnp.clip(best, 0.0, 1.0))
        return move(system.weights, atom, size), size

def line_search(
    weights: jax.Array,  # (n,): q
    atom: jax.Array,  # (n,): g
    gram: jax.Array,  # (n, n)
    means: jax.Array,  # (n,)
) -> jax.Array:
    "<q - p, q - g> / |q - g|^2, the minimiser of the quadratic along q -> g; 0 where g = q"
    gap = weights - atom
    slope, square = gap @ (gram @ weights - means), gap @ gram @ gap
    return jnp.where(square > 0, slope / jnp.where(square > 0, square, 1.0), 0.0)

@pytree_dataclass
class DecayEarly(StepRule):
    "Another rule, with the first particles' share fading as factor^(n - num_early): for starts far from the mode."
    rule: StepRule
    num_early: int = field(default=1, metadata=dict(static=True))
    factor: Any = 0.9

    def __post_init__(self):
        check_count("num_early", self.num_early)
        if not isinstance(self.factor, jax.core.Tracer) and not 0 <= self.factor < 1:
            raise ValueError(f"factor must lie in [0, 1), got {self.factor!r}")
    def __call__(self, system):
        weights, size = self.rule(system)
        return fade(weights, self.num_early, self.factor ** jnp.maximum(system.count - self.num_early, 0)), size

def fade(weights: jax.Array, num_early: int, keep) -> jax.Array:
    "Multiply the first weights by `keep` and scale the others so that the total stays."
    early = jnp.arange(len(weights)) < num_early
    faded = jnp.where(early, keep * weights, weights)
    late, total = jnp.sum(jnp.where(early, 0.0, weights)), jnp.sum(weights)
    grow = jnp.where(late != 0, (total - jnp.sum(jnp.where(early, faded, 0.0))) / jnp.where(late != 0, late, 1.0), 1.0)
    return jnp.where(late != 0, jnp.where(early, faded, grow * faded), weights)
