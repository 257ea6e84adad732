"""Shared fixtures. 64-bit floats are switched on by context only, so that no test can leak them into another."""

import jax, jax.numpy as jnp, pytest

from mmdfw._fit import fit


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
