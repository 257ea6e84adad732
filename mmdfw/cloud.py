import warnings
from typing import Any, Callable, NamedTuple
import jax, jax.numpy as jnp, numpy as np
import optax
from scipy.stats import norm, qmc
from scipy.special import logsumexp, softmax
from mmdfw.checks import check_count
from mmdfw.mixture import GaussianMixture

def sobol_normal(
    rng: np.random.Generator,
    num: int,
    d: int,
) -> np.ndarray:  # (num, d)
    "Scrambled Sobol points pushed through the normal quantile function."
    sobol = qmc.Sobol(d, scramble=True, rng=rng)
    uniform = sobol.random_base2(int(num - 1).bit_length())[:num]
    return norm.ppf(np.clip(uniform, 1e-12, 1 - 1e-12))

def allot(weights: np.ndarray, num: int) -> np.ndarray:
    "Split `num` into whole shares proportional to the weights (largest remainders)."
    exact = np.asarray(weights, float) / np.sum(weights) * num
    shares = np.floor(exact).astype(int)
    shares[np.argsort(shares - exact)[: num - shares.sum()]] += 1
    return shares

def sobol_mixture(rng: np.random.Generator, mixture: GaussianMixture, num: int) -> np.ndarray:  # (num, d)
    "Sobol points through a mixture: each component has its own scrambled stream."
    means, roots = np.asarray(mixture.means), np.asarray(mixture.roots)
    shares = allot(np.asarray(mixture.weights), num)
    parts = [m + sobol_normal(rng, n, len(m)) @ root.T for n, m, root in zip(shares, means, roots) if n]
    return np.concatenate(parts)

def normalised_weights(log_target: np.ndarray, log_proposal: np.ndarray) -> np.ndarray:
    "Self-normalised importance weights; points where the target is not a number weigh nothing."
    ratio = np.where(np.isfinite(log_target), log_target - log_proposal, -np.inf)
    return np.exp(ratio - logsumexp(ratio))

def effective_sample_size(weights) -> float:
    "How many equal weights these are worth: (sum w)^2 / sum w^2"
    return float(np.sum(weights) ** 2 / np.sum(np.square(weights)))

def spread_centres(rng: np.random.Generator, points: np.ndarray, weights: np.ndarray, k: int) -> np.ndarray:
    "k-means++ seeding on weighted points."
    centres = [points[rng.choice(len(points), p=weights)]]
    distance = np.sum((points - centres[0]) ** 2, 1)
    while len(centres) < k and np.sum(weights * distance) > 0:
        mass = weights * distance
        centres.append(points[rng.choice(len(points), p=mass / mass.sum())])
        distance = np.minimum(distance, np.sum((points - centres[-1]) ** 2, 1))
    return np.stack(centres)

def component_logs(mixture: GaussianMixture, points: np.ndarray) -> np.ndarray:  # (n, k)
    "Log of weight times density, of each point under each component."
    centred = points - mixture.means[:, None]  # (k, n, d)
    z = np.linalg.solve(mixture.roots, np.swapaxes(centred, 1, 2))
    volume = np.sum(np.log(np.diagonal(mixture.roots, axis1=1, axis2=2)), 1) + 0.5 * points.shape[1] * np.log(2 * np.pi)
    return (np.log(mixture.weights) - volume - 0.5 * np.sum(z**2, 1).T)

def maximise(points: np.ndarray, weights: np.ndarray, membership: np.ndarray) -> GaussianMixture:
    "M step with covariances shrunk to their pooled mean, more so where a component has few points."
    share = membership * weights[:, None]
    mass = np.sum(share, 0) + 1e-12
    means, d = share.T @ points / mass[:, None], points.shape[1]
    centred = points - means[:, None]
    covariances = np.swapaxes(centred * share.T[..., None], 1, 2) @ centred
    shrink = ((d + 1) / (mass**2 / (np.sum(share**2, 0) + 1e-30) + d + 1))[:, None, None]
    mixed = (1 - shrink) * covariances / mass[:, None, None] + shrink * np.sum(covariances, 0)
    floor = 1e-6 * np.diag(weights @ (points - weights @ points) ** 2 + 1e-12)
    return GaussianMixture(mass / np.sum(mass), means, np.linalg.cholesky(mixed + floor))

