"""A density that fails, lies or dawdles: a right answer with its verdict, or a clear error, and never a hang.

More stands in test_faults.py: edges of the support, one particle, duplicates under exact embeddings, a density that is
not finite at its start; and in test_trust.py and test_trust_wide.py: what is no density, and hundreds of dimensions.
"""

import signal, warnings
from contextlib import contextmanager

import jax, jax.numpy as jnp, numpy as np, pytest
from conftest import off

import mmdfw
from mmdfw._trust import GRADES

KEY = jax.random.key(0)
LIMIT = 600  # seconds of one call, many times what it takes: a hang becomes a failure


@contextmanager
def no_hang():
    "An alarm that ends a call which does not come back."

    def ring(number, frame):
        raise TimeoutError(f"no answer after {LIMIT} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(LIMIT)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def fit(logdensity_fn, position, **options):
    "A small fit whose warnings are kept; doubts must be told."
    usual = dict(num_particles=8, max_refinement_steps=50, max_evaluations=60_000, progress=False)
    with no_hang(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = mmdfw.fit(KEY, logdensity_fn, position, **(usual | options))
    told = [str(one.message) for one in caught]
    assert result.verdict in GRADES
    assert (result.verdict == "trusted") != any(f"this result is {result.verdict}" in words for words in told)
    assert np.isfinite(np.asarray(result.positions)).all() and np.isfinite(np.asarray(result.weights)).all()
    assert abs(float(jnp.sum(result.weights)) - 1) < 1e-4
    return result


def normal(x):
    return -0.5 * jnp.sum(x**2)


def share(x):
    "A number between 0 and 1 that looks random, and is the same at the same place."
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    mixed = (bits * jnp.uint32(2654435761)) ^ (bits >> 15)
    mixed = jnp.sum(mixed * jnp.arange(1, len(x) + 1, dtype=jnp.uint32) * jnp.uint32(2246822519), dtype=jnp.uint32)
    return ((mixed ^ (mixed >> 13)) * jnp.uint32(3266489917) >> 8).astype(jnp.float32) / 2**24


def often_nan(part):
    "A normal that is NaN in this part of all places."

    return jax.tree_util.Partial(nan_below, jnp.asarray(part))


def nan_below(part, x):
    return jnp.where(share(x) < part, jnp.nan, normal(x))


def test_the_faults_are_as_many_as_they_say():
    x = jax.random.normal(KEY, (20_000, 2))
    for part in (0.01, 0.1, 0.5):
        found = float(jnp.mean(jnp.isnan(jax.vmap(often_nan(part))(x))))
        assert abs(found - part) < 4 * np.sqrt(part * (1 - part) / 20_000)


@pytest.mark.parametrize("part", [0.01, 0.1, 0.5])
def test_nan_in_a_part_of_all_calls(part):
    "The rest of the plane is where the mass is: the moments are those of the normal, or the verdict says so."
    places = jax.random.normal(KEY, (20, 2))
    start = places[int(jnp.argmax(jax.vmap(share)(places)))]
    assert float(share(start)) > 0.5, "the start itself is sound"
    result = fit(often_nan(part), start)
    assert int(result.state.rejected) > 0, "what was not finite is counted"
    assert result.verdict != "trusted" or max(off(result, np.zeros(2), np.ones(2))) < 0.2
    assert np.isfinite(np.asarray(jax.vmap(often_nan(part))(result.positions))).all()


def checkered(x):
    "A normal of which every second strip is missing."
    return jnp.where(jnp.sin(6 * x[0]) > -0.5, normal(x), -jnp.inf)


def test_regions_without_density():
    result = fit(checkered, jnp.array([0.1, 0.0]))
    assert np.isfinite(np.asarray(jax.vmap(checkered)(result.positions))).all()
    grid = np.linspace(-6, 6, 20_001)
    mass = np.where(np.sin(6 * grid) > -0.5, np.exp(-0.5 * grid**2), 0.0)
    mean = np.sum(grid * mass) / np.sum(mass)
    sd = np.sqrt(np.sum((grid - mean) ** 2 * mass) / np.sum(mass))
    assert result.verdict != "trusted" or max(off(result, np.array([mean, 0]), np.array([sd, 1]))) < 0.2


def test_numbers_near_the_end_of_their_range():
    "Squares overflow at 1e19 in single precision."
    result = fit(lambda x: normal(x / 1e15), jnp.zeros(2))
    assert result.verdict != "trusted" or max(off(result, np.zeros(2), np.full(2, 1e15))) < 0.2


def test_a_log_density_that_overflows():
    "1e30 x^4 is infinite where |x| > 1e2, and its slope before: the mode alone can be walked upon."
    steep = lambda x: -1e30 * jnp.sum(x**4)
    try:
        result = fit(steep, jnp.full(2, 1e-3))
    except ValueError as refused:
        assert "finite" in str(refused) or "no density" in str(refused)
        return
    sd = (1e-30 / 1) ** 0.25 * 0.5814  # of exp(-a x^4): sqrt(Gamma(3/4) / Gamma(1/4)) a^(-1/4)
    assert result.verdict != "trusted" or max(off(result, np.zeros(2), np.full(2, sd))) < 0.3


def test_a_condition_number_of_1e8():
    sd = np.array([1e-2, 1.0, 1e2])
    result = fit(lambda x: normal(x / jnp.asarray(sd, x.dtype)), jnp.ones(3))
    assert result.verdict != "failed" and max(off(result, np.zeros(3), sd)) < 0.3


def test_a_condition_number_of_1e8_turned():
    "Axes that are not those of the coordinates: in single precision the narrow one is near the last digit."
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0]
    sd = np.array([1e-2, 1.0, 1e2])
    into = jnp.asarray((turn / sd).T, jnp.float32)
    result = fit(lambda x: normal(into @ x), jnp.ones(3))
    x, w = np.asarray(result.positions, float) @ turn, np.asarray(result.weights, float)
    mean = w @ x
    found = np.sqrt(w @ (x - mean) ** 2)
    assert result.verdict != "trusted" or np.max(np.abs(found / sd - 1)) < 0.3


def test_one_dimension_and_one_particle():
    result, alone = (fit(normal, jnp.ones(1), num_particles=num) for num in (8, 1))
    assert result.positions.shape == (8, 1) and result.verdict != "failed" and max(off(result, 0.0, 1.0)) < 0.15
    assert alone.positions.shape == (1, 1) and alone.verdict != "trusted", "a point has no width"


def test_duplicated_draws_and_particles():
    "Every draw twenty times: a singular Gram matrix, and still the moments of the draws."
    few = np.random.default_rng(0).normal(size=(50, 2)).astype(np.float32)
    with no_hang():
        result = mmdfw.compress(KEY, np.tile(few, (20, 1)), 10, progress=False)
        all_one = mmdfw.compress(KEY, np.ones((50, 2), np.float32), 3, progress=False)
    assert np.isfinite(np.asarray(result.weights)).all()
    assert max(off(result, few.mean(0), few.std(0))) < 0.2
    assert np.allclose(all_one.positions, 1.0) and abs(float(jnp.sum(all_one.weights)) - 1) < 1e-4


class Mine(Exception):
    pass


def test_a_density_that_raises():
    "While it is traced the user's own error comes through; while it runs, from a callback, it comes as JAX's."

    def at_once(x):
        raise Mine("at once")

    with pytest.raises(Mine, match="at once"):
        fit(at_once, jnp.zeros(2))


def test_a_density_that_prints(capfd):
    def telling(x):
        jax.debug.print("x {x}", x=x[0])
        return normal(x)

    result = fit(telling, jnp.zeros(2), num_evaluations=64, num_particles=3)
    assert len(result) == 3 and "x " in capfd.readouterr().out


def slow(x):
    "Ten thousand rounds of work for what is one line."
    work = jax.lax.scan(lambda s, _: (jnp.sin(s) + 1e-9 * x[0], None), x[0], length=10_000)[0]
    return normal(x) + 1e-9 * work


def test_a_density_that_is_slow():
    "A limit in seconds is kept as far as a piece of work goes, and what there is by then has its verdict."
    result = fit(slow, jnp.zeros(2), seconds=2.0, num_particles=3, num_evaluations=64)
    assert len(result) == 3


def test_ten_thousand_dimensions():
    result = fit(normal, jnp.zeros(10_000), num_particles=3)
    assert result.positions.shape == (3, 10_000)
    assert result.verdict != "trusted" or max(off(result, 0.0, np.ones(10_000))) < 0.5
