from dataclasses import dataclass, fields
from typing import Any, Callable, NamedTuple
import jax, jax.numpy as jnp, numpy as np
from jax.flatten_util import ravel_pytree

def assert_close(
    actual,  # what the code gave
    expected,  # what it should be, found by another route
    rtol: float = 1e-6,  # largest relative error
    atol: float = 0.0,  # largest absolute error, where the truth is zero
):
    "Fail unless shapes are equal and every entry agrees."
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape, f"shapes differ: {actual.shape} and {expected.shape}"
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol)

def pytree_dataclass(cls):
    "A frozen dataclass that JAX may trace: fields marked `static` are compiled in, the others are data."
    cls = dataclass(frozen=True, eq=False)(cls)
    static = [f.name for f in fields(cls) if f.metadata.get("static")]
    data = [f.name for f in fields(cls) if f.name not in static]
    return jax.tree_util.register_dataclass(cls, data_fields=data, meta_fields=static)

def check_positive(name: str, value):
    "Every entry of `value` must be a finite number above zero; tracers pass."
    if isinstance(value, jax.core.Tracer): return value
    array = np.asarray(value)
    if not (np.issubdtype(array.dtype, np.number) and np.all(np.isfinite(array)) and np.all(array > 0)):
        raise ValueError(f"{name} must be positive and finite, got {value!r}")
    return value

def check_count(name: str, value, at_least: int = 1):
    "`value` must be a whole number, `at_least` or more."
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < at_least:
        raise ValueError(f"{name} must be a whole number of at least {at_least}, got {value!r}")
    return int(value)

def check_choice(name: str, value, choices):
    "`value` must be one of `choices`."
    if value not in choices: raise ValueError(f"{name} must be one of {sorted(choices)}, got {value!r}")
    return value

def check_points(name: str, points):
    "A finite floating (n, d) array, n and d at least one."
    array = jnp.asarray(points)
    if array.ndim != 2 or 0 in array.shape:
        raise ValueError(f"{name} must be an (n, d) array with n, d >= 1, got shape {array.shape}")
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"{name} must hold floating point numbers, got dtype {array.dtype}")
    if not bool(jnp.all(jnp.isfinite(array))): raise ValueError(f"{name} holds NaN or infinite entries")
    return array

def check_weights(name: str, weights, n: int):
    "n finite weights, or uniform ones where None is given."
    if weights is None: return jnp.full(n, 1.0 / n)
    array = jnp.asarray(weights)
    if array.shape != (n,): raise ValueError(f"{name} must have shape ({n},) to match the points, got {array.shape}")
    if not bool(jnp.all(jnp.isfinite(array))): raise ValueError(f"{name} holds NaN or infinite entries")
    return array

class FlatTarget(NamedTuple):
    "A log density over one vector, and the way back to the user's pytree."
    logdensity: Callable  # vector -> scalar
    position: jax.Array  # (d,) where the user starts
    unravel: Callable  # vector -> pytree

def flatten_target(
    logdensity_fn: Callable,  # log density up to a constant, of a pytree or vector
    position,  # a pytree of floating arrays
) -> FlatTarget:
    "Check the target at its start and flatten it to a function of one vector."
    for path, leaf in jax.tree_util.tree_leaves_with_path(position):
        if not jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.floating):
            raise ValueError(f"position{jax.tree_util.keystr(path)} has dtype {jnp.asarray(leaf).dtype}; "
                             "every leaf must be floating point (use 1.0 instead of 1)")
    flat, unravel = ravel_pytree(position)
    if flat.size == 0: raise ValueError("position is empty: it needs at least one number")
    if not bool(jnp.all(jnp.isfinite(flat))): raise ValueError(f"position must be finite, got {flat}")
    flat_logdensity = lambda x: logdensity_fn(unravel(x))
    check_logdensity(flat_logdensity, flat)
    return FlatTarget(flat_logdensity, flat, unravel)

def check_logdensity(logdensity: Callable, position: jax.Array):
    "The value at the start must be one finite real number, and so must its gradient be."
    value = logdensity(position)
    shape, dtype = jnp.shape(value), jnp.asarray(value).dtype
    if shape != (): raise ValueError(f"logdensity_fn must return a scalar, got an array of shape {shape}")
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"logdensity_fn must return a floating point number, got dtype {dtype}")
    if not bool(jnp.isfinite(value)):
        raise ValueError(f"logdensity_fn is {value} at the start {position}; start where the density is positive")
    score = jax.grad(logdensity)(position)
    if not bool(jnp.all(jnp.isfinite(score))):
        raise ValueError(f"the gradient of logdensity_fn is not finite at the start {position}: {score}")
