"""Means, covariances and marginals are looked after, in any dimension and precision, and odd sets do no harm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mmdfw
from mmdfw._refinement import refine
from mmdfw._trust import plain_findings
from mmdfw.contracts import check_kernel
from mmdfw.embeddings._summaries import with_summaries
from mmdfw.experiments._bench_mixture import exact_mmd2
from mmdfw.kernels import default_kernel
from mmdfw.steps import Quadrature

PROBABILITIES = Quadrature("simplex")


def aims(points, weights=None):
    "Kernel and embedding with summaries, of a set."
    kernel = default_kernel(points, weights)
    return with_summaries(kernel, mmdfw.reference_embedding(kernel, points, weights))


def off(positions, weights, points):
    "Worst errors of a mean in sds, and of an sd in parts of it."
    x, w, y = (np.asarray(array, float) for array in (positions, weights, points))
    mean = w @ x
    sd = np.sqrt(w @ (x - mean) ** 2)
    return np.max(np.abs(mean - y.mean(0)) / y.std(0)), np.max(np.abs(sd / y.std(0) - 1))


@pytest.mark.parametrize("d", [1, 3, 250])
def test_it_is_a_kernel(d):
    points = jax.random.normal(jax.random.key(d), (400, d))
    check_kernel(aims(points)[0], points[:20])


@pytest.mark.parametrize("d", [2, 30])
def test_moments_after_refinement(d, dtype):
    "Correlated and skewed draws in units from a hundredth to a hundred: fifty particles have their moments."
    rng = np.random.default_rng(d)
    mix = rng.normal(size=(d, d)) * np.geomspace(0.01, 100, d)[:, None]
    points = jnp.asarray((rng.gamma(2.0, size=(3000, d)) - 2) @ mix.T, dtype)
    found = refine(*aims(points), points[:50], PROBABILITIES, max_steps=150)
    assert found.positions.dtype == dtype
    assert max(off(found.positions, found.weighed.weights, points)) < 0.05


def test_marginals_of_few_particles_in_many_dimensions():
    "What a kernel of the distance alone spoils, seen by a kernel that neither minimises."
    rng = np.random.default_rng(5)
    points = rng.normal(size=(4000, 1)) + np.log(rng.gamma(2.0, size=(4000, 30)))
    (kernel, embedding), start = aims(jnp.asarray(points, jnp.float32)), jnp.asarray(points[:50], jnp.float32)

    def plain(kernel, embedding):
        found = refine(kernel, embedding, start, PROBABILITIES)
        x, w = np.asarray(found.positions, float), np.asarray(found.weighed.weights, float)
        (over_draws,) = plain_findings(x, w, points, np.full(4000, 1 / 4000))
        return over_draws.value

    assert plain(kernel, embedding) < 0.5 * plain(kernel.base, embedding.base)


@pytest.mark.parametrize(
    "points",
    [np.ones((30, 2)), np.repeat([[0.0, 1.0], [2.0, 3.0]], 20, 0), np.column_stack([np.arange(40.0), np.ones(40)])],
    ids=["one place", "two places", "a constant coordinate"],
)
def test_odd_sets_stay_finite(points):
    found = refine(*aims(jnp.asarray(points, jnp.float32)), jnp.asarray(points[:4], jnp.float32), PROBABILITIES)
    assert np.isfinite(found.positions).all() and abs(float(found.weighed.weights.sum()) - 1) < 1e-4


def test_growth_in_goes_is_as_good_as_at_once():
    "Ten particles and forty more on the eleven Gaussians, with nothing chosen."
    density = mmdfw.eleven_gaussians().logdensity
    make = lambda num: mmdfw.fit(jax.random.key(0), density, jnp.zeros(2), num_particles=num, progress=False)
    grown, whole = make(10).add(40, progress=False), make(50)
    np.testing.assert_allclose(grown.positions, whole.positions, atol=1e-4)
    assert exact_mmd2(grown.positions, grown.weights) < 5e-4
