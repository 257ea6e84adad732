"""Predictions of weighted particles against closed forms; what they refuse; that they compile once, and for CUDA."""

import json, re, subprocess, sys
import jax, jax.numpy as jnp, matplotlib, numpy as np, pytest
from jax import export
from scipy.integrate import quad
from scipy.stats import norm

from mmdfw._checks import assert_close
from mmdfw.models._bernoulli import BernoulliPredictive
from mmdfw.models._calibration import coverage, expected_calibration_error, plot_coverage, plot_reliability, reliability
from mmdfw.models._predictive import GaussianPredictive, negative_mass, proper_weights
from mmdfw.models._scores import accuracy, classification_scores, mean_log_likelihood, regression_scores, rmse

matplotlib.use("agg")
NOISE = 0.5
LEVELS = np.array([0.01, 0.3, 0.5, 0.95])


def linear_gaussian(num_rows=9):
    "Posterior mean and root of a straight line with known noise; test features; the exact predictive distribution."
    rng = np.random.default_rng(0)
    features = lambda x: np.stack([np.ones_like(x), x], 1)  # noqa: E731
    phi, phi_test = features(np.linspace(-1.0, 0.4, 12)), features(np.linspace(-1.5, 1.5, num_rows))
    y = phi @ [0.5, 1.0] + NOISE * rng.normal(size=12)
    covariance = np.linalg.inv(np.eye(2) + phi.T @ phi / NOISE**2)
    centre = covariance @ phi.T @ y / NOISE**2
    truth = norm(phi_test @ centre, np.sqrt(NOISE**2 + np.sum(phi_test @ covariance * phi_test, 1)))
    return centre, np.linalg.cholesky(covariance), phi_test, truth


def hermite(centre, root, num):
    nodes, weights = np.polynomial.hermite_e.hermegauss(num)
    grid = np.stack(np.meshgrid(nodes, nodes), -1).reshape(-1, 2)
    return centre + grid @ root.T, np.outer(weights, weights).ravel()


def gauss_hermite_predictive(dtype=np.float64, num=40):
    centre, root, phi_test, truth = linear_gaussian()
    particles, weights = hermite(centre, root, num)
    make = lambda a: jnp.asarray(a, dtype)  # noqa: E731
    return GaussianPredictive(
        make(particles @ phi_test.T), make(np.full((len(particles), 1), NOISE)), make(weights)
    ), truth


def answers(predictive, y):
    return dict(
        mean=predictive.mean,
        variance=predictive.variance,
        log_likelihood=predictive.log_likelihood(y),
        cdf=predictive.cdf(y),
        quantile=predictive.quantile(LEVELS),
    )


def exact_answers(truth, y):
    return dict(
        mean=truth.mean(),
        variance=truth.var(),
        log_likelihood=truth.logpdf(y),
        cdf=truth.cdf(y),
        quantile=np.stack([truth.ppf(u) for u in LEVELS]),
    )


# The linear-Gaussian model ------------------------------------------------------------------------


def test_weighted_particles_give_the_exact_predictive(dtype):
    predictive, truth = gauss_hermite_predictive(dtype)
    y = truth.mean() + np.linspace(-2, 2, 9)
    tol = 1e-10 if dtype == jnp.float64 else 2e-5
    got, want = answers(predictive, y), exact_answers(truth, y)
    for name in want:
        assert got[name].dtype == dtype, name
        assert_close(got[name], want[name], rtol=tol, atol=tol)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda p: GaussianPredictive(p.means, p.sds),
        lambda p: GaussianPredictive(p.means, p.sds, p.weights[::-1] + 0.01 * p.weights.max()),
        lambda p: GaussianPredictive(p.means, 1e-3 * p.sds, p.weights),
        lambda p: GaussianPredictive(p.means, 1.001 * p.sds, p.weights),
        lambda p: GaussianPredictive(p.means, p.sds**2, p.weights),
        lambda p: GaussianPredictive(p.mean[None], p.sds[:1]),
    ],
    ids=[
        "weights left out",
        "weights a little off",
        "noise left out",
        "noise a thousandth off",
        "variance for sd",
        "one particle",
    ],
)
def test_mistakes_are_seen(spoil, x64):
    predictive, truth = gauss_hermite_predictive()
    y = truth.mean() + np.linspace(-2, 2, 9)
    got, want = answers(spoil(predictive), y), exact_answers(truth, y)
    for name in ("variance", "log_likelihood", "quantile"):
        with pytest.raises(AssertionError):
            assert_close(got[name], want[name], rtol=1e-6, atol=1e-6)