def fit_mixture(
    points: np.ndarray,  # (n, d)
    weights: np.ndarray,  # (n,), summing to one
    centres: np.ndarray,  # (k, d): where to begin
    num_steps: int = 40,
) -> GaussianMixture:
    "Weighted EM."
    nearest = np.argmin(np.sum((points[:, None] - centres) ** 2, -1), 1)
    mixture = maximise(points, weights, np.eye(len(centres))[nearest])
    for _ in range(num_steps): mixture = maximise(points, weights, softmax(component_logs(mixture, points), axis=1))
    return mixture

class Mode(NamedTuple):
    "A local maximum of the log density, and what finding it took."
    position: jax.Array  # (d,)
    logdensity: jax.Array
    evaluations: int

def find_mode(
    logdensity: Callable,  # (d,) -> scalar
    position: jax.Array,  # (d,)
    max_steps: int = 50,
    tolerance: float = 1e-3,  # on the size of the score
) -> Mode:
    "Near-MAP point by L-BFGS; the best finite point met is kept."
    loss = lambda x: -logdensity(x)
    optimizer = optax.lbfgs()
    value_and_grad = optax.value_and_grad_from_state(loss)
    def body(carry):
        x, state, best, used, _ = carry
        value, slope = value_and_grad(x, state=state)
        updates, state = optimizer.update(slope, state, x, value=value, grad=slope, value_fn=loss)
        better = jnp.isfinite(value) & (value < best[1])
        best = (jnp.where(better, x, best[0]), jnp.where(better, value, best[1]))
        used = used + 2 * (1 + state[-1].info.num_linesearch_steps)
        done = ~jnp.isfinite(value) | (jnp.linalg.norm(slope) < tolerance)
        return x + updates, state, best, used, done
    def run(x):
        state = optimizer.init(x)
        first = (x, state, (x, loss(x)), jnp.ones((), int), jnp.zeros((), bool))
        going = lambda carry: ~carry[4] & (carry[3] < 2 * max_steps)
        return jax.lax.while_loop(going, body, first)
    _, _, (x, value), used, _ = jax.jit(run)(position)
    return Mode(x, -value, int(used))

def laplace_root(logdensity: Callable, mode: jax.Array) -> np.ndarray:  # (d, d)
    "Cholesky factor of the inverse Hessian at the mode; flat or bent-up directions get the widest spread found."
    hessian = np.asarray(jax.jit(jax.hessian(logdensity))(mode), float)
    if not np.all(np.isfinite(hessian)): return np.eye(len(mode))
    precision, axes = np.linalg.eigh(-(hessian + hessian.T) / 2)
    usable = precision > 1e-8 * max(precision.max(), 1e-30)
    if not usable.any(): return np.eye(len(mode))
    variance = 1.0 / np.where(usable, precision, precision[usable].min())
    return np.linalg.cholesky(axes * variance @ axes.T)

class Cloud(NamedTuple):
    "A weighted reference set from importance sampling, and how good it is."
    points: jax.Array  # (m, d)
    weights: jax.Array  # (m,), summing to one
    effective_size: float  # worth this many independent draws
    evaluations: int  # log densities taken, all rounds
    rejected: int  # points where the log density was NaN or +inf
    proposal: GaussianMixture  # what the points were drawn from

    @property
    def efficiency(self): return self.effective_size / len(self.weights)

def scale_ladder(centre: np.ndarray, root: np.ndarray, num_scales: int = 6) -> GaussianMixture:
    "First proposal: one centre, spreads 1, 2, 4, ... times the given one, so that no prior scale is needed."
    factors = 2.0 ** np.arange(num_scales)
    means = np.broadcast_to(centre, (num_scales, len(centre)))
    return GaussianMixture(np.full(num_scales, 1.0 / num_scales), means, factors[:, None, None] * root)

