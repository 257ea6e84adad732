from typing import Callable, NamedTuple
import jax, jax.numpy as jnp, numpy as np, optax
from mmdfw.checks import check_count, check_points
from mmdfw.embedding import Embedding
from mmdfw.kernel import Kernel
from mmdfw.mmd import mmd2_from_parts
from mmdfw.quadrature import Quadrature
from mmdfw.step import StepRule

class Weighed(NamedTuple):
    "Particles weighed by a rule, and what the weights came from."
    weights: jax.Array  # (n,)
    gram: jax.Array  # (n, n)
    factor: jax.Array  # (n, n)
    means: jax.Array  # (n,)

def weigh(kernel: Kernel, embedding: Embedding, positions: jax.Array, rule: StepRule, start: jax.Array) -> Weighed:
    "Quadrature weights at these positions; other rules keep the weights they have."
    features = kernel.features(positions)
    gram, means = kernel.gram(features, features), embedding.mean(positions, None)
    n = len(positions)
    factor = jnp.linalg.cholesky(gram + 10 * n * jnp.finfo(gram.dtype).eps * jnp.diag(jnp.diag(gram)))
    if not isinstance(rule, Quadrature): return Weighed(start, gram, factor, means)
    return Weighed(rule.weigh(gram, means, factor, jnp.ones(n, bool), start), gram, factor, means)

def refinement_objective(kernel: Kernel, embedding: Embedding, positions: jax.Array, rule: StepRule, start: jax.Array) -> jax.Array:
    "Half of MMD^2 less its constant, at the weights that are best for these positions; they need no gradient."
    weighed = weigh(kernel, embedding, positions, rule, start)
    w = jax.lax.stop_gradient(weighed.weights)
    return w @ weighed.gram @ w / 2 - w @ weighed.means

def refinement_chunk(kernel, embedding, rule, start, scale, carry, num_steps: int):
    "Some L-BFGS steps on all positions at once, with the best positions so far."
    loss = lambda u: refinement_objective(kernel, embedding, u * scale, rule, start)
    optimizer, value_and_grad = optax.lbfgs(memory_size=20), optax.value_and_grad_from_state(loss)
    def body(carry, _):
        u, state, best_u, best, used = carry
        value, slope = value_and_grad(u, state=state)
        better = value < best
        best_u, best = jnp.where(better, u, best_u), jnp.where(better, value, best)
        updates, state = optimizer.update(slope, state, u, value=value, grad=slope, value_fn=loss)
        moved = u + updates
        moved = jnp.where(jnp.all(jnp.isfinite(moved)), moved, best_u)
        return (moved, state, best_u, best, used + 1 + state[-1].info.num_linesearch_steps), None
    return jax.lax.scan(body, carry, length=num_steps)[0]

class Refined(NamedTuple):
    "Particles after refinement."
    positions: jax.Array  # (n, d)
    weighed: Weighed
    objective: np.ndarray  # after each chunk of steps, the first entry before any; it never rises
    passes: int  # times that all particles were looked at

jitted_chunk = jax.jit(refinement_chunk, static_argnames="num_steps")

def refine(
    kernel: Kernel,
    embedding: Embedding,  # one that does not change with the particles
    positions: jax.Array,  # (n, d)
    rule: StepRule = Quadrature(),
    weights=None,  # (n,), for rules other than Quadrature
    max_steps: int = 300,
    tolerance: float = 1e-3,  # stop when 25 steps lower MMD^2 by less than this part
    on_chunk: Callable = lambda steps, mmd2: None,  # called after each 25 steps
) -> Refined:
    "Move all particles together to lower the MMD that their weights reach."
    if not embedding.fixed: raise ValueError("refinement needs an embedding that does not change with the particles")
    check_count("max_steps", max_steps)
    positions = check_points("positions", positions)
    start = jnp.full(len(positions), 1.0 / len(positions), positions.dtype) if weights is None else jnp.asarray(weights)
    scale = getattr(kernel, "lengthscale", 1.0)
    first = refinement_objective(kernel, embedding, positions, rule, start)
    u = positions / scale
    carry = (u, optax.lbfgs(memory_size=20).init(u), u, first, jnp.zeros((), int))
    history, half = [float(first)], float(embedding.double_integral) / 2
    for done in range(0, max_steps, 25):
        carry = jitted_chunk(kernel, embedding, rule, start, scale, carry, num_steps=min(25, max_steps - done))
        history.append(float(carry[3]))
        on_chunk(done + 25, 2 * max(history[-1] + half, 0.0))
        if history[-2] - history[-1] <= tolerance * abs(history[-1] + half): break
    best = jnp.where(carry[3] < first, carry[2] * scale, positions)
    return Refined(best, weigh(kernel, embedding, best, rule, start), np.array(history), int(carry[4]))
