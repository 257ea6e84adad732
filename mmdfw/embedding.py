from dataclasses import field
from typing import Any, Callable, NamedTuple
import jax, jax.numpy as jnp
from mmdfw.checks import check_choice, check_points, check_weights, pytree_dataclass
from mmdfw.kernel import RBF, Kernel, RandomFourier
from mmdfw.mixture import GaussianMixture, log_normal
from mmdfw.mmd import kernel_mean

class Particles(NamedTuple):
    "Weighted particles in arrays of fixed capacity; rows from `count` on are unused and have weight zero."
    position: jax.Array  # (capacity, d)
    features: Any  # kernel features, capacity rows
    score: jax.Array  # (capacity, d), zero where the embedding needs none
    weights: jax.Array  # (capacity,)
    count: jax.Array  # how many are in use

class Embedding:
    "Contract: mu_p at points, its gradient, and the double integral of the kernel (NaN where unknown)."
    fixed = True  # mu_p does not depend on the particles
    evaluations_per_gradient = 0  # target evaluations that one candidate's gradient takes
    double_integral = jnp.nan  # E k(x, x') over two independent draws from p
    error2 = 0.0  # expected squared error |mu_hat - mu_p|^2 of the embedding itself

    def mean(self, points, particles): raise NotImplementedError  # (m, d) -> (m,)
    def pool(self, key, num): return None  # (num, d) places worth starting an oracle from, where known
    def mean_gradient(self, points, particles):  # (m, d) -> (m, d)
        return jax.grad(lambda x: jnp.sum(self.mean(x, particles)))(points)

@pytree_dataclass
class ExactRBF(Embedding):
    "mu_p of a Gaussian mixture under the RBF kernel, in closed form."
    kernel: RBF
    mixture: GaussianMixture
    double_integral: Any

    def mean(self, points, particles=None):
        smooth = smoothed(self.mixture, self.kernel.lengthscale)
        return jnp.exp(jax.vmap(smooth.logdensity)(points)) * rbf_volume(self.kernel.lengthscale, points.shape[1])
    def pool(self, key, num): return self.mixture.sample(key, num)

def rbf_volume(lengthscale, d: int):
    "The integral of exp(-r^2 / 2) over space."
    return jnp.prod(jnp.broadcast_to(jnp.asarray(lengthscale) * jnp.sqrt(2 * jnp.pi), (d,)))

def smoothed(mixture: GaussianMixture, lengthscale) -> GaussianMixture:
    "The mixture convolved with a normal distribution of the kernel's lengthscale."
    d = mixture.means.shape[1]
    extra = jnp.diag(jnp.broadcast_to(jnp.asarray(lengthscale) ** 2, (d,)))
    covariances = jnp.einsum("kij,klj->kil", mixture.roots, mixture.roots) + extra
    return GaussianMixture(mixture.weights, mixture.means, jnp.linalg.cholesky(covariances))

@pytree_dataclass
class FeatureEmbedding(Embedding):
    "mu_p as one vector of features: for kernels of finite dimension."
    kernel: RandomFourier
    mean_features: Any  # (2D,)
    mixture: Any  # the target, as a place to look for starts
    double_integral: Any

    def mean(self, points, particles=None): return self.kernel.features(points) @ self.mean_features
    def pool(self, key, num): return self.mixture.sample(key, num)

def rbf_double_integral(kernel: RBF, mixture: GaussianMixture) -> jax.Array:
    "E k(x, x') over two draws: each pair of components is a normal density of their difference."
    smooth = smoothed(mixture, kernel.lengthscale)
    def pair(mean, root, other_mean, other_root):
        return log_normal(mean, other_mean, jnp.linalg.cholesky(root @ root.T + other_root @ other_root.T))
    row = lambda mean, root: jax.vmap(pair, (None, None, 0, 0))(mean, root, mixture.means, mixture.roots)
    pairs = jnp.exp(jax.vmap(row)(smooth.means, smooth.roots))
    return rbf_volume(kernel.lengthscale, mixture.means.shape[1]) * (mixture.weights @ pairs @ mixture.weights)

def exact_embedding(
    kernel,  # RBF or RandomFourier
    mixture: GaussianMixture,  # the target
) -> Embedding:
    "The closed-form embedding of a Gaussian mixture."
    if isinstance(kernel, RBF):
        return ExactRBF(kernel, mixture, rbf_double_integral(kernel, mixture))
    if isinstance(kernel, RandomFourier):
        features = characteristic_features(kernel, mixture)
        return FeatureEmbedding(kernel, features, mixture, features @ features)
    raise ValueError(f"no closed form for {type(kernel).__name__} under a Gaussian mixture; RBF and RandomFourier have one")

