from dataclasses import field
from typing import Any, NamedTuple
import jax, jax.numpy as jnp, optax
from jax.scipy.linalg import solve_triangular
from mmdfw.checks import check_choice, pytree_dataclass
from mmdfw.mmd import mmd2_from_parts
from mmdfw.step import StepRule, System, active

def jitter_ladder(dtype) -> jax.Array:
    "Parts of the diagonal to try in turn: none, then seven rungs from ten rounding errors to a thousandth."
    return jnp.concatenate([jnp.zeros(1, dtype), jnp.geomspace(10 * jnp.finfo(dtype).eps, 1e-3, 7, dtype=dtype)])

def grow_factor(
    factor: jax.Array,  # (capacity, capacity): lower Cholesky factor, the identity from row `count` on
    column: jax.Array,  # (capacity,): k(x_new, x_i), zero from `count` on
    peak: jax.Array,  # k(x_new, x_new)
    count: jax.Array,  # rows in use
):  # -> the factor with one more row, and the jitter added to k(x_new, x_new)
    "One more row of the Cholesky factor at O(n^2), with the first jitter that keeps it well above rounding."
    row = solve_triangular(factor, column, lower=True)
    left, ladder = peak - row @ row, jitter_ladder(factor.dtype) * peak
    rounding = 10 * (count + 1) * jnp.finfo(factor.dtype).eps * peak
    jitter = ladder[jnp.argmax((left + ladder > rounding).at[-1].set(True))]
    pivot = jnp.sqrt(jnp.maximum(left + jitter, rounding))
    here = jnp.arange(len(column)) == count
    return jnp.where(here[:, None], jnp.where(here, pivot, row)[None, :], factor), jitter

def solve(factor: jax.Array, right: jax.Array) -> jax.Array:
    "K^-1 right, from the Cholesky factor of K"
    return solve_triangular(factor, solve_triangular(factor, right, lower=True), lower=True, trans=1)

def free_weights(factor: jax.Array, means: jax.Array) -> jax.Array:
    "K^-1 z: the smallest MMD of all weights"
    return solve(factor, means)

def sum_to_one_weights(factor: jax.Array, means: jax.Array, ones: jax.Array) -> jax.Array:
    "The smallest MMD of all weights that sum to one; `ones` is 1 for the particles in use."
    plain, slack = solve(factor, means), solve(factor, ones)
    return plain + slack * (1 - ones @ plain) / (ones @ slack)

def simplex_weights(
    gram: jax.Array,  # (capacity, capacity)
    means: jax.Array,  # (capacity,)
    inside: jax.Array,  # (capacity,) bool: particles in use
    start: jax.Array,  # (capacity,): where to begin
    num_steps: int = 500,
) -> jax.Array:
    "The smallest MMD on the simplex: accelerated projected gradient, then an exact solve on the support it found."
    lipschitz = jnp.max(jnp.sum(jnp.abs(gram), 1))
    project = lambda v: optax.projections.projection_simplex(jnp.where(inside, v, -1e6))
    def body(_, carry):
        w, ahead, t = carry
        new = project(ahead - (gram @ ahead - means) / lipschitz)
        t_new = (1 + jnp.sqrt(1 + 4 * t**2)) / 2
        restart = (ahead - new) @ (new - w) > 0
        t_new = jnp.where(restart, 1.0, t_new)
        return new, jnp.where(restart, new, new + (t - 1) / t_new * (new - w)), t_new
    first = project(start)
    w, _, _ = jax.lax.fori_loop(0, num_steps, body, (first, first, jnp.ones((), gram.dtype)))
    return polish_support(gram, means, w)

def polish_support(gram: jax.Array, means: jax.Array, weights: jax.Array) -> jax.Array:
    "Solve the sum-to-one problem on the support; keep it if it stays on the simplex and is no worse."
    support = weights > 1e-9
    both = support[:, None] & support[None, :]
    eps = jnp.finfo(gram.dtype).eps
    padded = jnp.where(both, gram, 0.0) + jnp.diag(jnp.where(support, 10 * eps * jnp.diag(gram), 1.0))
    exact = sum_to_one_weights(jnp.linalg.cholesky(padded), jnp.where(support, means, 0.0), support.astype(gram.dtype))
    objective = lambda w: w @ gram @ w / 2 - w @ means
    good = jnp.all(exact >= 0) & jnp.all(jnp.isfinite(exact)) & (objective(exact) <= objective(weights))
    return jnp.where(good, exact, weights)