def test_equal_draws_within_their_standard_errors(x64):
    centre, root, phi, truth = linear_gaussian(3)
    num = 8000
    y = truth.mean() + np.array([-1.0, 0.3, 1.5])
    level = 0.9
    means = (centre + np.random.default_rng(1).normal(size=(num, 2)) @ root.T) @ phi.T
    sampled = GaussianPredictive(means, np.full((num, 1), NOISE))
    between = truth.var() - NOISE**2
    q = truth.ppf(level)
    density, cdf = norm.pdf(y, means, NOISE), norm.cdf(q, means, NOISE)
    errors = np.stack(
        [
            sampled.mean - truth.mean(),
            sampled.variance - truth.var(),
            sampled.log_likelihood(y) - truth.logpdf(y),
            sampled.quantile(level) - q,
        ]
    )
    standard = np.stack(
        [np.sqrt(between), between * np.sqrt(2), density.std(0) / density.mean(0), cdf.std(0) / truth.pdf(q)]
    ) / np.sqrt(num)
    assert np.max(np.abs(errors / standard)) < 4
    assert np.min(NOISE**2 / standard[1]) > 8, "noise left out would be seen"


def test_original_scale(dtype):
    predictive, truth = gauss_hermite_predictive(dtype)
    shift = 150.0
    scale = 77.0
    tol = 1e-10 if dtype == jnp.float64 else 1e-4
    wide = norm(shift + scale * truth.mean(), scale * truth.std())
    there = predictive.rescale(shift, scale)
    y = wide.mean() + np.linspace(-100, 100, 9)
    assert_close(there.log_likelihood(y), wide.logpdf(y), rtol=tol)
    assert_close(there.variance, wide.var(), rtol=tol)
    assert_close(there.interval(0.8), np.stack(wide.interval(0.8)), rtol=tol, atol=tol * scale)
    assert_close(rmse(there, y), scale * rmse(predictive, (y - shift) / scale), rtol=tol)
    assert_close(coverage(there, y, LEVELS), coverage(predictive, (y - shift) / scale, LEVELS))
    assert there.means.dtype == dtype


def test_coverage_is_nominal_on_data_from_the_model():
    predictive, truth = gauss_hermite_predictive(np.float32, 12)
    repeats = 400
    many = GaussianPredictive(jnp.tile(predictive.means, (1, repeats)), predictive.sds, predictive.weights)
    y = np.random.default_rng(2).normal(np.tile(truth.mean(), repeats), np.tile(truth.std(), repeats))
    error = np.sqrt(LEVELS * (1 - LEVELS) / len(y))
    assert np.all(np.abs(coverage(many, y, LEVELS) - LEVELS) < 4 * error)
    silent = GaussianPredictive(many.means, many.sds / 2, many.weights)
    assert np.max(np.abs(coverage(silent, y, LEVELS) - LEVELS) / error) > 10
    low, high = (np.asarray(end) for end in many.interval(0.7))
    assert_close(coverage(many, y, 0.7), [np.mean((low <= y) & (y <= high))], rtol=1e-5, atol=2 / len(y))


# Weights ------------------------------------------------------------------------------------------


def signed(a=0.8, noise=0.3):
    return GaussianPredictive([[-a], [0.0], [a]], [[noise]] * 3, [0.5 / a**2, 1 - 1 / a**2, 0.5 / a**2])


def test_negative_weights_enter_moments_and_not_densities(x64):
    predictive = signed()
    assert predictive.weights[1] < 0
    assert_close(predictive.mean, [0.0], atol=1e-15)
    assert_close(predictive.variance, [1.09], rtol=1e-13)
    y = np.array([0.1])
    assert predictive.weights @ norm.pdf(y, predictive.means, 0.3)[:, 0] < 0, "the signed sum is no density here"
    assert_close(
        predictive.log_likelihood(y), np.log(0.5 * norm.pdf(y, -0.8, 0.3) + 0.5 * norm.pdf(y, 0.8, 0.3)), rtol=1e-13
    )
    assert_close(predictive.cdf(y), 0.5 * norm.cdf(y, -0.8, 0.3) + 0.5 * norm.cdf(y, 0.8, 0.3), rtol=1e-13)
    assert (
        np.abs(predictive.sample(jax.random.key(0), 1000)).min() < 0.3
        and abs(negative_mass(predictive.weights) - 0.5625) < 1e-12
    )