def characteristic_features(kernel: RandomFourier, mixture: GaussianMixture) -> jax.Array:  # (2D,)
    "E cos(f . x) and E sin(f . x): damped cosines and sines of the component means."
    spread = jnp.einsum("kij,fi->kfj", mixture.roots, kernel.frequencies)
    damping = jnp.exp(-0.5 * jnp.sum(spread**2, -1))
    angles = mixture.means @ kernel.frequencies.T
    parts = jnp.concatenate([mixture.weights @ (damping * jnp.cos(angles)), mixture.weights @ (damping * jnp.sin(angles))])
    return parts / jnp.sqrt(len(kernel.frequencies))

@pytree_dataclass
class ReferenceEmbedding(Embedding):
    "mu_p as the kernel mean of a weighted reference set: draws, or an importance cloud."
    kernel: Kernel
    points: Any  # (m, d)
    features: Any
    weights: Any  # (m,)
    own_means: Any  # (m,): the embedding at its own points
    double_integral: Any
    error2: Any

    def mean(self, points, particles=None):
        return kernel_mean(self.kernel, self.kernel.features(points), self.features, self.weights)
    def pool(self, key, num): return self.points

def reference_embedding(
    kernel: Kernel,
    points,  # (m, d): draws from the target, or importance points
    weights=None,  # (m,), uniform if None; scaled to sum to one
    effective_size=None,  # how many independent draws the set is worth, from its weights if None
) -> ReferenceEmbedding:
    "An embedding from a weighted set, its double integral and its own expected error."
    points = check_points("points", points)
    weights = check_weights("weights", weights, len(points)).astype(points.dtype)
    if bool(jnp.any(weights < 0)) or not bool(jnp.sum(weights) > 0): raise ValueError("reference weights must be at least zero, with a positive sum")
    weights = weights / jnp.sum(weights)
    features = kernel.features(points)
    own = jax.jit(kernel_mean)(kernel, features, features, weights)
    effective = 1.0 / jnp.sum(weights**2) if effective_size is None else effective_size
    double = weights @ own
    error2 = jnp.maximum(weights @ kernel.diagonal(features) - double, 0.0) / effective
    return ReferenceEmbedding(kernel, points, features, weights, own, double, error2)

@pytree_dataclass
class SteinEmbedding(Embedding):
    "mu_p of a Stein kernel: zero everywhere, with nothing to estimate."
    double_integral: Any = 0.0

    def mean(self, points, particles=None): return jnp.zeros(len(points), points.dtype)
    def mean_gradient(self, points, particles=None): return jnp.zeros_like(points)

@pytree_dataclass
class ParticleEmbedding(Embedding):
    "The paper's: expectations under p replaced by sums over the particles found so far."
    kernel: Kernel
    score_fn: Callable = field(metadata=dict(static=True))
    own_term: str = field(default="included", metadata=dict(static=True))  # "left out" (Eq. 5), "included", "alone"
    fixed = False

    def __post_init__(self):
        check_choice("own_term", self.own_term, ("left out", "included", "alone"))
        if not getattr(self.kernel, "stationary", True): raise ValueError(f"the particle embedding needs a kernel of x - y; {type(self.kernel).__name__} is none")
    @property
    def evaluations_per_gradient(self): return 0 if self.own_term == "left out" else 1
    def mean(self, points, particles):
        active = uniform_weights(particles)
        return kernel_mean(self.kernel, self.kernel.features(points), particles.features, active)
    def mean_gradient(self, points, particles): return particle_gradient(self, points, particles)

def uniform_weights(particles: Particles) -> jax.Array:
    "1 / n for the particles in use, zero for the rest."
    capacity = len(particles.weights)
    return jnp.where(jnp.arange(capacity) < particles.count, 1.0 / particles.count, 0.0).astype(particles.weights.dtype)

def particle_gradient(embedding: ParticleEmbedding, points: jax.Array, particles: Particles) -> jax.Array:  # (m, d)
    "Eq. 5's estimate of the gradient of mu_p, its sign put right, with the candidate's own term on request."
    features = embedding.kernel.features(points)
    gram = embedding.kernel.gram(features, particles.features) * (uniform_weights(particles) > 0)
    n = particles.count.astype(points.dtype)
    if embedding.own_term == "left out": return gram @ particles.score / n
    own = jax.vmap(embedding.score_fn)(points)
    peak = embedding.kernel.diagonal(features)[:, None]
    if embedding.own_term == "included": return (gram @ particles.score + peak * own) / (n + 1)
    return (jnp.sum(gram, 1, keepdims=True) + peak) * own / (n + 1)
