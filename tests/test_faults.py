"""What goes wrong is told early and plainly, or survived with a sound answer."""

import warnings
import jax, jax.numpy as jnp, numpy as np, pytest
from conftest import gaussian

from mmdfw._checks import check_count, check_positive
from mmdfw.embeddings._cloud import importance_cloud
from mmdfw.embeddings._embedding import ParticleEmbedding, SteinEmbedding, exact_embedding, reference_embedding
from mmdfw._fit import fit
from mmdfw._loop import frank_wolfe
from mmdfw.kernels._fourier import random_fourier
from mmdfw.kernels._kernel import IMQ, RBF, InverseLog
from mmdfw.kernels._lengthscale import median_lengthscale
from mmdfw.kernels._stein_kernel import ScoreIMQ, Stein
from mmdfw._mixture import eleven_gaussians, gaussian_mixture
from mmdfw._mmd import mmd2
from mmdfw.oracles._oracle import GradientOracle, NearParticles, PriorStarts, pool_starts
from mmdfw.steps._quadrature import Quadrature
from mmdfw._refinement import refine
from mmdfw.steps._step import ConstantStep, DecayEarly, LineSearch, OpenLoop

KEY = jax.random.key(0)
SMALL = dict(num_particles=5, max_refinement_steps=25)


def run(logdensity_fn=gaussian, position=None, **options):
    return fit(KEY, logdensity_fn, jnp.zeros(2) if position is None else position, **(SMALL | options))


# The target at its start ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target, message",
    [
        (lambda x: jnp.nan * jnp.sum(x), "nan"),
        (lambda x: jnp.where(x[0] > 500, 0.0, -jnp.inf), "-inf"),
        (lambda x: jnp.where(x[0] > 5, 0.0, jnp.inf), "inf"),
        (lambda x: -(x**2), r"\(2,\)"),
        (lambda x: -jnp.sum(x**2)[None], r"\(1,\)"),
        (lambda x: jnp.sum(x).astype(int), "int"),
        (lambda x: jnp.sum(x).astype(complex), "complex"),
    ],
    ids=["nan", "-inf", "inf", "array", "array of one", "integer", "complex"],
)
def test_bad_log_density_at_the_start(target, message):
    with pytest.raises(ValueError, match=message):
        run(target)


def test_a_start_without_a_gradient_is_replaced():
    result = run(lambda x: -jnp.sum(jnp.sqrt(jnp.abs(x))), num_particles=10)
    assert len(result) == 10 and bool(jnp.all(jnp.isfinite(result.positions)))
    assert float(jnp.std(result.positions)) > 1, "the density's own sd is 11"


@pytest.mark.parametrize(
    "position, message",
    [
        (dict(a=jnp.zeros(2), b=jnp.arange(2)), r"\['b'\].*int"),
        (jnp.arange(2), "int"),
        (dict(), "empty"),
        (jnp.zeros(0), "empty"),
        (jnp.array([0.0, jnp.nan]), "nan"),
        (jnp.array([0.0, 1j]), "complex"),
    ],
    ids=["integers in a tree", "integers", "empty tree", "empty vector", "nan", "complex"],
)
def test_bad_position(position, message):
    with pytest.raises(ValueError, match=message):
        run(lambda p: -sum(jnp.sum(jnp.abs(leaf) ** 2) for leaf in jax.tree.leaves(p)), position)


