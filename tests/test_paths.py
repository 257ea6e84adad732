"""Paths from several starts: the Gaussian of the largest bound on the way up, whatever the density is like."""

import jax, jax.numpy as jnp, numpy as np, pytest
from conftest import gaussian

from mmdfw._mixture import eleven_gaussians, gaussian_mixture
from mmdfw._target import BATCH, as_target
from mmdfw.embeddings import _climb, _paths
from mmdfw.embeddings._climb import climb
from mmdfw.embeddings._cloud import find_mode
from mmdfw.embeddings._paths import find_paths, starts_around

KEY = jax.random.key(0)


def paths_of(logdensity, position, key=KEY, num=10, **options):
    target = as_target(logdensity, position)
    start_key, path_key = jax.random.split(key)
    return find_paths(path_key, target, starts_around(start_key, target.start, num), **options)


def covariance_of(guess):
    return guess.root @ guess.root.T


# Exact truths --------------------------------------------------------------------------------------------------------


def test_a_gaussian_comes_out(dtype):
    found = paths_of(gaussian, jnp.zeros(2, dtype))
    truth = np.array([[1, 0.3], [0.3, 0.25]])
    for guess in found.guesses[:4]:
        assert np.allclose(guess.mean, [1, -1], atol=0.05)
        assert np.allclose(covariance_of(guess), truth, atol=0.1)
        assert guess.mean.dtype == guess.root.dtype == np.float64
    assert abs(found.guesses[0].bound - 0.5 * np.linalg.slogdet(2 * np.pi * truth)[1]) < 0.02
    bounds = [guess.bound for guess in found.guesses]
    assert bounds == sorted(bounds, reverse=True) and len(bounds) == 10
    assert (found.failed, found.endless, found.unbounded) == (0, 0, False)


@pytest.mark.parametrize("d", [1, 40])
def test_a_start_at_the_mode_finds_the_width(d):
    found = paths_of(lambda x: -0.5 * jnp.sum((x / 0.01) ** 2), jnp.zeros(d), num=1)
    assert np.allclose(np.sqrt(np.diag(covariance_of(found.guesses[0]))), 0.01, rtol=0.02)


def test_evaluations_are_counted_and_two_programs_do(monkeypatch):
    shapes = []
    both, logs = _climb.values_and_scores, _paths.log_densities
    monkeypatch.setattr(_climb, "values_and_scores", lambda t, x: shapes.append((2, x.shape)) or both(t, x))
    monkeypatch.setattr(_paths, "log_densities", lambda t, x: shapes.append((1, x.shape)) or logs(t, x))
    found = paths_of(lambda x: jnp.where(x[0] > -3, -0.5 * x @ x, jnp.nan), jnp.ones(3))
    assert found.evaluations == sum(each * shape[0] for each, shape in shapes)
    assert {(each, shape[0] > 1) for each, shape in shapes} == {(2, False), (1, True)}
    assert max(shape[0] for _, shape in shapes) <= BATCH, "what is looked at together is one batch, of one program"
    assert found.failed > 0


# Not the mode --------------------------------------------------------------------------------------------------------

EFFECTS = jnp.array([28.0, 8, -3, 7, -1, 1, 18, 12])
ERRORS = jnp.array([15.0, 10, 16, 11, 9, 11, 10, 18])


def centred_schools(x):
    effects, mean, log_scale = x[:8], x[8], x[9]
    scale = jnp.exp(log_scale)
    prior = -0.5 * (mean / 5) ** 2 - jnp.log1p((scale / 5) ** 2) + log_scale
    return prior - 0.5 * jnp.sum(((effects - mean) / scale) ** 2 + ((EFFECTS - effects) / ERRORS) ** 2) - 8 * log_scale


def funnel(x):
    return -(x[0] ** 2) / 18 - 4.5 * x[0] - 0.5 * jnp.exp(-x[0]) * jnp.sum(x[1:] ** 2)


