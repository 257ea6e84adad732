from typing import Any
import jax, jax.numpy as jnp
from mmdfw.checks import check_points, check_weights
from mmdfw.kernel import Kernel

def kernel_mean(
    kernel: Kernel,
    features_x,  # features of n points
    features_y,  # features of m points
    weights_y: jax.Array,  # (m,)
    chunk_size: int = 1024,  # memory: chunk_size * m numbers
) -> jax.Array:  # (n,): sum_j weights_y[j] k(x_i, y_j)
    "The kernel mean of a weighted set at n points, in chunks of bounded memory."
    row = lambda f: kernel.gram(jax.tree.map(lambda leaf: leaf[None], f), features_y)[0] @ weights_y
    n = len(weights_y) if features_x is features_y else jax.tree.leaves(features_x)[0].shape[0]
    if n <= chunk_size: return kernel.gram(features_x, features_y) @ weights_y
    return jax.lax.map(row, features_x, batch_size=chunk_size)

def mmd2_from_parts(
    weights: jax.Array,  # (n,)
    gram: jax.Array,  # (n, n)
    means: jax.Array,  # (n,): mu_p at the particles, the paper's z
    double_integral,  # E k(x, x') over two independent draws from p
) -> jax.Array:
    "|mu_p - mu_q|^2, never below zero"
    return jnp.maximum(weights @ gram @ weights - 2 * weights @ means + double_integral, 0.0)

def mmd2(
    kernel: Kernel,
    x,  # (n, d)
    y,  # (m, d)
    weights_x=None,  # (n,), uniform if None
    weights_y=None,  # (m,), uniform if None
) -> jax.Array:
    "Squared MMD of two weighted sets."
    x, y = check_points("x", x), check_points("y", y)
    weights_x, weights_y = check_weights("weights_x", weights_x, len(x)), check_weights("weights_y", weights_y, len(y))
    if x.shape[1] != y.shape[1]: raise ValueError(f"x has {x.shape[1]} dimensions and y has {y.shape[1]}")
    both = kernel.features(jnp.concatenate([x, y]))
    signed = jnp.concatenate([weights_x, -weights_y])
    return jnp.maximum(signed @ kernel_mean(kernel, both, both, signed), 0.0)

def witness(
    kernel: Kernel,
    points,  # (m, d): where to look
    x, y,  # (n, d), (l, d): the two sets
    weights_x=None, weights_y=None,
) -> jax.Array:  # (m,)
    "mu_x - mu_y at `points`: where the first set has too much mass, and where too little."
    x, y = check_points("x", x), check_points("y", y)
    weights_x, weights_y = check_weights("weights_x", weights_x, len(x)), check_weights("weights_y", weights_y, len(y))
    at = kernel.features(check_points("points", points))
    return (kernel_mean(kernel, at, kernel.features(x), weights_x)
            - kernel_mean(kernel, at, kernel.features(y), weights_y))

def ksd2(
    stein_kernel: Kernel,  # Stein(base, score_fn)
    x,  # (n, d)
    weights=None,
) -> jax.Array:
    "Squared kernel Stein discrepancy: the squared MMD of a kernel whose mean under the target is zero."
    x = check_points("x", x)
    weights = check_weights("weights", weights, len(x))
    features = stein_kernel.features(x)
    return jnp.maximum(weights @ kernel_mean(stein_kernel, features, features, weights), 0.0)
