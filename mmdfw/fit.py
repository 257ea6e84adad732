import os, sys, time, warnings
from dataclasses import dataclass, field, replace
from typing import Any, Callable, NamedTuple
import jax, jax.numpy as jnp, numpy as np
from tqdm import tqdm
from mmdfw.checks import FlatTarget, check_choice, check_count, flatten_target
from mmdfw.cloud import Cloud, find_mode, importance_cloud, laplace_root
from mmdfw.embedding import Embedding, ParticleEmbedding, SteinEmbedding, reference_embedding
from mmdfw.frank_wolfe import Components, Info, State, capacity_for, discrepancy, init, step, with_capacity
from mmdfw.kernel import IMQ, RBF, Kernel, Stein, median_lengthscale
from mmdfw.mmd import mmd2_from_parts
from mmdfw.oracle import GradientOracle, NearParticles, Oracle, PriorStarts, pool_starts
from mmdfw.quadrature import IntegralPosterior, Quadrature, integral_posterior, sum_to_one_weights
from mmdfw.refine import Refined, refine, weigh
from mmdfw.step import ConstantStep, StepRule

def show_progress(wanted=None) -> bool:
    "On in a terminal or a notebook, off in tests, unless told."
    if wanted is not None: return bool(wanted)
    if os.environ.get("IN_TEST") or os.environ.get("PYTEST_CURRENT_TEST"): return False
    return sys.stderr.isatty() or "ipykernel" in sys.modules

class Start(NamedTuple):
    "Where a fit begins, how wide the target is there, and what finding out took."
    position: jax.Array  # (d,)
    root: np.ndarray  # (d, d) or (d,): rough spread
    evaluations: int

def find_start(key, target: FlatTarget, start: str, prior) -> Start:
    "The MAP from the given position, a prior draw, or the position itself, and the curvature there."
    position, used = target.position, 2
    if start == "prior":
        if prior is None: raise ValueError("start='prior' needs prior=, a function from a key to a position")
        position = jax.flatten_util.ravel_pytree(prior(key))[0].astype(position.dtype)
        if position.shape != target.position.shape:
            raise ValueError(f"prior gave {position.shape[0]} numbers where position has {target.position.shape[0]}")
    if start == "map":
        mode = find_mode(target.logdensity, position)
        position, used = mode.position, used + mode.evaluations
    if len(position) <= MAX_CLOUD_DIMENSION: return Start(position, laplace_root(target.logdensity, position), used + len(position))
    spread, probes = curvature_spread(key, target.logdensity, position)
    return Start(position, spread, used + probes)

MAX_CLOUD_DIMENSION = 20  # beyond it importance sampling is not tried by default
MIN_EFFICIENCY = 0.05  # effective over actual size of a cloud below which it is not trusted
MIN_EFFECTIVE_SIZE = 100.0

def curvature_spread(key, logdensity: Callable, position: jax.Array, num_probes: int = 16):  # -> (d,), evaluations
    "1 / sqrt of the Hessian's diagonal by random signs: a rough width for each coordinate."
    signs = jax.random.rademacher(key, (num_probes, len(position)), position.dtype)
    product = lambda v: v * jax.jvp(jax.grad(logdensity), (position,), (v,))[1]
    diagonal = jnp.mean(jax.vmap(product)(signs), 0)
    widest = jnp.max(jnp.abs(diagonal))
    return 1.0 / jnp.sqrt(jnp.clip(jnp.abs(diagonal), 1e-6 * widest + 1e-30)), 2 * num_probes

def default_kernel(points: jax.Array, weights: jax.Array) -> RBF:
    "RBF with one lengthscale per dimension: the weighted standard deviation times the median scaled distance."
    centre = weights @ points
    sd = jnp.sqrt(weights @ (points - centre) ** 2)
    return RBF(sd * median_lengthscale(points / sd, divide_by_log=False))