def test_the_size_of_the_weights_does_not_matter(x64):
    one = signed()
    y = [0.4]
    ten = GaussianPredictive(one.means, one.sds, 10 * one.weights)
    for a, b in zip(answers(one, y).values(), answers(ten, y).values()):
        assert_close(b, a, rtol=1e-12, atol=1e-14)


def test_a_particle_without_weight_is_not_there(x64):
    "Also where it is far away: neither the cage of the bisection nor the log-sum-exp may feel it."
    alone = GaussianPredictive([[1.0, 2.0]], [[0.5]])
    for weight in (0.0, -1e-12):
        pair = GaussianPredictive([[1.0, 2.0], [1e9, 3.0]], [[0.5], [1e-3]], [1.0, weight])
        assert_close(pair.quantile(LEVELS), alone.quantile(LEVELS), rtol=1e-14)
        assert_close(pair.log_likelihood([1.2, 3.0]), alone.log_likelihood([1.2, 3.0]), rtol=1e-14)
        assert_close(pair.cdf([1.2, 3.0]), alone.cdf([1.2, 3.0]), rtol=1e-14)


def test_proper_weights():
    assert_close(proper_weights(jnp.array([1.0, -0.5, 1.5])), [0.4, 0.0, 0.6])


# Quantiles, draws, extremes -----------------------------------------------------------------------


def test_quantile_inverts_the_cdf(dtype):
    rng = np.random.default_rng(3)
    predictive = GaussianPredictive(
        *(jnp.asarray(a, dtype) for a in (3 * rng.normal(size=(7, 5)), np.exp(rng.normal(size=(7, 5))), rng.random(7)))
    )
    q = predictive.quantile(LEVELS)
    assert q.shape == (4, 5) and q.dtype == dtype and np.all(np.diff(q, axis=0) > 0)
    back = np.stack([predictive.cdf(row) for row in q])
    assert_close(back, np.tile(LEVELS[:, None], 5), rtol=1e-12 if dtype == jnp.float64 else 1e-4)


def test_a_number_gives_one_answer_for_each_row(x64):
    predictive, truth = gauss_hermite_predictive()
    assert predictive.quantile(0.3).shape == (9,) and predictive.quantile([0.3]).shape == (1, 9)
    assert_close(predictive.quantile(0.3), predictive.quantile([0.1, 0.3])[1], rtol=1e-14)
    assert predictive.interval(0.9).shape == (2, 9)
    assert jax.jit(lambda p, level: p.quantile(level))(predictive, 0.3).shape == (9,)


def test_a_predictive_is_described_in_one_line():
    predictive, _ = gauss_hermite_predictive(np.float32, 4)
    assert repr(predictive) == "GaussianPredictive(16 particles, 9 rows)"
    assert repr(BernoulliPredictive(predictive.means)) == "BernoulliPredictive(16 particles, 9 rows)"
    seen = []
    jax.vmap(lambda shift: seen.append(repr(predictive.rescale(shift, 1.0))) or shift)(jnp.zeros(2))
    assert seen == ["GaussianPredictive(16 particles, 9 rows)"], "also while JAX traces it"
    assert repr(jax.tree.map(lambda _: object(), predictive)) == "GaussianPredictive(? particles, ? rows)"


def test_draws_are_joint():
    predictive = GaussianPredictive([[0.0, 1.0], [2.0, -3.0]], [[1.0], [0.5]], [3.0, 1.0])
    draws = np.asarray(predictive.sample(jax.random.key(1), 20_000))
    centred = draws - np.asarray(predictive.mean)
    for values, truth in (
        (centred[:, 0], 0.0),
        (centred[:, 0] * centred[:, 1], -1.5),
        (centred[:, 0] ** 2, predictive.variance[0]),
        (centred[:, 1] ** 2, predictive.variance[1]),
    ):
        assert abs(values.mean() - truth) < 4 * values.std() / 20_000**0.5


def test_far_out_in_float32():
    predictive = GaussianPredictive(
        jnp.array([[0.0, 0.0], [1.0, 1.0]], jnp.float32), jnp.full((2, 1), 1e-3, jnp.float32)
    )
    logs = predictive.log_likelihood([1e4, -1e4])
    slope = jax.grad(lambda y: predictive.log_likelihood(y).sum())(jnp.array([1e4, -1e4], jnp.float32))
    assert logs.dtype == jnp.float32 and np.all(np.isfinite(logs)) and np.all(np.isfinite(slope))
    assert_close(logs, -0.5 * (np.array([9999.0, 1e4]) / 1e-3) ** 2, rtol=1e-4)


