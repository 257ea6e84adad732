"""What a compiler once got wrong: XLA 0.10 on the CPU fused sums with products and spoilt columns beyond 16,384."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mmdfw.checks import assert_close
from mmdfw.kernel import RBF, Stein, squared_distances


@pytest.mark.parametrize("d", [3, 5, 6, 7])
@pytest.mark.parametrize("n", [2, 4])
def test_few_points_against_many(n, d):
    with jax.enable_x64(True):
        many = jnp.asarray(np.random.default_rng(d).normal(size=(20_000, d)))
        direct = jnp.sum((many[:n, None] - many) ** 2, -1)
        assert_close(jax.jit(squared_distances)(many[:n], many), direct, rtol=1e-9, atol=1e-9)
        kernel = Stein(RBF(1.3), lambda x: -x)
        assert_close(jax.jit(kernel.matrix)(many[:n], many), kernel.matrix(many[:n], many), rtol=1e-9, atol=1e-9)