def make_cloud(key, target: FlatTarget, start: Start, num_evaluations: int) -> tuple:  # -> Cloud, whether to trust it
    "An importance cloud around the start, and a warning where its effective sample size says that it has failed."
    cloud = importance_cloud(key, target.logdensity, start.position, start.root, num_evaluations)
    good = cloud.efficiency >= MIN_EFFICIENCY and cloud.effective_size >= MIN_EFFECTIVE_SIZE
    if not good:
        warnings.warn(f"the importance cloud failed: {len(cloud.weights)} points are worth {cloud.effective_size:.0f} draws in "
                      f"{len(start.position)} dimensions. Give more num_evaluations, or draws of your own as "
                      "embedding=reference_embedding(kernel, draws).", stacklevel=3)
    return cloud, good

class Setting(NamedTuple):
    "Kernel and embedding of a fit, in words too."
    kernel: Kernel
    embedding: Embedding
    name: str
    evaluations: int
    rejected: int

def choose_setting(key, target: FlatTarget, start: Start, kernel, embedding, num_evaluations: int) -> Setting:
    "The embedding asked for, or the cloud in low dimension while its effective sample size holds, or the particles."
    if isinstance(embedding, Embedding): return given_setting(kernel, embedding)
    check_choice("embedding", embedding, ("auto", "cloud", "particles", "stein"))
    score = jax.grad(target.logdensity)
    low = len(start.position) <= MAX_CLOUD_DIMENSION
    used = rejected = 0
    if embedding == "cloud" or (embedding == "auto" and low):
        cloud, good = make_cloud(key, target, start, num_evaluations)
        used, rejected = cloud.evaluations, cloud.rejected
        if good or embedding == "cloud":
            kernel = kernel or default_kernel(cloud.points, cloud.weights)
            made = reference_embedding(kernel, cloud.points, cloud.weights)
            name = f"importance cloud, {len(cloud.weights)} points worth {cloud.effective_size:.0f} draws"
            return Setting(kernel, made, name, used, rejected)
    kernel = kernel or RBF(rough_lengthscale(start))
    if embedding == "stein":
        base = kernel if not isinstance(kernel, Stein) else kernel.base
        return Setting(Stein(base, score), SteinEmbedding(), "Stein", used, rejected)
    return Setting(kernel, ParticleEmbedding(kernel, score, "alone"), "the particles themselves", used, rejected)

def given_setting(kernel, embedding: Embedding) -> Setting:
    "An embedding of the user's own brings its kernel along."
    own = getattr(embedding, "kernel", None)
    if own is None and kernel is None: raise ValueError(f"{type(embedding).__name__} has no kernel of its own: give kernel= as well")
    if own is not None and kernel is not None and own is not kernel:
        raise ValueError(f"the embedding was made for {own}, but kernel={kernel} was given; leave kernel out")
    return Setting(kernel or own, embedding, type(embedding).__name__, 0, 0)

def rough_lengthscale(start: Start) -> jax.Array:
    "Width of each coordinate at the start times the root of 2 d: the median distance of a Gaussian that wide."
    sd = start.root if np.ndim(start.root) == 1 else np.linalg.norm(start.root, axis=1)
    return jnp.asarray(sd, start.position.dtype) * jnp.sqrt(2.0 * len(start.position)).astype(start.position.dtype)

def default_oracle(key, setting: Setting, target: FlatTarget, start: str, prior) -> GradientOracle:
    "Starts from the pool where the embedding has one, from the prior where asked, else near the particles."
    scale = getattr(setting.kernel, "lengthscale", getattr(getattr(setting.kernel, "base", None), "lengthscale", 1.0))
    pool = setting.embedding.pool(key, 2048)
    if pool is not None: return GradientOracle(pool_starts(setting.embedding, setting.kernel, pool), scale=scale)
    if start == "prior":
        return GradientOracle(PriorStarts(lambda k: jax.flatten_util.ravel_pytree(prior(k))[0].astype(target.position.dtype)), num_steps=100, scale=scale)
    return GradientOracle(NearParticles(0.5 * scale), num_steps=100, scale=scale)

def choose_rule(embedding: Embedding, rule) -> StepRule:
    "Free quadrature weights where they mean something: not for a mean of zero, nor for z made of the particles."
    if isinstance(embedding, SteinEmbedding):
        if isinstance(rule, Quadrature) and rule.constraint == "free":
            raise ValueError("free weights are all zero where mu_p = 0; use Quadrature('simplex') or Quadrature('sum_to_one')")
        return rule or Quadrature("simplex")
    return rule or (Quadrature() if embedding.fixed else ConstantStep())

