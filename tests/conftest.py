"""Shared fixtures. 64-bit floats are switched on by context only, so that no test can leak them into another."""

import warnings

import jax, jax.numpy as jnp, numpy as np, pytest

from mmdfw._fit import fit
from mmdfw._trust import GRADES


def pytest_configure(config):
    "Compiled code is kept, by default in pytest's own cache directory: most of the suite's time is compilation."
    cache = getattr(config, "cache", None)
    if cache is None or jax.config.jax_compilation_cache_dir:
        return
    jax.config.update("jax_compilation_cache_dir", str(cache.mkdir("jax")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


@pytest.fixture(autouse=True)
def no_leak():
    "Every test leaves the global precision as it found it."
    before = jax.config.jax_enable_x64
    yield
    assert jax.config.jax_enable_x64 == before, "a test changed jax_enable_x64 for good"


@pytest.fixture
def x64():
    "64-bit floats for one test."
    with jax.enable_x64(True):
        yield


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    "Both precisions, one after the other."
    with jax.enable_x64(request.param == "float64"):
        yield jnp.dtype(request.param)


def gaussian(x):
    "A correlated Gaussian with mean (1, -1), covariance [[1, 0.3], [0.3, 0.25]]."
    precision = jnp.array([[1.5625, -1.875], [-1.875, 6.25]], x.dtype)
    centred = x - jnp.array([1.0, -1.0], x.dtype)
    return -0.5 * centred @ precision @ centred


@pytest.fixture(scope="session")
def gaussian_fit():
    "One small float32 fit on the Gaussian above, shared by all tests that only read it."
    with jax.enable_x64(False):
        return fit(jax.random.key(0), gaussian, jnp.zeros(2), num_particles=20, max_refinement_steps=100)


def fitted(logdensity, d, seed=0, **options):
    "A fit with nothing chosen, its warnings caught."
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fit(jax.random.key(seed), logdensity, jnp.zeros(d), progress=False, **options)
    assert result.verdict in GRADES
    words = [str(one.message) for one in caught]
    assert (result.verdict == "trusted") != any(f"this result is {result.verdict}" in word for word in words)
    return result


def moments(result):
    "Weighted means and standard deviations of the particles."
    x, w = np.asarray(result.positions, float), np.asarray(result.weights, float)
    mean = w @ x
    return mean, np.sqrt(w @ (x - mean) ** 2)


def off(result, mean, sd):
    "The worst error of a mean in sds, and of an sd in parts of it."
    found_mean, found_sd = moments(result)
    return np.max(np.abs(found_mean - mean) / sd), np.max(np.abs(found_sd / sd - 1))


def right_or_told(result, mean, sd, tolerance=0.15):
    "The moments are right, or the verdict says that something is wrong."
    return result.verdict != "trusted" or max(off(result, mean, sd)) < tolerance