@pytest.mark.parametrize(
    "logdensity, which, low", [(centred_schools, 9, -2), (funnel, 0, -6)], ids=["schools", "funnel"]
)
def test_the_best_gaussian_is_not_in_the_neck(logdensity, which, low):
    target = as_target(logdensity, jnp.zeros(10))
    for key in jax.random.split(KEY, 2):
        found = paths_of(logdensity, jnp.zeros(10), key)
        assert found.guesses[0].mean[which] > low and not found.unbounded
        assert climb(target, starts_around(key, np.zeros(10))[1]).points[-1, which] < 2 * low


# Badly scaled ones ---------------------------------------------------------------------------------------------------


def yearly(dtype=jnp.float32):
    "y near 2,000 against a year: the log density, and how many deviations a point is off."
    rng = np.random.default_rng(0)
    rows = np.stack([np.ones(60), np.linspace(1980, 2000, 60)], 1)
    y = 2000 + 3 * (rows[:, 1] - 1990) + 20 * rng.normal(size=60)
    x, target = jnp.asarray(rows, dtype), jnp.asarray(y, dtype)
    exact, residual = np.linalg.lstsq(rows, y, rcond=None)[:2]
    precision = rows.T @ rows / residual * 60

    def far(point):
        off = np.asarray(point, float)[:2] - exact
        return np.sqrt(off @ precision @ off) + abs(point[2] - 0.5 * np.log(residual[0] / 60))

    return lambda b: -0.5 * jnp.sum(((target - x @ b[:2]) / jnp.exp(b[2])) ** 2) - 60 * b[2], far


def test_a_regression_in_its_users_units():
    logdensity, far = yearly()
    assert far(paths_of(logdensity, jnp.zeros(3)).guesses[0].mean) < 0.5


def test_the_mode_is_reached_or_the_user_warned(dtype, recwarn):
    logdensity, far = yearly(dtype)
    assert far(find_mode(logdensity, jnp.zeros(3, dtype)).position) < 0.05 and not recwarn
    with pytest.warns(UserWarning, match="stopped after 20 steps"):
        assert far(find_mode(logdensity, jnp.zeros(3, dtype), max_steps=20).position) > 1
    with pytest.warns(UserWarning, match="no mode at all"):
        find_mode(lambda x: jnp.sum(x), jnp.zeros(3, dtype))


def test_many_correlated_coefficients():
    "26 coefficients whose posterior widths differ by 1e4, as in a table with polynomials."
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(300, 26)) * np.geomspace(1e-2, 1e2, 26)
    rows += 0.9 * rows[:, ::-1]
    precision = rows.T @ rows
    mean = rng.normal(size=26)
    a, b = jnp.asarray(rows, jnp.float32), jnp.asarray(rows @ mean, jnp.float32)
    found = paths_of(lambda x: -0.5 * jnp.sum((a @ x - b) ** 2), jnp.zeros(26))
    off = (found.guesses[0].mean - mean) / np.sqrt(np.diag(np.linalg.inv(precision)))
    assert np.abs(off).max() < 0.5


@pytest.mark.parametrize("d", [201, 1000, 10_000])
def test_many_dimensions(d):
    widths = np.geomspace(0.1, 10, d)
    found = paths_of(lambda x: -0.5 * jnp.sum((x / jnp.asarray(widths, x.dtype)) ** 2), jnp.ones(d), num=3)
    guess = found.guesses[0]
    assert guess.root.shape == (d,) and np.abs(np.log(guess.root / widths)).max() < 1
    assert np.sqrt(np.mean((guess.mean / widths) ** 2)) < 0.1


# Several modes -------------------------------------------------------------------------------------------------------


def test_modes_far_apart():
    pair = gaussian_mixture(jnp.array([[-30.0, -30], [30, 30]]), sd=1.0, weights=jnp.array([0.3, 0.7]))
    found = paths_of(pair.logdensity, jnp.zeros(2))
    sides = {np.sign(guess.mean[0]): guess.bound for guess in reversed(found.guesses)}
    assert np.allclose([sides[1.0], sides[-1.0]], np.log([0.7, 0.3]), atol=0.05)


