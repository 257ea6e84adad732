"""Right, or refused, or with a verdict that says so: what new users met as silent wrong answers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import fitted, moments, off, right_or_told

import mmdfw


@pytest.mark.parametrize("seed", range(3))
def test_a_bent_plane(seed):
    bent = lambda x: -0.5 * x[0] ** 2 - 0.5 * ((x[1] - (x[0] ** 2 - 1)) / 0.5) ** 2
    result = fitted(bent, 2, seed)
    assert right_or_told(result, np.zeros(2), np.array([1.0, 1.5]))
    assert max(off(result, np.zeros(2), np.array([1.0, 1.5]))) < 0.2


def test_heavy_tails():
    result = fitted(lambda x: -5.0 * jnp.log1p(x @ x / 5), 5)  # Student t with 5 degrees of freedom
    square = result.expectation(lambda x: x @ x)
    assert abs(square.mean - 25 / 3) < 4 * square.sd or result.verdict != "trusted"
    assert abs(square.mean - 25 / 3) < 0.8


@pytest.mark.parametrize("logdensity", [lambda x: x @ x, lambda x: 0.0 * jnp.sum(x), lambda x: jnp.sum(x)])
def test_what_is_no_density_is_refused(logdensity):
    with pytest.raises(ValueError, match="no density.*sign wrong"):
        mmdfw.fit(jax.random.key(0), logdensity, jnp.zeros(2), progress=False)


@pytest.mark.parametrize("distance, start", [(10.0, 0.0), (10.0, -10.0), (30.0, 0.0), (30.0, -30.0)])
def test_modes_that_lie_apart_get_their_shares(distance, start):
    bump = lambda x, at, share: jnp.log(share) - 0.5 * jnp.sum((x - at) ** 2)
    two = lambda x: jnp.logaddexp(bump(x + start, -distance, 0.3), bump(x + start, distance, 0.7))
    result = fitted(two, 1)
    share = float(jnp.sum(jnp.where(result.positions[:, 0] + start > 0, result.weights, 0.0)))
    assert abs(share - 0.7) < 0.05 or result.verdict != "trusted"


@pytest.mark.parametrize("lengthscale", [1e-6, 100.0])
def test_absurd_lengthscales_are_not_trusted(lengthscale):
    result = fitted(lambda x: -0.5 * x @ x, 2, kernel=mmdfw.RBF(lengthscale))
    assert right_or_told(result, np.zeros(2), np.ones(2))


def test_draws_of_something_else_are_not_trusted():
    draws = 7.0 + 0.1 * jax.random.normal(jax.random.key(1), (500, 2))
    embedding = mmdfw.reference_embedding(mmdfw.RBF(0.1), draws)
    result = fitted(lambda x: -0.5 * x @ x, 2, embedding=embedding, num_particles=10)
    assert result.verdict == "failed" and "mean score" in result.report()


def skew(u):
    return -0.5 * jnp.sum(u[1:] ** 2) - 0.5 * (u[0] - 0.5 * u[1] ** 2) ** 2


@pytest.fixture(scope="module", params=[2, 12])
def plain(request):
    "The fit that every map of it is held against."
    return fitted(skew, request.param)


@pytest.mark.parametrize("seed", range(3))
def test_linear_maps_do_not_matter(plain, seed):
    "fit of Ax + b is A fit(x) + b: means within 0.1 of a standard deviation, MMD^2 in one kernel alike."
    rng, d = np.random.default_rng(seed), plain.positions.shape[1]
    A, b = rng.normal(size=(d, d)) * 10.0 ** rng.uniform(-2, 2, (d, 1)), 5 * rng.normal(size=d)
    back = jnp.asarray(np.linalg.inv(A), jnp.float32)
    mapped = fitted(lambda x: skew(back @ (x - jnp.asarray(b, jnp.float32))), d)
    returned = (np.asarray(mapped.positions, float) - b) @ np.linalg.inv(A).T
    kernel = plain.parts.kernel
    apart = float(
        mmdfw.mmd2(kernel, plain.positions, jnp.asarray(returned, jnp.float32), plain.weights, mapped.weights)
    )
    own = sum(one.discrepancy + float(one.parts.embedding.error2) for one in (plain, mapped))
    assert apart < 2 * own, "the triangle inequality for two sets that stand for the same target"
    assert apart < 0.2 / len(plain), "of two sets of as many draws it would be 2 / n"
    (mean, sd), x = moments(plain), returned
    assert np.max(np.abs(np.asarray(mapped.weights, float) @ x - mean) / sd) < 0.15