def test_variance_keeps_its_digits_in_float32():
    predictive = GaussianPredictive(jnp.array([[2000.0], [2001.0]], jnp.float32), jnp.full((2, 1), 0.1, jnp.float32))
    assert_close(predictive.variance, [0.26], rtol=1e-5)


def test_many_rows():
    "Past 16,384 columns, where XLA on the CPU has got fused sums wrong."
    rng = np.random.default_rng(4)
    means, sds, weights, y = (
        rng.normal(size=(5, 20_000)),
        np.exp(rng.normal(size=(5, 1))),
        rng.random(5),
        rng.normal(size=20_000),
    )
    share = weights / weights.sum()
    predictive = GaussianPredictive(*(a.astype(np.float32) for a in (means, sds, weights)))
    assert_close(predictive.log_likelihood(y), np.log(share @ norm.pdf(y, means, sds)), rtol=1e-3, atol=1e-5)
    assert_close(predictive.cdf(y), share @ norm.cdf(y, means, sds), rtol=1e-4, atol=1e-6)
    assert_close(predictive.mean, share @ means, rtol=1e-4, atol=1e-6)


# Two classes --------------------------------------------------------------------------------------


def test_bernoulli_against_quadrature(x64):
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    predictive = BernoulliPredictive((0.7 + 1.5 * nodes)[:, None], weights)
    integral = quad(lambda g: norm.pdf(g, 0.7, 1.5) / (1 + np.exp(-g)), -20, 20, epsabs=1e-13)[0]
    assert_close(predictive.probability, [integral], rtol=1e-8)
    assert_close(predictive.log_likelihood([1]), [np.log(integral)], rtol=1e-8)
    assert_close(predictive.log_likelihood([False]), [np.log1p(-integral)], rtol=1e-8)
    with pytest.raises(AssertionError):
        assert_close(BernoulliPredictive(predictive.logits).probability, [integral], rtol=1e-3)


def test_bernoulli_extremes_in_float32():
    predictive = BernoulliPredictive(jnp.array([[1e3, -1e3, 1e3], [1e3, -1e3, -1e3]], jnp.float32), [0.25, 0.75])
    assert_close(predictive.probability, [1.0, 0.0, 0.25])
    assert_close(predictive.log_likelihood([0, 1, 1]), [-1000.0, -1000.0, np.log(0.25)])
    assert_close(predictive.log_likelihood([1, 0, 0]), [0.0, 0.0, np.log(0.75)], atol=1e-7)
    slope = jax.grad(lambda logits: BernoulliPredictive(logits).log_likelihood(jnp.array([0, 1, 1])).sum())(
        predictive.logits
    )
    assert np.all(np.isfinite(slope))


def test_bernoulli_negative_weights_stay_probabilities():
    predictive = BernoulliPredictive([[5.0], [-5.0], [4.0]], [2.0, -1.5, 0.5])
    assert 0 <= predictive.probability[0] <= 1
    assert_close(predictive.probability, [0.8 / (1 + np.exp(-5)) + 0.2 / (1 + np.exp(-4))], rtol=1e-6)


def test_reliability_by_hand(x64):
    predictive = BernoulliPredictive(np.log([[1 / 9, 3 / 7, 3 / 2, 1e300]]))
    labels = [0, 1, 1, 1]
    said, seen, count = reliability(predictive, labels, 2)
    assert_close(said, [0.2, 0.8], rtol=1e-12)
    assert_close(seen, [0.5, 1.0], rtol=1e-12)
    assert count.tolist() == [2, 2]
    assert_close(expected_calibration_error(predictive, labels, 2), 0.25, rtol=1e-12)
    assert_close(accuracy(predictive, labels), 0.75)
    said, seen, count = reliability(predictive, labels, 10)
    assert (
        np.array_equal(np.isnan(seen), count == 0)
        and np.isclose(said[4], 0.45)
        and np.isfinite(expected_calibration_error(predictive, labels))
    )


# Scores, plots, compilation -----------------------------------------------------------------------


