from typing import Any
import jax, jax.numpy as jnp, numpy as np
from jax.scipy.linalg import solve_triangular
from jax.scipy.special import logsumexp
from mmdfw.checks import check_points, check_positive, pytree_dataclass

def log_normal(
    x: jax.Array,  # (d,)
    mean: jax.Array,  # (d,)
    root: jax.Array,  # (d, d): lower Cholesky factor of the covariance
) -> jax.Array:
    "Log density of a normal distribution."
    z = solve_triangular(root, x - mean, lower=True)
    return -0.5 * z @ z - jnp.sum(jnp.log(jnp.diag(root))) - 0.5 * len(x) * jnp.log(2 * jnp.pi)

@pytree_dataclass
class GaussianMixture:
    "A mixture of k normal distributions in d dimensions."
    weights: Any  # (k,), positive, summing to one
    means: Any  # (k, d)
    roots: Any  # (k, d, d): lower Cholesky factors of the covariances

    def logdensity(self, x):
        return logsumexp(jnp.log(self.weights) + jax.vmap(log_normal, (None, 0, 0))(x, self.means, self.roots))
    def score(self, x): return jax.grad(self.logdensity)(x)
    def sample(self, key, num):
        which_key, noise_key = jax.random.split(key)
        which = jax.random.categorical(which_key, jnp.log(self.weights), shape=(num,))
        noise = jax.random.normal(noise_key, (num, self.means.shape[1]), self.means.dtype)
        return self.means[which] + jnp.einsum("nij,nj->ni", self.roots[which], noise)

def gaussian_mixture(
    means,  # (k, d)
    sd=None,  # scalar or (k,): standard deviations of round components
    covariances=None,  # (k, d, d), instead of sd
    weights=None,  # (k,), uniform if None; scaled to sum to one
) -> GaussianMixture:
    "A checked mixture from means and either standard deviations or covariances."
    means = check_points("means", means)
    k, d = means.shape
    if (sd is None) == (covariances is None): raise ValueError("give exactly one of sd and covariances")
    if covariances is None:
        roots = jnp.broadcast_to(jnp.asarray(check_positive("sd", sd), means.dtype), (k,))[:, None, None] * jnp.eye(d, dtype=means.dtype)
    else:
        roots = jnp.linalg.cholesky(jnp.asarray(covariances, means.dtype).reshape(k, d, d))
        if not bool(jnp.all(jnp.isfinite(roots))): raise ValueError("covariances must be positive definite")
    weights = jnp.ones(k, means.dtype) if weights is None else jnp.asarray(check_positive("weights", weights), means.dtype)
    if weights.shape != (k,): raise ValueError(f"weights must have shape ({k},), got {weights.shape}")
    return GaussianMixture(weights / jnp.sum(weights), means, roots)

def eleven_gaussians(radius: float = 2.5, sd: float = 0.25) -> GaussianMixture:
    "The paper's toy target: 11 equal round Gaussians, one at the origin and ten on a circle."
    angles = 2 * np.pi * np.arange(10) / 10
    circle = radius * np.stack([np.cos(angles), np.sin(angles)], 1)
    return gaussian_mixture(jnp.asarray(np.concatenate([np.zeros((1, 2)), circle]), dtype=float), sd=sd)