# Numbers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize(
    "make",
    [RBF, IMQ, InverseLog, lambda h: ScoreIMQ(lambda x: -x, h), lambda h: random_fourier(KEY, 4, 2, h)],
    ids=["rbf", "imq", "inverse log", "score imq", "fourier"],
)
def test_bad_lengthscale(make, bad):
    with pytest.raises(ValueError, match=f"lengthscale.*{bad}"):
        make(bad)
    with pytest.raises(ValueError, match="lengthscale"):
        make(np.array([1.0, bad]))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: RBF("1"), "lengthscale"),
        (lambda: IMQ(beta=0.5), "0.5"),
        (lambda: IMQ(beta=-1.0), "-1.0"),
        (lambda: IMQ(offset=0.0), "offset"),
        (lambda: ScoreIMQ(lambda x: x, beta=0.5), "0.5"),
        (lambda: ScoreIMQ(lambda x: x, offset=-2.0), "offset.*-2"),
        (lambda: InverseLog(offset=-1.0), "offset.*-1"),
        (lambda: LineSearch(2.0), "2.0"),
        (lambda: LineSearch(float("nan")), "nan"),
        (lambda: OpenLoop(0.0), "0.0"),
        (lambda: DecayEarly(ConstantStep(), 0), "num_early.*0"),
        (lambda: DecayEarly(ConstantStep(), 1, 1.0), "1.0"),
        (lambda: Quadrature("positive"), "positive"),
        (lambda: GradientOracle(NearParticles(), num_steps=-1), "num_steps.*-1"),
        (lambda: GradientOracle(NearParticles(), num_starts=1.5), "num_starts.*1.5"),
        (lambda: GradientOracle(NearParticles(), particles_per_step=-1), "particles_per_step.*-1"),
        (lambda: GradientOracle(NearParticles(), scale=0.0), "scale"),
        (lambda: NearParticles(-1.0), "scale.*-1"),
        (lambda: frank_wolfe(RBF(), exact_embedding(RBF(), eleven_gaussians()), None, capacity=0), "capacity.*0"),
        (lambda: ParticleEmbedding(RBF(), lambda x: -x, "both"), "both"),
        (lambda: ParticleEmbedding(Stein(RBF(), lambda x: -x), lambda x: -x), "Stein"),
        (lambda: exact_embedding(IMQ(), eleven_gaussians()), "IMQ"),
        (lambda: pool_starts(ParticleEmbedding(RBF(), lambda x: -x), RBF(), jnp.zeros((2, 2))), "ParticleEmbedding"),
        (lambda: gaussian_mixture(jnp.zeros((2, 2)), sd=-1.0), "sd.*-1"),
        (lambda: gaussian_mixture(jnp.zeros((2, 2))), "sd"),
        (lambda: gaussian_mixture(jnp.zeros((1, 2)), covariances=-np.eye(2)[None]), "positive definite"),
        (lambda: gaussian_mixture(jnp.zeros((2, 2)), sd=1.0, weights=jnp.ones(3)), r"\(3,\)"),
        (lambda: importance_cloud(KEY, gaussian, jnp.zeros(2), num_evaluations=10), "num_evaluations.*10"),
        (lambda: check_positive("x", None), "None"),
        (lambda: check_count("n", True), "True"),
    ],
)
def test_bad_numbers(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("bad", [0, -1, 2.5, "5", None, True])
@pytest.mark.parametrize("name", ["num_particles", "max_refinement_steps", "num_evaluations", "max_evaluations"])
def test_bad_counts(name, bad):
    if name == "num_evaluations" and bad is None:
        return  # None lets the ladder choose
    with pytest.raises(ValueError, match=f"{name}.*{bad}"):
        run(**{name: bad})


def test_bad_count_to_add(gaussian_fit):
    for bad in (0, -1, 2.5):
        with pytest.raises(ValueError, match=f"num.*{bad}"):
            gaussian_fit.add(bad)
        with pytest.raises(ValueError, match=f"num.*{bad}"):
            gaussian_fit.sample(KEY, bad)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x: mmd2(RBF(), x, x, weights_x=jnp.ones(2)), r"weights_x.*\(3,\).*\(2,\)"),
        (lambda x: mmd2(RBF(), x, x[:, :1]), "dimensions"),
        (lambda x: mmd2(RBF(), x[0], x), r"\(2,\)"),
        (lambda x: mmd2(RBF(), x.at[0, 0].set(jnp.nan), x), "NaN"),
        (lambda x: mmd2(RBF(), x.astype(int), x), "int"),
        (lambda x: mmd2(RBF(), x[:0], x), r"\(0, 2\)"),
        (lambda x: reference_embedding(RBF(), x, jnp.ones(4)), r"\(4,\)"),
        (lambda x: reference_embedding(RBF(), x, jnp.array([1.0, -1.0, 1.0])), "at least zero"),
        (lambda x: reference_embedding(RBF(), x, jnp.zeros(3)), "positive sum"),
        (lambda x: reference_embedding(RBF(), x, jnp.array([1.0, jnp.nan, 1.0])), "NaN"),
        (
            lambda x: refine(
                RBF(), exact_embedding(RBF(), eleven_gaussians()), x, weights=jnp.ones(2), rule=ConstantStep()
            ),
            r"weights.*\(2,\)",
        ),
        (lambda x: refine(RBF(), ParticleEmbedding(RBF(), lambda x: -x), x), "ParticleEmbedding|embedding"),
        (lambda x: refine(RBF(), exact_embedding(RBF(), eleven_gaussians()), x, max_steps=0), "max_steps.*0"),
    ],
)
def test_sets_that_do_not_match(call, message):
    with pytest.raises(ValueError, match=message):
        call(jnp.asarray(np.random.default_rng(0).normal(size=(3, 2)), jnp.float32))