@pytree_dataclass
class Quadrature(StepRule):
    "Bayesian quadrature weights: full correction of all weights at every step."
    constraint: str = field(default="free", metadata=dict(static=True))  # or "sum_to_one", "simplex"

    def __post_init__(self): check_choice("constraint", self.constraint, ("free", "sum_to_one", "simplex"))
    def __call__(self, system):
        inside = active(system)
        return self.weigh(system.gram, jnp.where(inside, system.means, 0.0), system.factor, inside, system.weights), jnp.nan
    def weigh(self, gram, means, factor, inside, start):
        if self.constraint == "free": return free_weights(factor, means)
        if self.constraint == "sum_to_one": return sum_to_one_weights(factor, means, inside.astype(means.dtype))
        return simplex_weights(gram, means, inside, start)

def decrease_by_one_point(
    factor: jax.Array,  # (n, n)
    means: jax.Array,  # (n,): z
    column: jax.Array,  # (n,): a = k(x_new, x_i)
    peak,  # k(x_new, x_new)
    new_mean,  # z_new
) -> jax.Array:
    "How much one more point lowers the MMD^2 of free BQ weights: (z_new - a'K^-1 z)^2 / (k_new - a'K^-1 a)"
    inverse = solve(factor, column)
    return (new_mean - inverse @ means) ** 2 / (peak - inverse @ column)

class InexactBQ(NamedTuple):
    "Theorem 1's quantities for weights made of an estimate of z."
    beta: jax.Array  # (n,): estimate over truth
    condition: jax.Array  # the left side of Eq. 6; the theorem asks that it be above zero
    delta_bq: jax.Array  # the paper's rate factor for the last particle
    holds: jax.Array

def inexact_bq(
    estimated_means: jax.Array,  # (n,): z-hat
    means: jax.Array,  # (n,): z
    factor: jax.Array,  # (n, n): Cholesky factor of the Gram matrix
    double_integral,
) -> InexactBQ:
    "beta, delta_BQ and the condition of Theorem 1."
    beta = estimated_means / means
    condition = double_integral - estimated_means @ solve(factor, estimated_means)
    exact = double_integral - means @ solve(factor, means)
    return InexactBQ(beta, condition, beta[-1] ** 2 * exact / condition, condition > 0)

class IntegralPosterior(NamedTuple):
    "What a Gaussian process believes of an integral."
    mean: jax.Array
    sd: jax.Array

def integral_posterior(
    values: jax.Array,  # (n,) or (n, k): the integrand at the particles
    weights: jax.Array,  # (n,): quadrature weights
    gram: jax.Array,  # (n, n)
    factor: jax.Array,  # (n, n)
    mmd2,  # of these weights
    amplitude2=None,  # variance of the process; its maximum likelihood value if None
) -> IntegralPosterior:
    "Mean w'f and standard deviation sqrt(amplitude2 * MMD^2)."
    values = jnp.asarray(values)
    if amplitude2 is None: amplitude2 = fitted_amplitude2(values, factor)
    return IntegralPosterior(jnp.tensordot(weights, values, 1), jnp.sqrt(amplitude2 * mmd2))

def fitted_amplitude2(values: jax.Array, factor: jax.Array) -> jax.Array:
    "Maximum likelihood variance of a process with an unknown constant mean: r'K^-1 r / n."
    n, flat = len(values), jnp.reshape(values, (len(values), -1))
    ones = jnp.ones(n, flat.dtype)
    level = solve(factor, ones) @ flat / (ones @ solve(factor, ones))
    residual = solve_triangular(factor, flat - level, lower=True)
    return jnp.reshape(jnp.sum(residual**2, 0) / n, values.shape[1:])
