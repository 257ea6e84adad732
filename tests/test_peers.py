"""Values that other libraries agree on (coreax, scikit-learn, BlackJAX, FrankWolfe.jl), at tight tolerance."""

from typing import Any
import blackjax.vi.svgd as peer
import jax, jax.numpy as jnp, numpy as np, pytest
from sklearn.gaussian_process.kernels import RBF as SklearnRBF
from sklearn.metrics.pairwise import rbf_kernel

from mmdfw._checks import assert_close, pytree_dataclass
from mmdfw.embeddings._embedding import SteinEmbedding, reference_embedding
from mmdfw._loop import Components, init, step
from mmdfw.kernels._kernel import RBF, Kernel
from mmdfw.kernels._lengthscale import lengthscale_from_blackjax, lengthscale_from_gamma
from mmdfw._mmd import mmd2
from mmdfw.oracles._oracle import Oracle, Proposal
from mmdfw.steps._quadrature import Quadrature
from mmdfw._refinement import weigh
from mmdfw.steps._step import LineSearch

pytestmark = pytest.mark.usefixtures("x64")


def three_points():
    return jnp.array([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]])


def test_mmd_of_three_points():
    x = three_points()
    assert_close(jnp.sqrt(mmd2(RBF(1.0), x, x[:2])), 0.3797286517, rtol=1e-9)
    assert_close(jnp.sqrt(mmd2(RBF(1.0), x, x[:2], weights_y=jnp.array([1.0, 0.0]))), 0.7594573035, rtol=1e-9)


@pytest.mark.parametrize(
    "constraint, expected, rtol",
    [
        ("free", [0.2882215723, 0.4725555032], 3e-10),
        (
            "simplex",
            [
                1 - (0.5 + (np.exp(-1) - np.exp(-4)) / (6 * (1 - np.exp(-1)))),
                0.5 + (np.exp(-1) - np.exp(-4)) / (6 * (1 - np.exp(-1))),
            ],
            1e-12,
        ),
        (
            "sum_to_one",
            [
                1 - (0.5 + (np.exp(-1) - np.exp(-4)) / (6 * (1 - np.exp(-1)))),
                0.5 + (np.exp(-1) - np.exp(-4)) / (6 * (1 - np.exp(-1))),
            ],
            1e-12,
        ),
    ],
)
def test_quadrature_weights_of_three_points(constraint, expected, rtol):
    """The one on the simplex by hand: with a = 1/e, w_2 = 1/2 + (a - a^4) / (6 (1 - a)).

    It lies inside, so it is the sum-to-one weight, too."""
    x = three_points()
    weighed = weigh(RBF(1.0), reference_embedding(RBF(1.0), x), x[:2], Quadrature(constraint), jnp.array([0.5, 0.5]))
    assert_close(weighed.weights, np.array(expected), rtol=rtol)


def test_frank_wolfe_with_line_search_on_the_simplex():
    """f = |x|^2 over the simplex from a vertex: f = 1/t exactly after t vertices.

    The vertices are the points, and the kernel is their product."""

    @pytree_dataclass
    class Product(Kernel):
        scale: Any = 1.0
        zero_mean = True  # |x|^2 is the squared distance to a target at the origin

        def __call__(self, x, y):
            return self.scale * x @ y

        def gram(self, features_x, features_y):
            return self.scale * features_x @ features_y.T

    @pytree_dataclass
    class NextVertex(Oracle):
        def __call__(self, key, problem):
            points = jnp.eye(20)[problem.particles.count][None]
            values = problem.kernel.gram(points, problem.particles.features) @ problem.particles.weights
            return Proposal(points, values, jnp.ones(1, bool), jnp.min(values), jnp.zeros((), int), jnp.zeros((), int))

    kernel = Product()
    parts = Components(kernel, SteinEmbedding(kernel), NextVertex(), LineSearch())
    state = init(parts, jnp.eye(20)[:1], 32)
    run = jax.jit(step)
    for t in range(2, 21):
        state, info = run(parts, jax.random.key(t), state)
        assert_close(info.discrepancy, 1.0 / t, rtol=1e-13)
        assert_close(info.step_size, 1.0 / t, rtol=1e-13)
        assert_close(info.gap, 1.0 / (t - 1), rtol=1e-13)
    assert_close(state.particles.weights[:20], np.full(20, 1 / 20), rtol=1e-12)


def test_scikit_learn():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 4)), rng.normal(size=(20, 4))
    for gamma in (0.1, 1.0, 3.0):
        assert_close(
            RBF(lengthscale_from_gamma(gamma)).matrix(jnp.asarray(x), jnp.asarray(y)),
            rbf_kernel(x, y, gamma),
            rtol=1e-12,
        )
    scales = np.array([0.5, 1.0, 2.0, 3.0])
    assert_close(RBF(jnp.asarray(scales)).matrix(jnp.asarray(x), jnp.asarray(y)), SklearnRBF(scales)(x, y), rtol=1e-12)


def test_blackjax():
    rng = np.random.default_rng(1)
    x, y = jnp.asarray(rng.normal(size=(10, 3))), jnp.asarray(rng.normal(size=(7, 3)))
    for length_scale in (0.3, 1.0, 5.0):
        theirs = jax.vmap(jax.vmap(lambda a, b, l=length_scale: peer.rbf_kernel(a, b, l), (None, 0)), (0, None))(x, y)
        assert_close(RBF(lengthscale_from_blackjax(length_scale)).matrix(x, y), theirs, rtol=1e-12)


def test_svgd_direction_is_that_of_blackjax():
    "One SVGD step of unit rate in float64: the same direction to rounding, for the same bandwidth."
    import blackjax, optax
    from mmdfw.samplers._svgd import svgd_direction

    def logdensity(x):
        return -0.5 * jnp.sum(x**2) - 0.1 * jnp.sum(x**4)

    x = jnp.asarray(np.random.default_rng(2).normal(size=(12, 3)))
    algorithm = blackjax.svgd(jax.grad(logdensity), optax.sgd(1.0), peer.rbf_kernel, lambda state: state)
    state = algorithm.init(x, dict(length_scale=0.8))
    moved = algorithm.step(state)
    moved = (moved[0] if isinstance(moved, tuple) and not hasattr(moved, "particles") else moved).particles
    assert_close(
        svgd_direction(x, jax.vmap(jax.grad(logdensity))(x), lengthscale_from_blackjax(0.8)),
        moved - x,
        rtol=1e-11,
        atol=1e-14,
    )