# Choices of a fit ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(embedding="clouds"), "clouds"),
        (dict(start="MAP"), "MAP"),
        (dict(embedding=None), "None"),
        (dict(start="prior"), "prior"),
        (dict(start="prior", prior=lambda key: jnp.zeros(3)), "3.*2"),
        (dict(start="prior", prior=lambda key: jnp.zeros(3), embedding="particles"), "3.*2"),
        (dict(embedding="stein", step_rule=Quadrature()), "zero"),
    ],
)
def test_bad_choices(options, message):
    with pytest.raises(ValueError, match=message):
        run(**options)


def test_embedding_with_another_kernel():
    with pytest.raises(ValueError, match="kernel"):
        run(embedding=exact_embedding(RBF(0.5), eleven_gaussians()), kernel=RBF(0.7))


def test_stein_embedding_with_a_kernel_that_is_none():
    "mu_p = 0 holds for Stein kernels alone."
    with pytest.raises(ValueError, match="Stein"):
        run(embedding=SteinEmbedding(RBF(0.7)))


def test_embedding_of_another_dimension():
    with pytest.raises(ValueError, match="dimension|2.*3|3.*2"):
        run(
            position=jnp.zeros(3),
            logdensity_fn=lambda x: -x @ x,
            embedding=exact_embedding(RBF(0.5), eleven_gaussians()),
        )


def test_lengthscales_of_another_dimension():
    with pytest.raises(ValueError, match="lengthscale|dimension"):
        run(kernel=RBF(jnp.ones(3)))


# Non-finite values met later -----------------------------------------------------------------------------------------


def walled(x):
    return gaussian(x) + jnp.sqrt(2.0 - x[0])  # value and score are NaN where x[0] > 2


def logged(x):
    return gaussian(x) + 2 * jnp.log(x[0])  # below zero the value is NaN and the score is finite


def clipped(x):
    return jnp.where(x[0] > 0, gaussian(x), -jnp.inf)  # below zero the score is zero


@pytest.mark.parametrize("target", [walled, logged, clipped])
@pytest.mark.parametrize("embedding", ["cloud", "particles", "stein"])
def test_no_particle_where_there_is_no_density(target, embedding):
    "Support with an edge: all particles lie where the log density is finite (else E log x is NaN), weights are finite."
    oracle = None if embedding == "cloud" else GradientOracle(NearParticles(1.0), num_steps=20, scale=1.0)
    result = run(
        target,
        jnp.array([1.0, -1.0]),
        embedding=embedding,
        oracle=oracle,
        num_particles=12,
        refine=embedding == "cloud",
    )
    assert bool(jnp.all(jnp.isfinite(result.weights))) and np.isfinite(result.discrepancy)
    assert bool(jnp.all(jnp.isfinite(jax.vmap(target)(result.positions))))


def test_rejected_candidates_are_counted():
    result = run(
        walled,
        jnp.array([1.0, -1.0]),
        embedding="particles",
        num_particles=12,
        oracle=GradientOracle(NearParticles(2.0), num_steps=20),
    )
    assert len(result) == 12 and result.history.rejected[-1] > 0
    assert np.all(np.diff(result.history.rejected) >= 0)


def test_run_stops_with_what_it_has_when_every_start_fails():
    "A wall moved in front of the oracle: particles so far stay, with a warning."
    oracle = GradientOracle(PriorStarts(lambda key: jnp.array([5.0, 0.0])), num_steps=5)
    with pytest.warns(UserWarning, match="non-finite.* 1 .*8"):
        result = run(walled, jnp.array([1.0, -1.0]), embedding="particles", oracle=oracle, num_particles=8)
    assert len(result) == 1 and bool(jnp.isfinite(result.weights[0])) and bool(jnp.all(jnp.isfinite(result.positions)))
    assert result.history.rejected[-1] == 4