def test_lesser_modes_stay_in_the_list():
    eleven = eleven_gaussians()
    found = paths_of(eleven.logdensity, jnp.zeros(2))
    nearest = [np.argmin(np.linalg.norm(guess.mean - eleven.means, axis=1)) for guess in found.guesses]
    assert len(set(nearest)) >= 4
    assert all(abs(guess.bound + np.log(11)) < 0.5 for guess in found.guesses)


# What is not finite --------------------------------------------------------------------------------------------------


def test_starts_that_are_not_finite_are_replaced():
    found = paths_of(lambda x: jnp.sum(jnp.log(x) - x), jnp.ones(3))  # NaN below zero
    assert found.failed >= 5 and len(found.guesses) == 10
    assert np.all(np.abs(found.guesses[0].mean - 1) < 1)


def test_the_position_may_be_the_only_bad_start():
    found = paths_of(lambda x: jnp.where(jnp.all(x == 0), jnp.nan, -0.5 * x @ x), jnp.zeros(2))
    assert found.failed == 1 and len(found.guesses) == 9


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_walls_on_the_way_are_survived(bad):
    path = climb(as_target(lambda x: jnp.where(x[0] > 1, -0.5 * x @ x, bad), jnp.ones(2)), np.array([5.0, 3.0]))
    assert np.isfinite(path.logs).all() and 1 < path.points[-1, 0] < 1.1


@pytest.mark.parametrize(
    "logdensity, message",
    [
        (lambda x: jnp.nan * x[0], r"logdensity_fn is nan at the start .*; start where the density is positive"),
        (lambda x: jnp.where(x[0] > 1e6, 0.0, -jnp.inf), "logdensity_fn is -inf at the start"),
    ],
)
def test_nowhere_finite(logdensity, message):
    with pytest.raises(ValueError, match=message):
        paths_of(logdensity, jnp.zeros(2))


# No end --------------------------------------------------------------------------------------------------------------

IMPROPER = {
    "wrong sign": lambda x: x @ x,
    "flat": lambda x: 0.0 * x[0],
    "linear": lambda x: jnp.sum(x),
    "exponential": lambda x: jnp.exp(x[0]) - 0.5 * jnp.sum(x[1:] ** 2),
    "linear in one": lambda x: -0.5 * jnp.sum(x[1:] ** 2) - 0.01 * x[0],
}
PROPER = {
    "bell": lambda x: -0.5 * x @ x,
    "wide": lambda x: -0.5 * jnp.sum(((x - 1e7) / 1e4) ** 2),
    "student": lambda x: -0.5 * (2 + x.size) * jnp.log1p(x @ x / 2),
    "plateau": lambda x: -jnp.sum((x / 5) ** 10),
    "edge": lambda x: jnp.where(x[0] > 0, -0.5 * x @ x, -jnp.inf),
    "exponential": lambda x: jnp.where(jnp.all(x > 0), -jnp.sum(x), -jnp.inf),
    "box": lambda x: jnp.where(jnp.all(jnp.abs(x) < 2), 0.0, -jnp.inf),
    "ridge": lambda x: -jnp.sum(jnp.abs(x)),
}


@pytest.mark.parametrize("name", IMPROPER)
def test_what_cannot_be_normalised_is_told(name):
    for position in (jnp.zeros(1), jnp.full(3, 0.5)):
        found = paths_of(IMPROPER[name], position)
        assert found.unbounded and found.guesses and found.evaluations < 10 * 800


@pytest.mark.parametrize("name", PROPER)
def test_what_looks_odd_is_not_called_unbounded(name):
    for position in (jnp.full(1, 0.5), jnp.full(3, 0.5)):
        found = paths_of(PROPER[name], position)
        assert not found.unbounded and len(found.guesses) == 10 and np.isfinite([g.bound for g in found.guesses]).all()