def adapted_proposal(
    rng: np.random.Generator,
    points: np.ndarray,  # (n, d)
    weights: np.ndarray,  # (n,)
    max_components: int,
    wide_share: float,  # of the mass, on one component as wide as all points together: a safeguard
) -> GaussianMixture:
    "EM fit to the weighted points, and the safeguard."
    k = int(np.clip(effective_sample_size(weights) / (2 * points.shape[1]), 1, max_components))
    fitted = fit_mixture(points, weights, spread_centres(rng, points, weights, k))
    wide = maximise(points, weights, np.ones((len(points), 1)))
    join = lambda a, b: np.concatenate([a, b])
    return GaussianMixture(join((1 - wide_share) * fitted.weights, wide_share * wide.weights),
                           join(fitted.means, wide.means), join(fitted.roots, 2**0.5 * wide.roots))

class Round(NamedTuple):
    "Points of one round, their log densities, and what they were drawn from."
    points: np.ndarray
    logs: np.ndarray
    proposal: GaussianMixture

def draw_round(rng, evaluate: Callable, proposal: GaussianMixture, num: int, dtype) -> Round:
    "Draw `num` points and look at the target there."
    points = np.asarray(sobol_mixture(rng, proposal, num), dtype).astype(float)
    return Round(points, np.asarray(evaluate(jnp.asarray(points, dtype)), float), proposal)

def weigh_rounds(rounds: list) -> np.ndarray:
    "Weights of the points of all rounds against the mixture of all their proposals."
    points, logs = np.concatenate([r.points for r in rounds]), np.concatenate([r.logs for r in rounds])
    if not np.any(np.isfinite(logs)):
        raise ValueError(f"logdensity_fn is not finite at any of {len(points)} points around the start; is the start inside the support?")
    shares = np.array([len(r.points) for r in rounds]) / len(points)
    each = np.stack([logsumexp(component_logs(r.proposal, points), axis=1) for r in rounds])
    return normalised_weights(logs, logsumexp(each + np.log(shares)[:, None], axis=0))

def importance_cloud(
    key: jax.Array,
    logdensity: Callable,  # (d,) -> scalar, up to a constant
    centre: jax.Array,  # (d,): where to begin, best near a mode
    root=None,  # (d, d): Cholesky factor of the first guess of the spread; identity if None
    num_evaluations: int = 4096,  # log densities, all rounds together
    num_pilots: int = 6,  # rounds that find the proposal, with two fifths of the budget; the last round is the cloud
    max_components: int = 16,  # of the adapted mixture
) -> Cloud:
    "Adaptive importance sampling on Sobol points."
    check_count("num_evaluations", num_evaluations, 64)
    check_count("num_pilots", num_pilots)
    check_count("max_components", max_components)
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel())
    dtype, centre = jnp.asarray(centre).dtype, np.asarray(centre, float)
    evaluate = jax.jit(lambda x: jax.lax.map(logdensity, x, batch_size=1024))
    proposal = scale_ladder(centre, np.eye(len(centre)) if root is None else np.asarray(root, float))
    pilot, rounds = 2 * num_evaluations // (5 * num_pilots), []
    for wide_share in (num_pilots - 1) * [0.2] + [0.05]:
        rounds.append(draw_round(rng, evaluate, proposal, pilot, dtype))
        points = np.concatenate([r.points for r in rounds])
        proposal = adapted_proposal(rng, points, weigh_rounds(rounds), max_components, wide_share)
    last = draw_round(rng, evaluate, proposal, num_evaluations - num_pilots * pilot, dtype)
    weights = weigh_rounds([last])
    rejected = sum(int(np.sum(np.isnan(r.logs) | (r.logs == np.inf))) for r in rounds + [last])
    return Cloud(jnp.asarray(last.points, dtype), jnp.asarray(weights, dtype), effective_sample_size(weights),
                 num_evaluations, rejected, proposal)