def test_cloud_counts_points_where_the_target_is_not_a_number():
    cloud = importance_cloud(KEY, walled, jnp.array([1.0, -1.0]))
    outside = np.isnan(jax.vmap(walled)(cloud.points))
    assert cloud.rejected > 0 and cloud.rejected >= outside.sum()
    assert np.all(np.asarray(cloud.weights)[outside] == 0) and float(jnp.sum(cloud.weights)) == pytest.approx(
        1, abs=1e-5
    )


def test_cloud_outside_the_support():
    with pytest.raises(ValueError, match="finite"):
        importance_cloud(KEY, lambda x: jnp.where(x[0] > 1e4, 0.0, -jnp.inf), jnp.zeros(2), num_evaluations=64)


# Sound answers at the edge -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("constraint", ["free", "sum_to_one", "simplex"])
def test_duplicates_and_single_particles(constraint, dtype):
    "A singular Gram matrix: the duplicates share one weight's worth, and all is finite."
    target = gaussian_mixture(jnp.zeros((1, 2), dtype), sd=1.0)
    embedding = exact_embedding(RBF(1.0), target)
    loop = frank_wolfe(RBF(1.0), embedding, None, Quadrature(constraint), capacity=8)
    pair, single = (
        loop.init(jnp.asarray(x, dtype)) for x in ([[0.5, 0.0]] * 3 + [[-1.0, 0.3]], [[0.5, 0.0], [-1.0, 0.3]])
    )
    w = np.asarray(pair.particles.weights)
    v = np.asarray(single.particles.weights)
    assert np.all(np.isfinite(w)) and int(pair.particles.count) == 4
    loose = 2e-3 if dtype == jnp.float32 else 1e-6
    assert w[:3].sum() == pytest.approx(v[0], abs=loose) and w[3] == pytest.approx(v[1], abs=loose)
    alone = loop.init(jnp.zeros((1, 2), dtype)).particles.weights
    assert float(alone[0]) == pytest.approx(0.5 if constraint == "free" else 1.0, rel=1e-5)


def test_fit_of_one_particle():
    result = run(num_particles=1)
    assert len(result) == 1 and all(len(column) == 0 for column in result.history)
    mean = result.expectation(lambda x: x)
    assert bool(jnp.all(jnp.isfinite(mean.mean))) and np.isfinite(result.discrepancy)


def test_target_of_one_dimension():
    # five have 0.45 to 0.55 of the MMD^2 of draws, and from 0.5 on they are doubtful
    result = run(lambda x: -0.5 * jnp.sum(x**2), jnp.ones(1), num_particles=8)
    x, w = np.asarray(result.positions, float)[:, 0], np.asarray(result.weights, float)
    assert x.shape == (8,) and result.verdict == "trusted"
    assert abs(w @ x) < 0.05 and abs(w @ x**2 - 1) < 0.1


def test_expectation_of_a_constant_is_the_constant(gaussian_fit):
    believed = gaussian_fit.expectation(lambda x: jnp.full((), 3.0))
    assert float(believed.mean) == pytest.approx(3.0, rel=1e-4) and float(believed.sd) < 1e-3


def test_equal_points_have_a_lengthscale():
    assert float(median_lengthscale(jnp.ones((5, 2)))) == 1.0 == float(median_lengthscale(jnp.ones((1, 2))))


def funnel(x):
    return -0.5 * x[0] ** 2 / 9 - 0.5 * jnp.sum(x[1:] ** 2) * jnp.exp(-x[0]) - 7 * x[0]


def test_a_fit_that_nothing_passes_for_says_so():
    options = dict(max_evaluations=20_000, num_particles=3, oracle=GradientOracle(NearParticles(0.5), num_steps=5))
    with pytest.warns(UserWarning, match="this result is (doubtful|failed)"):
        result = run(funnel, jnp.zeros(15), **options)
    assert result.verdict != "trusted" and result.verdict in result.report()
    assert result.evaluations > 10_000, "all that was tried was paid for"
    assert len(result) == 3 and bool(jnp.all(jnp.isfinite(result.positions)))


def test_quiet_where_nothing_is_wrong():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(num_particles=20)