jitted_step, jitted_init = jax.jit(step), jax.jit(init, static_argnums=2)

def grow(
    key: jax.Array,
    parts: Components,
    state: State,
    num_particles: int,  # in total
    progress: bool = False,
) -> tuple:  # -> State, list of Info
    "Add particles until there are `num_particles`; each step's key comes from its number, so stopping changes nothing."
    infos, count = [], int(state.particles.count)
    with tqdm(total=num_particles, initial=count, disable=not progress, unit="particle", desc="growing") as bar:
        try:
            while count < num_particles:
                size = min(parts.oracle.batch_size, num_particles - count)
                state = with_capacity(state, capacity_for(count + parts.oracle.batch_size))
                state, info = jitted_step(parts, jax.random.fold_in(key, count), state)
                infos.append(info)
                if not bool(info.accepted):
                    warnings.warn(f"every start of the oracle met non-finite values: stopped at {count} particles of {num_particles}", stacklevel=3)
                    break
                bar.update(int(info.count) - count)
                count = int(info.count)
                bar.set_postfix_str(f"discrepancy {float(info.discrepancy):.2e}", refresh=False)
        except KeyboardInterrupt:
            warnings.warn(f"interrupted: {count} particles of {num_particles} are kept", stacklevel=3)
    return state, infos

class History(NamedTuple):
    "One entry for each step."
    count: np.ndarray
    discrepancy: np.ndarray
    gap: np.ndarray
    step_size: np.ndarray
    delta: np.ndarray
    jitter: np.ndarray
    evaluations: np.ndarray
    rejected: np.ndarray

def as_history(infos: list) -> History:
    "Infos as arrays."
    return History(*(np.array([np.asarray(getattr(info, name)) for info in infos]) for name in History._fields))

@dataclass(frozen=True, eq=False, repr=False)
class Fit:
    "Weighted particles, how they came about, and the state from which more can be added."
    particles: Any  # a pytree like the start, each leaf with a leading axis of n
    weights: jax.Array  # (n,)
    positions: jax.Array  # (n, d): the particles as vectors
    mmd2: float  # by the embedding; KSD^2 for the particle embedding
    history: History  # of the growth
    evaluations: int  # target evaluations in all: log densities and scores, each counted
    embedding_name: str
    state: State  # before refinement
    parts: Components
    refinement: Any = field(default=None)  # Refined, or None
    context: Any = field(default=None)  # key, target, base evaluations: what `add` needs

    def __len__(self): return len(self.weights)
    def __repr__(self):
        return (f"Fit({len(self)} particles, {'MMD^2' if self.parts.embedding.fixed else 'KSD^2'} {self.mmd2:.3g}, "
                f"{self.evaluations} target evaluations, embedding: {self.embedding_name})")
    def expectation(self, f): return expectation(self, f)
    def add(self, num, progress=None): return add(self, num, progress)
    def sample(self, key, num): return sample(self, key, num)

class Context(NamedTuple):
    "What a fit must remember to go on."
    key: jax.Array
    target: FlatTarget
    evaluations: int  # before growth: start and cloud
    refine: bool
    max_steps: int

def finish(parts: Components, state: State, infos: list, context: Context, name: str, progress: bool) -> Fit:
    "Refine if asked, weigh, and put the result together."
    n = int(state.particles.count)
    positions, weights = state.particles.position[:n], state.particles.weights[:n]
    refinement, passes = None, 0
    if context.refine and parts.embedding.fixed:
        refinement = run_refinement(parts, positions, weights, context.max_steps, progress)
        positions, weights = refinement.positions, refinement.weighed.weights
        passes = refinement.passes
    value = discrepancy(parts, state) if refinement is None else mmd2_from_parts(
        weights, refinement.weighed.gram, refinement.weighed.means, parts.embedding.double_integral)
    used = context.evaluations + int(state.evaluations) + 2 * passes * n * parts.kernel.evaluations_per_point
    return Fit(jax.vmap(context.target.unravel)(positions), weights, positions, float(value), as_history(infos), used,
               name, state, parts, refinement, context)

