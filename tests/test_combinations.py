"""Every oracle x step rule x embedding through the loop, three steps each; those that make no sense, and why.

A step is an oracle's answer and its acceptance. The two halves are compiled apart, each oracle for each embedding, and
all rules together for each embedding; then all combinations run on what is compiled already.
"""

import itertools, re
from functools import partial

import jax, jax.numpy as jnp, numpy as np, pytest

from mmdfw._checks import pytree_dataclass
from mmdfw.embeddings._embedding import ParticleEmbedding, SteinEmbedding, exact_embedding, reference_embedding
from mmdfw._loop import Components, accept, init
from mmdfw.kernels._fourier import random_fourier
from mmdfw.kernels._kernel import IMQ, RBF
from mmdfw.kernels._stein_kernel import Stein
from mmdfw._mixture import eleven_gaussians
from mmdfw.oracles._oracle import GradientOracle, GridOracle, NearParticles, Problem, lmo_value, pool_starts
from mmdfw.steps._quadrature import Quadrature
from mmdfw.oracles._search import MonteCarloOracle, NelderMeadOracle, PoolOracle, greedy_value, quadrature_value
from mmdfw.steps._step import BlendedPairwise, ConstantStep, DecayEarly, GreedyHerding, LineSearch, OpenLoop, StepRule

BOX = ((-3.0, 3.0), (-3.0, 3.0))
OBJECTIVES = {"linear": lmo_value, "greedy": greedy_value, "quadrature": quadrature_value}
STARTS = NearParticles(0.5)


@pytest.fixture(scope="module")
def target():
    return eleven_gaussians()


@pytest.fixture(scope="module")
def settings(target):
    "Kernel and embedding of the target, by name."
    stein = Stein(IMQ(1.0), target.score)
    wide = RBF(0.7)
    fourier = random_fourier(jax.random.key(1), 8, 2, 0.7)
    particles = {
        f"particles, own term {own}": (wide, ParticleEmbedding(wide, target.score, own))
        for own in ("left out", "included", "alone")
    }
    return {
        "exact": (wide, exact_embedding(wide, target)),
        "fourier": (fourier, exact_embedding(fourier, target)),
        "reference": (wide, reference_embedding(wide, target.sample(jax.random.key(2), 12))),
        "stein": (stein, SteinEmbedding(stein)),
    } | particles


SEARCHES = {
    "gradient": lambda pool, f: GradientOracle(STARTS, num_steps=2, num_starts=2, objective=f),
    "grid": lambda pool, f: GridOracle(BOX, num_per_side=3, objective=f),
    "monte carlo": lambda pool, f: MonteCarloOracle(BOX, num_bases=2, num_draws=2, objective=f),
    "nelder-mead": lambda pool, f: NelderMeadOracle(STARTS, num_steps=2, num_starts=2, objective=f),
    "pool": lambda pool, f: PoolOracle(pool, replace=False, objective=f),
}
RULES = {
    "constant": ConstantStep(),
    "greedy herding": GreedyHerding(),
    "open loop": OpenLoop(),
    "line search": LineSearch(),
    "blended pairwise": BlendedPairwise(2),
    "early ones fade": DecayEarly(ConstantStep()),
    "free quadrature": Quadrature(),
    "summing to one": Quadrature("sum_to_one"),
    "simplex": Quadrature("simplex"),
}
EMBEDDINGS = [
    "exact",
    "fourier",
    "reference",
    "stein",
    "particles, own term left out",
    "particles, own term included",
    "particles, own term alone",
]
SUMS_TO_LESS = ("greedy herding", "free quadrature")  # the others keep a total of one
ON_SIMPLEX = ("constant", "open loop", "line search", "blended pairwise", "early ones fade", "simplex")


def why_not(search: str, objective: str, embedding: str) -> str | None:
    "The reason, as the error says it, or None where the oracle can be asked."
    if embedding.startswith(
        "particles"
    ):  # sums over particles estimate the slope of mu_p; values that could be compared they are not
        if search == "pool":
            return "changes with the particles"
        if search != "gradient":
            return "not values"
        if objective != "linear":
            return "estimates its slopes"
    if embedding == "stein" and objective == "quadrature":
        return "mu_p = 0"
    return None


def oracle_for(settings, search, objective, embedding):
    kernel, mean = settings[embedding]
    pool = (
        pool_starts(mean, kernel, jax.random.uniform(jax.random.key(3), (9, 2), minval=-3.0, maxval=3.0))
        if search == "pool"
        else None
    )
    return SEARCHES[search](pool, OBJECTIVES[objective])


@pytree_dataclass
class Numbered(StepRule):
    "One of RULES by its number: a program holds all nine, and a loop compiled once serves each."

    number: jax.Array

    def __call__(self, system):
        def weigh(rule, system):
            weights, size = rule(system)
            return weights, jnp.asarray(size, weights.dtype)

        return jax.lax.switch(self.number, [partial(weigh, rule) for rule in RULES.values()], system)


ask = jax.jit(lambda oracle, key, problem: oracle(key, problem))
begin = jax.jit(init, static_argnums=2)
take = jax.jit(accept)


def run(settings, oracle, rule, embedding):
    kernel, mean = settings[embedding]
    parts = Components(kernel, mean, None, Numbered(jnp.asarray(list(RULES).index(rule))))
    state = begin(parts, jnp.zeros((1, 2)), 8)
    for i in range(3):
        problem = Problem(kernel, mean, state.particles, state.factor, state.means)
        state, info = take(parts, state, ask(oracle, jax.random.fold_in(jax.random.key(4), i), problem))
    return state, info


PAIRS = list(itertools.product(SEARCHES, OBJECTIVES, EMBEDDINGS))


@pytest.mark.parametrize("search, objective, embedding", [pair for pair in PAIRS if why_not(*pair) is None])
def test_runs(settings, search, objective, embedding):
    oracle = oracle_for(settings, search, objective, embedding)
    for rule in RULES:
        state, info = run(settings, oracle, rule, embedding)
        weights = np.asarray(state.particles.weights[:4])
        assert int(info.count) == 4 and np.isfinite(np.asarray(state.particles.position[:4])).all(), rule
        assert np.isfinite(weights).all() and np.isfinite(float(info.discrepancy)) and float(info.discrepancy) >= 0, (
            rule
        )
        if rule == "free quadrature" and embedding == "stein":
            assert not weights.any()  # mu_p = 0: free weights vanish; `fit` refuses the pair
            continue
        assert (abs(weights.sum() - 1) < 1e-4) == (rule not in SUMS_TO_LESS) or rule == "free quadrature", rule
        if rule in ON_SIMPLEX:
            assert weights.min() >= -1e-6, rule


@pytest.mark.parametrize("search, objective, embedding", [pair for pair in PAIRS if why_not(*pair) is not None])
def test_is_refused(settings, search, objective, embedding):
    with pytest.raises(ValueError, match=re.escape(why_not(search, objective, embedding))):
        run(settings, oracle_for(settings, search, objective, embedding), "constant", embedding)