def test_scores_are_plain_numbers_and_the_same_in_jit():
    predictive, truth = gauss_hermite_predictive(np.float32, 8)
    y = (truth.mean() + np.linspace(-1, 1, 9)).astype(np.float32)
    scores = regression_scores(predictive, y)
    assert set(json.loads(json.dumps(scores))) == {"rmse", "log_likelihood", "coverage50", "coverage90", "coverage95"}
    assert_close(scores["log_likelihood"], mean_log_likelihood(predictive, y))
    assert_close(scores["rmse"], np.sqrt(np.mean((truth.mean() - y) ** 2)), rtol=1e-5)
    for name, value in jax.jit(regression_scores)(predictive, y).items():
        assert_close(value, np.float32(scores[name]), rtol=1e-5)
    binary = BernoulliPredictive(predictive.means, predictive.weights)
    labels = np.arange(9) % 2
    scores = classification_scores(binary, labels)
    assert set(json.loads(json.dumps(scores))) == {"accuracy", "log_likelihood", "brier", "calibration_error"}
    for name, value in jax.jit(classification_scores)(binary, labels).items():
        assert_close(value, np.float32(scores[name]), rtol=1e-5, atol=1e-7)


def test_made_inside_jit_and_vmap():
    means, y = jnp.array([[0.0, 1.0], [2.0, 3.0]]), jnp.array([0.5, 1.5])
    score = lambda weights: mean_log_likelihood(GaussianPredictive(means, jnp.ones((2, 1)), weights), y)  # noqa: E731
    weights = jnp.array([[1.0, 3.0], [2.0, -0.5]])
    assert_close(jax.jit(jax.vmap(score))(weights), np.stack([score(w) for w in weights]), rtol=1e-6)
    assert np.all(np.isfinite(jax.grad(score)(weights[0])))


def test_numbers_are_data():
    "New numbers of the same shape compile nothing."
    predictive, _ = gauss_hermite_predictive(np.float32, 4)
    traces = []

    def f(p, y):
        traces.append(1)
        return answers(p, y)  # noqa: E702

    compiled = jax.jit(f)
    compiled(predictive, np.zeros(9, np.float32))
    compiled(predictive.rescale(1.0, 2.0), np.ones(9, np.float32))
    assert len(traces) == 1


def test_plots():
    import matplotlib.pyplot as plt

    predictive, truth = gauss_hermite_predictive(np.float32, 4)
    fig, (left, right) = plt.subplots(1, 2)
    assert (
        plot_coverage(predictive, truth.mean(), left) is left
        and plot_coverage(predictive, truth.mean(), left, levels=[0.5]) is left
    )
    assert len(left.lines) == 3, "one diagonal, two curves"
    assert plot_reliability(BernoulliPredictive(predictive.means), np.ones(9), right, color="k", label="all") is right
    fig.canvas.draw()
    plt.close(fig)


def test_matplotlib_is_loaded_when_something_is_drawn():
    code = "import sys, mmdfw.models, mmdfw.plots; mmdfw.plots.colors; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


def everything(means, sds, weights, y, levels, labels, data):
    predictive, binary = GaussianPredictive(means, sds, weights), BernoulliPredictive(means, weights)
    return (
        predictive.mean,
        predictive.variance,
        predictive.log_likelihood(y),
        predictive.cdf(y),
        predictive.quantile(levels),
        predictive.interval(levels[0]),
        predictive.sample(jax.random.wrap_key_data(data), 3),
        predictive.rescale(1.0, 2.0),
        rmse(predictive, y),
        coverage(predictive, y, levels),
        regression_scores(predictive, y),
        binary.probability,
        binary.log_likelihood(labels),
        accuracy(binary, labels),
        reliability(binary, labels),
        expected_calibration_error(binary, labels),
        classification_scores(binary, labels),
        negative_mass(weights),
    )


@pytest.mark.parametrize("platforms", [["cuda"], ["cpu", "cuda"]], ids="+".join)
def test_lowers_for_cuda_in_float32(platforms):
    with jax.enable_x64(False):
        shape = lambda *s, t=jnp.float32: jax.ShapeDtypeStruct(s, t)  # noqa: E731
        args = (
            shape(4, 6),
            shape(4, 1),
            shape(4),
            shape(6),
            shape(3),
            shape(6, t=jnp.int32),
            jax.random.key_data(jax.random.key(0)),
        )
        made = export.export(jax.jit(lambda *a: jax.tree.leaves(everything(*a))), platforms=platforms)(*args)
    assert made.platforms == tuple(platforms)
    text = made.mlir_module()
    assert not re.findall(r"\w*callback\w*", text) and not re.findall(r"tensor<[^>]*f64>", text)


# Bad input ----------------------------------------------------------------------------------------

MEANS, SDS = np.zeros((2, 3)), np.ones((2, 1))


def good():
    return GaussianPredictive(MEANS, SDS)


