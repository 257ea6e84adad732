"""The nearest Gaussian: alone, as an embedding, and as coordinates of a sampler."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mmdfw._checks import assert_close
from mmdfw._fit import fit
from mmdfw.embeddings._gaussian import gaussian_approximation, nearest_gaussian
from mmdfw.kernels._kernel import IMQ
from mmdfw.samplers._chains import nuts

MEAN, ROOT = np.array([1.0, -1.0, 0.5]), np.array([[1.0, 0, 0], [0.8, 0.4, 0], [0.0, 2.0, 3.0]])
START = {"a": jnp.zeros(2), "b": jnp.zeros(())}


def bell(p):
    z = jnp.linalg.solve(jnp.asarray(ROOT, p["a"].dtype), jnp.append(p["a"], p["b"]) - MEAN.astype(p["a"].dtype))
    return -0.5 * z @ z


def like(dtype):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), START)


def test_a_gaussian_is_its_own_nearest(dtype):
    found = gaussian_approximation(jax.random.key(0), bell, like(dtype), num_steps=400)
    assert found.mean.dtype == found.root.dtype == dtype
    assert_close(found.mean, MEAN, atol=1e-4)
    assert_close(found.root, ROOT, atol=1e-3)
    assert np.all(np.triu(found.root, 1) == 0) and found.evaluations > 2 * 400 * 16


def test_scale_and_place_do_not_matter():
    "The climb is in the Gaussian's own coordinates: stretch and shift the target, and the answer stretches and shifts."
    skewed = lambda u: jnp.sum(u - jnp.exp(u))
    with jax.enable_x64(True):
        plain = nearest_gaussian(jax.random.key(1), skewed, jnp.zeros(2), num_steps=50)
        far = nearest_gaussian(
            jax.random.key(1), lambda x: skewed((x - 1e3) / 1e4), jnp.full(2, 1e3), 1e4 * jnp.eye(2), num_steps=50
        )
        assert_close(far.mean, 1e3 + 1e4 * plain.mean, rtol=1e-9)
        assert_close(far.root, 1e4 * plain.root, rtol=1e-9, atol=1e-9)


def test_a_target_that_is_nowhere_finite_leaves_the_first_guess():
    with pytest.warns(UserWarning, match="went astray"):
        found = nearest_gaussian(jax.random.key(2), lambda x: jnp.nan * x[0], jnp.ones(2), num_steps=20)
    assert np.array_equal(found.mean, np.ones(2)) and np.array_equal(found.root, np.eye(2))


@pytest.fixture(scope="module")
def by_name():
    "One small fit for each of the two embeddings."
    with jax.enable_x64(False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            name: fit(jax.random.key(3), bell, START, num_particles=8, embedding=name, max_refinement_steps=50)
            for name in ("gaussian", "nuts")
        }


@pytest.mark.parametrize(
    "name, words",
    [("gaussian", "the nearest Gaussian, 2048 draws of it worth 20"), ("nuts", "draws of 16 chains worth")],
)
def test_embedding(by_name, name, words):
    result = by_name[name]
    assert words in result.embedding_name and len(result) == 8
    mean = result.expectation(lambda p: p["b"])
    assert abs(float(mean.mean) - 0.5) < 0.6  # the standard deviation is 3.6
    assert np.isfinite(mean.sd), "the Gaussian's own error comes from importance weights"


def test_more_particles_later(by_name):
    whole = fit(jax.random.key(3), bell, START, num_particles=12, embedding="gaussian", max_refinement_steps=50)
    assert np.array_equal(by_name["gaussian"].add(4).positions, whole.positions)


def test_kernel_without_a_closed_form():
    result = fit(jax.random.key(4), bell, START, num_particles=4, embedding="gaussian", kernel=IMQ(2.0), refine=False)
    assert "nearest Gaussian" in result.embedding_name and isinstance(result.parts.kernel, IMQ)
    assert np.isfinite(result.expectation(lambda p: p["b"]).sd), "known from importance weights, whatever the kernel"


def test_tens_of_dimensions_by_default():
    result = fit(jax.random.key(5), lambda x: -0.5 * x @ x, jnp.ones(21), num_particles=3, refine=False)
    assert "draws" in result.embedding_name and "Gaussian" not in result.embedding_name


def test_a_progress_bar_changes_nothing(capsys):
    near = gaussian_approximation(jax.random.key(6), bell, START, num_steps=50)
    runs = [
        nuts(jax.random.key(7), bell, START, 30, 2, 20, gaussian=near, progress=progress).positions
        for progress in (False, True)
    ]
    assert np.array_equal(*runs) and "NUTS" in capsys.readouterr().err
