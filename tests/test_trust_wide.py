"""Right, or with a verdict that says so, in tens of dimensions and more; `test_trust.py` has the rest."""

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import fitted, moments, off, right_or_told


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


def test_weights_are_probabilities_by_default():
    result = fitted(lambda x: -0.5 * x @ x, 20)
    weights = np.asarray(result.weights)
    assert (weights >= 0).all() and abs(weights.sum() - 1) < 1e-5


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