def run_refinement(parts: Components, positions, weights, max_steps: int, progress: bool) -> Refined:
    "Refinement with a progress bar."
    with tqdm(total=max_steps, disable=not progress, unit="step", desc="refining") as bar:
        def on_chunk(steps, value):
            bar.update(min(steps, max_steps) - bar.n)
            bar.set_postfix_str(f"MMD^2 {value:.2e}", refresh=False)
        return refine(parts.kernel, parts.embedding, positions, parts.step_rule, weights, max_steps, on_chunk=on_chunk)

def fit(
    key: jax.Array,
    logdensity_fn: Callable,  # log density up to a constant, of a pytree like `position`
    position,  # a pytree of floating arrays: where the search for the mode begins
    *,
    num_particles: int = 50,
    kernel: Kernel = None,  # RBF on the target's own scales if None
    embedding="auto",  # "cloud", "particles", "stein", or an Embedding
    oracle: Oracle = None,  # gradient descent from the embedding's pool if None
    step_rule: StepRule = None,  # Bayesian quadrature weights if None; constant steps for the particle embedding
    start: str = "map",  # "prior", "given"
    prior: Callable = None,  # key -> position, for start="prior"
    num_evaluations: int = 4096,  # of the importance cloud
    refine: bool = True,  # move all particles together after growth
    max_refinement_steps: int = 300,
    progress: bool = None,  # on in a terminal or notebook if None
) -> Fit:
    "Approximate a distribution known up to a constant by weighted particles."
    check_count("num_particles", num_particles)
    check_count("max_refinement_steps", max_refinement_steps)
    check_choice("start", start, ("map", "prior", "given"))
    target = flatten_target(logdensity_fn, position)
    start_key, cloud_key, pool_key, grow_key = jax.random.split(key, 4)
    first = find_start(start_key, target, start, prior)
    setting = choose_setting(cloud_key, target, first, kernel, embedding, num_evaluations)
    oracle = oracle or default_oracle(pool_key, setting, target, start, prior)
    parts = Components(setting.kernel, setting.embedding, oracle, choose_rule(setting.embedding, step_rule))
    state = jitted_init(parts, first.position[None], capacity_for(1))
    state = state._replace(rejected=state.rejected + setting.rejected)
    context = Context(grow_key, target, first.evaluations + setting.evaluations, refine, max_refinement_steps)
    state, infos = grow(grow_key, parts, state, num_particles, show_progress(progress))
    return finish(parts, state, infos, context, setting.name, show_progress(progress))

def add(result: Fit, num: int, progress=None) -> Fit:
    "`num` more particles: the same as if they had been asked for at once."
    check_count("num", num)
    parts, context = result.parts, result.context
    total = int(result.state.particles.count) + num
    state, infos = grow(context.key, parts, result.state, total, show_progress(progress))
    fresh = finish(parts, state, infos, context, result.embedding_name, show_progress(progress))
    joined = History(*(np.concatenate([a, b]) for a, b in zip(result.history, fresh.history)))
    return replace(fresh, history=joined)

def expectation(result: Fit, f: Callable) -> IntegralPosterior:
    "E f under the target with the standard deviation that quadrature gives it (NaN where mu_p is not known)."
    values = jax.vmap(f)(result.particles)
    n, parts = len(result), result.parts
    if not parts.embedding.fixed: return IntegralPosterior(jnp.tensordot(result.weights, values, 1) / jnp.sum(result.weights), jnp.full(values.shape[1:], jnp.nan))
    weighed = weigh(parts.kernel, parts.embedding, result.positions, parts.step_rule, result.weights)
    weights = result.weights
    if isinstance(parts.step_rule, Quadrature) and parts.step_rule.constraint == "free":
        weights = sum_to_one_weights(weighed.factor, weighed.means, jnp.ones(n, weights.dtype))
    error2 = mmd2_from_parts(weights, weighed.gram, weighed.means, parts.embedding.double_integral) + parts.embedding.error2
    return integral_posterior(values, weights, weighed.gram, weighed.factor, error2)

def sample(result: Fit, key: jax.Array, num: int):
    "Draw particles by weight, with replacement; negative weights count as zero."
    check_count("num", num)
    which = jax.random.categorical(key, jnp.log(jnp.maximum(result.weights, 0.0)), shape=(num,))
    return jax.tree.map(lambda leaf: leaf[which], result.particles)
