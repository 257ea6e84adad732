"""A member of each kind as a user would write it: it goes through fit, save, load and the checks of its contract."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mmdfw
from mmdfw import contracts
from mmdfw.embeddings import Embedding
from mmdfw.kernels import Radial
from mmdfw.oracles import Oracle, lmo_value, pick

QUICK = dict(num_particles=4, max_refinement_steps=10, progress=False)
ZERO = jnp.zeros(2)


def bent(x):
    return -0.5 * x[0] ** 2 - 0.5 * (x[1] - 0.3 * x[0] ** 2) ** 2  # little enough for a cloud, without chains


@mmdfw.saveable
@mmdfw.pytree_dataclass
class Matern(Radial):
    "(1 + sqrt(3) r) exp(-sqrt(3) r)"

    lengthscale: float = 1.0

    def radial(self, r2):
        r = jnp.sqrt(3 * r2 + 1e-12)
        return (1 + r) * jnp.exp(-r)


@mmdfw.saveable
@mmdfw.pytree_dataclass
class InSquare(Embedding):
    "The uniform distribution on [-1, 1]^2 under RBF(1), in closed form."

    kernel: mmdfw.RBF
    error2: float = 0.0

    def mean(self, points, particles=None):
        cdf = jax.scipy.stats.norm.cdf
        return jnp.prod(jnp.sqrt(2 * jnp.pi) * (cdf(1 - points) - cdf(-1 - points)) / 2, 1)

    @property
    def double_integral(self):
        nodes, weights = np.polynomial.legendre.leggauss(20)
        pairs = np.exp(-0.5 * (nodes[:, None] - nodes) ** 2)
        return float(weights @ pairs @ weights / 4) ** 2


@mmdfw.saveable
@mmdfw.pytree_dataclass
class Scatter(Oracle):
    "The best of some points around the particles."

    num: int = mmdfw.static(64)

    def __call__(self, key, problem):
        which_key, noise_key = jax.random.split(key)
        position = problem.particles.position
        some = jax.random.randint(which_key, (self.num,), 0, problem.particles.count)
        points = position[some] + jax.random.normal(noise_key, (self.num, position.shape[1]), position.dtype)
        values = lmo_value(problem, points)
        return pick(lambda i: points[i], values, values, 0)


@mmdfw.saveable
@mmdfw.pytree_dataclass
class Slower(mmdfw.StepRule):
    "Half of the way of constant steps, all of it for the first particle."

    share: float = 0.5
    wants_gram = False

    def __call__(self, system):
        new = (jnp.arange(len(system.weights)) >= system.before) & (jnp.arange(len(system.weights)) < system.count)
        atom = new / jnp.maximum(jnp.sum(new), 1).astype(system.weights.dtype)
        size = jnp.where(system.before == 0, 1.0, self.share / system.count.astype(system.weights.dtype))
        return (1 - size) * system.weights + size * atom, size


def test_they_keep_their_contracts():
    contracts.check_kernel(Matern(0.8))
    contracts.check_embedding(
        InSquare(mmdfw.RBF(1.0)), jnp.asarray(np.random.default_rng(0).uniform(-1, 1, (12, 2)), float)
    )
    contracts.check_oracle(Scatter())
    contracts.check_step_rule(Slower(), sum_to_one=True, nonnegative=True)


def test_the_closed_form_is_that_of_the_square():
    draws = jnp.asarray(np.random.default_rng(1).uniform(-1, 1, (20_000, 2)), float)
    sums = mmdfw.reference_embedding(mmdfw.RBF(1.0), draws)
    places = jnp.array([[0.0, 0.0], [1.0, -0.5], [3.0, 0.0]])
    assert np.allclose(InSquare(mmdfw.RBF(1.0)).mean(places), sums.mean(places), atol=0.01)
    assert abs(InSquare(mmdfw.RBF(1.0)).double_integral - float(sums.double_integral)) < 0.01


MEMBERS = dict(
    kernel=dict(kernel=Matern(0.8)),
    embedding=dict(embedding=InSquare(mmdfw.RBF(1.0))),
    oracle=dict(oracle=Scatter()),
    step_rule=dict(step_rule=Slower(), refine=False),
)


@pytest.mark.parametrize("kind", MEMBERS)
def test_fit_save_load_and_grow(kind, tmp_path):
    make = lambda n: mmdfw.fit(jax.random.key(3), bent, ZERO, **(QUICK | MEMBERS[kind] | dict(num_particles=n)))
    four, six = make(4), make(6)
    path = four.save(tmp_path / "four.npz")
    again = mmdfw.load(path, bent, ZERO)
    assert np.array_equal(again.positions, four.positions) and np.array_equal(again.weights, four.weights)
    more = again.add(2, progress=False)
    assert np.array_equal(more.positions, six.positions) and np.array_equal(more.weights, six.weights)
    assert np.isfinite(more.discrepancy)


@pytest.mark.parametrize("kind", ("kernel", "embedding", "oracle", "step_rule"))
def test_without_a_name_saving_refuses_at_once(kind, tmp_path):
    part = MEMBERS[kind][kind]
    nameless = mmdfw.pytree_dataclass(type("Nameless", (type(part),), {}))
    held = {name: getattr(part, name) for name in part.__dataclass_fields__}
    asked = QUICK | MEMBERS[kind] | {kind: nameless(**held), "refine": False}  # a new class compiles all anew
    result = mmdfw.fit(jax.random.key(3), bent, ZERO, **asked)
    with pytest.raises(ValueError, match=r"result\.parts\..* cannot be saved.*put @mmdfw\.saveable above it"):
        result.save(tmp_path / "nameless.npz")
    assert not list(tmp_path.iterdir())
