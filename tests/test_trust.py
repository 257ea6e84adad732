"""Right, or refused, or with a verdict that says so: what new users met as silent wrong answers."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mmdfw
from mmdfw._trust import GRADES


def fitted(logdensity, d, seed=0, **options):
    "A fit with nothing chosen, its warnings caught."
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = mmdfw.fit(jax.random.key(seed), logdensity, jnp.zeros(d), progress=False, **options)
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


def test_two_modes_in_tens_of_dimensions():
    bump = lambda x, at: -0.5 * jnp.sum((x - at) ** 2)
    result = fitted(lambda x: jnp.logaddexp(bump(x, -4.0), bump(x, 4.0)), 25)
    share = float(jnp.sum(jnp.where(jnp.mean(result.positions, 1) > 0, result.weights, 0.0)))
    assert abs(share - 0.5) < 0.1 or result.verdict != "trusted"


def test_a_banana_in_thirty_dimensions():
    banana = lambda x: -0.5 * jnp.sum(x[2:] ** 2) - x[0] ** 2 / 8 - 0.5 * (x[1] - 0.5 * (x[0] ** 2 - 4)) ** 2
    sd = np.array([2.0, np.sqrt(1 + 8), *np.ones(28)])
    result = fitted(banana, 30)
    assert right_or_told(result, np.zeros(30), sd)
    assert off(result, np.zeros(30), sd)[0] < 0.3


@pytest.mark.parametrize("d", [200, 201, 1000])
def test_gaussians_in_many_dimensions(d):
    sd = np.geomspace(0.1, 10, d)
    result = fitted(lambda x: -0.5 * jnp.sum((x / jnp.asarray(sd)) ** 2), d)
    assert right_or_told(result, np.zeros(d), sd)
    assert off(result, np.zeros(d), sd)[0] < 0.5 and np.median(moments(result)[1] / sd) > 0.5


@pytest.mark.parametrize("lengthscale", [1e-6, 100.0])
def test_absurd_lengthscales_are_not_trusted(lengthscale):
    result = fitted(lambda x: -0.5 * x @ x, 2, kernel=mmdfw.RBF(lengthscale))
    assert right_or_told(result, np.zeros(2), np.ones(2))


def test_draws_of_something_else_are_not_trusted():
    draws = 7.0 + 0.1 * jax.random.normal(jax.random.key(1), (500, 2))
    embedding = mmdfw.reference_embedding(mmdfw.RBF(0.1), draws)
    result = fitted(lambda x: -0.5 * x @ x, 2, embedding=embedding, num_particles=10)
    assert result.verdict == "failed" and "mean score" in result.report()


def test_weights_are_probabilities_by_default():
    result = fitted(lambda x: -0.5 * x @ x, 20)
    weights = np.asarray(result.weights)
    assert (weights >= 0).all() and abs(weights.sum() - 1) < 1e-5


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("d", [2, 12])
def test_linear_maps_do_not_matter(d, seed):
    "fit of Ax + b is A fit(x) + b: means within 0.1 of a standard deviation, MMD^2 in one kernel alike."
    rng = np.random.default_rng(seed)
    A, b = rng.normal(size=(d, d)) * 10.0 ** rng.uniform(-2, 2, (d, 1)), 5 * rng.normal(size=d)
    back = jnp.asarray(np.linalg.inv(A), jnp.float32)
    skew = lambda u: -0.5 * jnp.sum(u[1:] ** 2) - 0.5 * (u[0] - 0.5 * u[1] ** 2) ** 2
    plain = fitted(skew, d, seed)
    mapped = fitted(lambda x: skew(back @ (x - jnp.asarray(b, jnp.float32))), d, seed)
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


def centred_groups():
    "Twenty groups of five with a centred hierarchy, and the mean and sd of log tau by a grid over three unknowns."
    rng = np.random.default_rng(11)
    y = rng.normal(5.0, 1.5, (20, 1)) + 3.0 * rng.normal(size=(20, 5))

    def logdensity(t):
        m, log_tau, log_sigma, level = t[0], t[1], t[2], t[3:]
        normal = lambda x, at, log_sd: jnp.sum(-0.5 * ((x - at) / jnp.exp(log_sd)) ** 2 - log_sd)
        prior = -0.5 * (m / 10) ** 2 - 0.5 * log_tau**2 - 0.5 * log_sigma**2
        return normal(jnp.asarray(y, t.dtype), level[:, None], log_sigma) + normal(level, m, log_tau) + prior

    m, log_tau, log_sigma = np.meshgrid(
        np.linspace(2, 8, 60), np.linspace(-5, 2, 280), np.linspace(0.8, 1.5, 60), indexing="ij"
    )
    mean, within = y.mean(1), np.sum((y - y.mean(1, keepdims=True)) ** 2)
    variance = np.exp(2 * log_tau) + np.exp(2 * log_sigma) / 5  # of a group's mean, its level integrated out
    logs = -0.5 * sum((one - m) ** 2 for one in mean) / variance - 10 * np.log(variance)
    logs += -0.5 * within / np.exp(2 * log_sigma) - 80 * log_sigma
    logs += -0.5 * (m / 10) ** 2 - 0.5 * log_tau**2 - 0.5 * log_sigma**2
    mass = np.exp(logs - logs.max())
    mass /= mass.sum()
    centre = np.sum(mass * log_tau)
    return logdensity, centre, np.sqrt(np.sum(mass * (log_tau - centre) ** 2))


@pytest.mark.parametrize("seed", range(2))
def test_the_neck_of_a_mild_funnel_is_there_or_missed_aloud(seed):
    logdensity, mean, sd = centred_groups()
    result = fitted(logdensity, 23, seed)
    found_mean, found_sd = (each[1] for each in moments(result))
    assert result.verdict != "trusted" or (abs(found_mean - mean) < 0.12 * sd and abs(found_sd / sd - 1) < 0.12)
