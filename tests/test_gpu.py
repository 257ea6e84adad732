"""The whole step lowers for CUDA: no callback, no float64. Lowering needs no GPU, so this runs anywhere."""

import re
import jax, jax.numpy as jnp, numpy as np, pytest
from jax import export

from mmdfw.embeddings._embedding import ParticleEmbedding, SteinEmbedding, exact_embedding, reference_embedding
from mmdfw._loop import Components, init, step
from mmdfw.kernels._fourier import random_fourier
from mmdfw.kernels._kernel import IMQ, RBF, InverseLog, from_units
from mmdfw.kernels._stein_kernel import ScoreIMQ, Stein
from mmdfw._mixture import gaussian_mixture
from mmdfw.oracles._oracle import GradientOracle, NearParticles, pool_starts
from mmdfw.steps._quadrature import Quadrature
from mmdfw._refinement import slope, weigh
from mmdfw.steps._step import ConstantStep, LineSearch

PLATFORMS = [["cuda"], ["cpu", "cuda"]]


def target():
    return gaussian_mixture(jnp.array([[0.0, 0.0], [2.0, 1.0]], jnp.float32), sd=0.5)


def score(x):
    return jax.grad(lambda x: -0.5 * jnp.sum(x**2) - 0.1 * jnp.sum(x**4))(x)


def points(num=6):
    return jnp.asarray(np.random.default_rng(0).normal(size=(num, 2)), jnp.float32)


def lowered(f, args, platforms):
    "The module's text, for these platforms; arguments go in as plain leaves, since export knows no types of ours."
    leaves, tree = jax.tree.flatten(args)
    flat = lambda leaves: jax.tree.leaves(f(*jax.tree.unflatten(tree, leaves)))  # noqa: E731
    made = export.export(jax.jit(flat), platforms=platforms)(leaves)
    assert made.platforms == tuple(platforms)
    return made.mlir_module()


def assert_sound(text):
    assert not re.findall(r"\w*callback\w*", text)
    assert not re.findall(r"tensor<[^>]*f64>", text)


def exact(rule, particles_per_step=1):
    embedding = exact_embedding(RBF(0.7), target())
    starts = pool_starts(embedding, embedding.kernel, points(16))
    return Components(
        embedding.kernel,
        embedding,
        GradientOracle(starts, num_steps=3, num_starts=5, particles_per_step=particles_per_step, scale=0.7),
        rule,
    )


def around_particles(kernel, embedding, rule):
    return Components(kernel, embedding, GradientOracle(NearParticles(0.5), num_steps=3, num_starts=5), rule)


PARTS = {
    "exact, free": lambda: exact(Quadrature()),
    "exact, sum to one": lambda: exact(Quadrature("sum_to_one")),
    "exact, simplex": lambda: exact(Quadrature("simplex")),
    "exact, line search": lambda: exact(LineSearch()),
    "exact, batch": lambda: exact(Quadrature(), 3),
    "reference": lambda: around_particles(IMQ(0.7), reference_embedding(IMQ(0.7), points(20)), Quadrature()),
    "particles": lambda: around_particles(RBF(0.7), ParticleEmbedding(RBF(0.7), score, "alone"), ConstantStep()),
    "stein": lambda: around_particles(
        Stein(IMQ(0.7), score), SteinEmbedding(Stein(IMQ(0.7), score)), Quadrature("simplex")
    ),
}


@pytest.fixture(autouse=True)
def single_precision():
    with jax.enable_x64(False):
        yield


def step_text(name, platforms):
    parts = PARTS[name]()
    shapes = jax.eval_shape(lambda x: init(parts, x, 16), points(1))
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    key_data = jax.random.key_data(jax.random.key(0))
    return lowered(lambda data, state: step(parts, jax.random.wrap_key_data(data), state), (key_data, state), platforms)


@pytest.mark.parametrize("platforms", PLATFORMS, ids="+".join)
@pytest.mark.parametrize("name", list(PARTS))
def test_step(name, platforms):
    assert_sound(step_text(name, platforms))


@pytest.mark.parametrize("platforms", PLATFORMS, ids="+".join)
@pytest.mark.parametrize("name", list(PARTS))
def test_init(name, platforms):
    parts = PARTS[name]()
    assert_sound(lowered(lambda x: init(parts, x, 16), (points(1),), platforms))


@pytest.mark.parametrize("platforms", PLATFORMS, ids="+".join)
@pytest.mark.parametrize(
    "rule", [Quadrature(), Quadrature("simplex"), ConstantStep()], ids=["free", "simplex", "constant"]
)
def test_refinement(rule, platforms):
    kernel, embedding, x = RBF(0.7), exact_embedding(RBF(0.7), target()), points()
    weights = jnp.full(6, 1 / 6, jnp.float32)
    for unit in (0.7, jnp.array([[0.7, 0.0], [0.1, 0.6]], jnp.float32)):
        there = lambda x, unit=unit: from_units(x, unit)
        assert_sound(lowered(lambda x, there=there: weigh(kernel, embedding, there(x), rule, weights), (x,), platforms))
        assert_sound(lowered(lambda x, there=there: slope(kernel, embedding, there(x), weights), (x,), platforms))


BASES = {
    "rbf": RBF(0.7),
    "imq": IMQ(0.7),
    "inverse log": InverseLog(0.7),
    "score imq": ScoreIMQ(score, 0.7),
    "fourier": random_fourier,
}


@pytest.mark.parametrize("platforms", PLATFORMS, ids="+".join)
@pytest.mark.parametrize("over_stein", [False, True], ids=["plain", "stein"])
@pytest.mark.parametrize("name", list(BASES))
def test_kernels(name, over_stein, platforms):
    base = random_fourier(jax.random.key(0), 16, 2) if name == "fourier" else BASES[name]
    kernel = Stein(base, score) if over_stein else base
    assert_sound(
        lowered(
            lambda x: (kernel.matrix(x, x), jax.grad(lambda x: jnp.sum(kernel.matrix(x, x)))(x)), (points(),), platforms
        )
    )
