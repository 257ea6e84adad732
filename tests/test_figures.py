"""The headline, small: 50 particles on the eleven Gaussians, judged by the exact embedding in float64."""

import jax, jax.numpy as jnp, pytest

from mmdfw.embeddings._embedding import exact_embedding
from mmdfw._fit import fit
from mmdfw.kernels._kernel import RBF
from mmdfw._mixture import eleven_gaussians
from mmdfw._mmd import mmd2_from_parts

N = 50


def exact_mmd2(embedding, positions, weights):
    gram = embedding.kernel.matrix(positions, positions)
    return float(mmd2_from_parts(weights, gram, embedding.mean(positions, None), embedding.double_integral))


@pytest.fixture(scope="module")
def headline():
    "MMD^2 of the fit, of the fit that knows mu_p, and of independent draws (mean of 20 sets); evaluations of the fit."
    with jax.enable_x64(True):
        target = eleven_gaussians()
        key = jax.random.key(0)
        embedding = exact_embedding(RBF(0.5), target)
        ours = fit(key, target.logdensity, jnp.zeros(2), kernel=RBF(0.5), num_particles=N)
        ceiling = fit(key, target.logdensity, jnp.zeros(2), embedding=embedding, num_particles=N)
        uniform = jnp.full(N, 1 / N)
        draws = [exact_mmd2(embedding, target.sample(k, N), uniform) for k in jax.random.split(key, 20)]
        return dict(
            ours=exact_mmd2(embedding, ours.positions, ours.weights),
            ceiling=exact_mmd2(embedding, ceiling.positions, ceiling.weights),
            draws=sum(draws) / 20,
            evaluations=ours.evaluations,
            expected_draws=float(1 - embedding.double_integral) / N,
            stated=ceiling.discrepancy,
            greedy=ceiling.history.discrepancy[-1],
            count=len(ours),
        )


def test_mmd2_of_the_fit(headline):
    assert headline["count"] == N and headline["ours"] < 4e-5


def test_few_evaluations(headline):
    assert headline["evaluations"] <= 30_000, "two attempts at a cloud, and what checks them"


def test_near_the_ceiling(headline):
    assert headline["ours"] <= 2.5 * headline["ceiling"]


def test_independent_draws_are_far_worse(headline):
    assert headline["draws"] == pytest.approx(headline["expected_draws"], rel=0.25), "E MMD^2 = (1 - E k(x, x')) / n"
    assert headline["draws"] > 100 * headline["ours"]


def test_with_the_exact_embedding_the_stated_value_is_the_true_one(headline):
    assert headline["stated"] == pytest.approx(headline["ceiling"], rel=1e-6)
    assert headline["ceiling"] < 0.2 * headline["greedy"], "refinement settles what greed has found"
