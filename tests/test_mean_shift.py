"""Mean-shift particles: what they count, what they refuse, keys, pytrees, precision, and the fixed point."""

import warnings
import jax, jax.numpy as jnp, numpy as np, pytest

from mmdfw._checks import assert_close
from mmdfw._mixture import gaussian_mixture
from mmdfw.embeddings._embedding import exact_embedding
from mmdfw.experiments._bench_posteriors import counted
from mmdfw.kernels._kernel import RBF
from mmdfw.samplers import MeanShiftResult, mean_shift
from mmdfw.samplers._mean_shift import jitted_shift_to_embedding

KEY = jax.random.key(5)
FEW = dict(num_steps=4, bandwidth=0.4)


def bell(x):
    return -0.5 * jnp.sum((x - 1.0) ** 2 / jnp.array([0.5, 2.0, 1.0], x.dtype))


def nested_bell(p):
    return bell(jnp.concatenate([p["a"].ravel(), p["b"][None]]))


def points(num=12, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(num, 3)), jnp.result_type(float))


@pytest.mark.parametrize(
    "setting, number",
    [
        (dict(), 12 * (2 * 4 + 1)),
        (dict(num_nodes=5, key=KEY), 12 * 5 * (2 * 4 + 1)),
        (dict(num_nodes=5, score_share=0.0, key=KEY), 12 * 5 * (4 + 1)),
    ],
)
def test_every_log_density_and_score_is_counted(setting, number):
    counting, calls = counted(bell)
    found = mean_shift(counting, points(), **FEW, **setting)
    jax.block_until_ready(found.positions)
    assert found.evaluations == sum(calls) == number


def test_a_pytree_moves_as_its_vector_does(x64):
    x = points()
    flat = mean_shift(bell, x, **FEW)
    tree = mean_shift(nested_bell, {"a": x[:, :2].reshape(-1, 1, 2), "b": x[:, 2]}, **FEW)
    assert_close(tree.positions, flat.positions, rtol=1e-10)
    assert_close(tree.particles["a"], np.asarray(flat.positions)[:, :2].reshape(-1, 1, 2), rtol=1e-10)
    assert isinstance(flat, MeanShiftResult) and not np.any(flat.rejected)


def test_nodes_depend_on_the_key_alone(x64):
    run = lambda seed: mean_shift(bell, points(), num_nodes=4, key=jax.random.key(seed), **FEW).positions
    assert np.array_equal(run(1), run(1)) and not np.allclose(run(1), run(2))


@pytest.mark.parametrize("nodes", [1, 8])
def test_float32_gives_what_float64_does(nodes):
    found = {}
    for x64 in (False, True):
        with jax.enable_x64(x64):
            start = jnp.asarray(np.asarray(points()), jnp.float64 if x64 else jnp.float32)
            found[x64] = mean_shift(bell, start, 10, bandwidth=0.4, num_nodes=nodes, key=jax.random.key(1))
            assert found[x64].positions.dtype == found[x64].weights.dtype == start.dtype
    assert_close(found[False].positions, found[True].positions, 1e-2, atol=1e-2)
    assert_close(found[False].weights, found[True].weights, 1e-2, atol=1e-2)


def test_a_constant_of_the_log_density_changes_nothing(x64):
    far = mean_shift(lambda x: bell(x) - 1e4, points(), **FEW)
    near = mean_shift(bell, points(), **FEW)
    assert_close(far.positions, near.positions, 1e-8)
    assert_close(far.weights, near.weights, 1e-8)


def test_one_particle_climbs_to_the_mode_of_the_smoothed_density(x64):
    embedding = exact_embedding(RBF(0.5), gaussian_mixture(jnp.array([[1.0, -2.0]]), sd=0.5))
    end, weights = jitted_shift_to_embedding(embedding, jnp.array([[0.5, -1.0]]), 200)
    assert_close(end.positions, [[1.0, -2.0]], 1e-6)
    assert_close(weights, embedding.mean(end.positions), 1e-6)


def test_it_shifts_with_the_target(x64):
    away = jnp.array([3.0, -1.0, 7.0])
    here, there = mean_shift(bell, points(), **FEW), mean_shift(lambda x: bell(x - away), points() + away, **FEW)
    assert_close(there.positions - away, here.positions, 1e-6, atol=1e-8)


def test_what_is_not_finite_counts_as_nothing(x64):
    half = lambda x: jnp.where(x[0] > -0.5, bell(x), jnp.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = mean_shift(half, points(), **FEW)
    assert np.isfinite(found.positions).all() and np.isfinite(found.weights).all()
    with pytest.raises(ValueError, match="start where the density is positive"):
        mean_shift(lambda x: jnp.sum(x) * jnp.nan, points(), **FEW)


@pytest.mark.parametrize(
    "setting, words",
    [
        (dict(num_steps=0), "num_steps must be a whole number of at least 1, got 0"),
        (dict(rate=0.0), "rate must be above 0 and at most 1, got 0.0"),
        (dict(rate=float("nan")), "rate must be above 0"),
        (dict(bandwidth=0.0), "bandwidth must be positive and finite, got 0.0"),
        (dict(bandwidth="mean"), "got 'mean'"),
        (dict(num_nodes=0), "num_nodes must be a whole number of at least 1, got 0"),
        (dict(num_nodes=3), "give a key"),
        (dict(num_nodes=3, key=0), "key must be a random key, got 0"),
        (dict(num_nodes=3, score_share=-0.1, key=KEY), "score_share must be between 0 and 1, got -0.1"),
        (dict(score_share=0.0), "score_share must be 1 there, got 0.0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(setting, words):
    with pytest.raises(ValueError, match=words):
        mean_shift(bell, points(), **setting)


def test_positions_and_functions_are_checked():
    with pytest.raises(ValueError, match="one particle has no neighbours"):
        mean_shift(bell, points(1))
    with pytest.raises(ValueError, match="must return a scalar"):
        mean_shift(lambda x: x, points())
    with pytest.raises(ValueError, match="NaN|finite"):
        mean_shift(bell, points() * np.nan)