def good_binary():
    return BernoulliPredictive(MEANS)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: GaussianPredictive(np.zeros(3), SDS), r"means.*\(3,\)"),
        (lambda: GaussianPredictive(np.zeros((0, 3)), SDS), r"means.*\(0, 3\)"),
        (lambda: GaussianPredictive(np.zeros((2, 3), int), SDS), "means.*int"),
        (lambda: GaussianPredictive(MEANS + np.nan, SDS), r"means.*nan.*\[0, 0\]"),
        (lambda: GaussianPredictive(MEANS, np.ones(2)), r"sds.*\(2,\)"),
        (lambda: GaussianPredictive(MEANS, np.ones((3, 2))), r"sds.*\(3, 2\)"),
        (lambda: GaussianPredictive(MEANS, [[1.0], [0.0]]), r"sds.*0.*\[1, 0\]"),
        (lambda: GaussianPredictive(MEANS, [[1.0], [-2.0]]), "sds.*-2"),
        (lambda: GaussianPredictive(MEANS, [[1.0], [np.nan]]), "sds.*nan"),
        (lambda: GaussianPredictive(MEANS, [[1.0], [np.inf]]), "sds.*inf"),
        (lambda: GaussianPredictive(MEANS, SDS, np.ones(3)), r"weights.*\(3,\)"),
        (lambda: GaussianPredictive(MEANS, SDS, [1.0, np.nan]), "weights.*nan"),
        (lambda: GaussianPredictive(MEANS, SDS, [1.0, -3.0]), "positive sum.*-2"),
        (lambda: GaussianPredictive(MEANS, SDS, [0.0, 0.0]), "positive sum.*0"),
        (lambda: BernoulliPredictive(np.zeros(3)), r"logits.*\(3,\)"),
        (lambda: BernoulliPredictive(MEANS + np.inf), "logits.*inf"),
        (lambda: BernoulliPredictive(MEANS, np.ones(4)), r"weights.*\(4,\)"),
        (lambda: good().log_likelihood(np.zeros(2)), r"y.*\(3,\).*\(2,\)"),
        (lambda: good().log_likelihood(np.zeros((3, 1))), r"y.*\(3, 1\)"),
        (lambda: good().cdf([0.0, np.nan, 1.0]), r"y.*nan.*\[1\]"),
        (lambda: rmse(good(), [0.0, np.nan, 1.0]), r"y.*nan"),
        (lambda: rmse(good(), 0.0), r"y.*\(\)"),
        (lambda: coverage(good(), [0.0, np.nan, 1.0], 0.5), r"y.*nan"),
        (lambda: regression_scores(good(), np.zeros(4)), r"y.*\(4,\)"),
        (lambda: good().quantile(0.0), r"levels.*0"),
        (lambda: good().quantile([0.5, 1.5]), r"levels.*1\.5"),
        (lambda: good().quantile(np.nan), "levels.*nan"),
        (lambda: good().quantile(np.full((2, 2), 0.5)), r"levels.*\(2, 2\)"),
        (lambda: good().quantile(1 - 1e-9), r"levels.*1\."),  # one, in float32
        (lambda: good().interval(1.0), r"level .*1\."),
        (lambda: good().interval(95), r"level .*0\.95 for 95 per cent.*95\."),
        (lambda: good().quantile([0.5, 97.5]), r"levels .*0\.975 for 97\.5 per cent.*97\.5"),
        (lambda: coverage(good(), np.zeros(3), 90), r"levels .*0\.9 for 90 per cent"),
        (lambda: good().interval([0.5, 0.9]), r"level .*0\.9"),
        (lambda: coverage(good(), np.zeros(3), -0.1), r"levels.*-0\.1"),
        (lambda: good().rescale(0.0, 0.0), "scale.*0"),
        (lambda: good().rescale(np.nan, 1.0), "means.*nan"),
        (lambda: good().sample(jax.random.key(0), 2.5), "num.*2.5"),
        (lambda: good_binary().log_likelihood([0, 1, 2]), r"labels.*2.*\[2\]"),
        (lambda: good_binary().log_likelihood([0.0, 1.0, np.nan]), "labels.*nan"),
        (lambda: accuracy(good_binary(), [-1, 1, 1]), "labels.*-1"),
        (lambda: accuracy(good_binary(), [1, 1]), r"labels.*\(2,\)"),
        (lambda: reliability(good_binary(), [0, 1, 0.5]), r"labels.*0\.5"),
        (lambda: reliability(good_binary(), [0, 1, 0], 0), "num_bins.*0"),
        (lambda: classification_scores(good_binary(), [0, 1, 7]), "labels.*7"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
