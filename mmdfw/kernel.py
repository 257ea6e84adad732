from dataclasses import field
from typing import Any, Callable, NamedTuple
import jax, jax.numpy as jnp, optax
from mmdfw.checks import check_count, check_positive, pytree_dataclass

def squared_distances(
    x: jax.Array,  # (n, d)
    y: jax.Array,  # (m, d)
) -> jax.Array:  # (n, m)
    "All |x_i - y_j|^2 by one matrix product; a common shift first keeps float32 digits."
    centre = jax.lax.stop_gradient(jnp.mean(y, axis=0))
    x, y = x - centre, y - centre
    cross = jnp.matmul(x, y.T, precision="highest")
    return jnp.maximum(jnp.sum(x**2, 1)[:, None] + jnp.sum(y**2, 1)[None, :] - 2 * cross, 0.0)

class Kernel:
    "Contract: a value for one pair; features once per point; a Gram matrix of two sets of features."
    stationary = False  # k(x, y) depends on x - y alone
    evaluations_per_point = 0  # target evaluations that the features of one point take

    def __call__(self, x, y): raise NotImplementedError  # (d,), (d,) -> scalar
    def features(self, points): return points  # (n, d) -> a pytree of arrays of length n
    def gram(self, features_x, features_y): raise NotImplementedError  # -> (n, m)
    def matrix(self, x, y): return self.gram(self.features(x), self.features(y))  # (n, d), (m, d) -> (n, m)
    def diagonal(self, features):  # (n,): k(x_i, x_i)
        each = jax.tree.map(lambda leaf: leaf[:, None], features)
        return jax.vmap(lambda one: self.gram(one, one)[0, 0])(each)

class Radial(Kernel):
    "A kernel radial(r^2) of the scaled distance r^2 = sum_j (x_j - y_j)^2 / lengthscale_j^2."
    stationary = True

    def __post_init__(self): check_positive("lengthscale", self.lengthscale)
    def __call__(self, x, y): return self.radial(jnp.sum(((x - y) / self.lengthscale) ** 2))
    def features(self, points): return points / self.lengthscale
    def gram(self, features_x, features_y): return self.radial(squared_distances(features_x, features_y))
    def diagonal(self, features): return jnp.full(len(features), self.radial(jnp.zeros((), features.dtype)))

@pytree_dataclass
class RBF(Radial):
    "exp(-r^2 / 2)"
    lengthscale: Any = 1.0  # scalar, or (d,) for one per dimension

    def radial(self, r2): return jnp.exp(-r2 / 2)

@pytree_dataclass
class IMQ(Radial):
    "(offset^2 + r^2)^beta, positive definite for beta below zero"
    lengthscale: Any = 1.0  # scalar or (d,)
    offset: Any = 1.0  # c
    beta: Any = -0.5  # in (-1, 0)

    def __post_init__(self):
        super().__post_init__()
        check_positive("offset", self.offset)
        check_exponent(self.beta)
    def radial(self, r2): return (self.offset**2 + r2) ** self.beta

def check_exponent(beta):
    "IMQ kernels take beta in (-1, 0); the paper's +0.5 is not positive definite."
    if isinstance(beta, jax.core.Tracer) or -1 < beta < 0: return
    raise ValueError(f"beta must lie in (-1, 0), got {beta!r}: other exponents give no useful positive definite kernel")

@pytree_dataclass
class InverseLog(Radial):
    "1 / (offset + log(1 + r^2))"
    lengthscale: Any = 1.0  # scalar or (d,)
    offset: Any = 1.0  # alpha

    def __post_init__(self):
        super().__post_init__()
        check_positive("offset", self.offset)
    def radial(self, r2): return 1.0 / (self.offset + jnp.log1p(r2))

@pytree_dataclass
class ScoreIMQ(Kernel):
    "IMQ on scores: (offset^2 + |s(x) - s(y)|^2 / lengthscale^2)^beta"
    score_fn: Callable = field(metadata=dict(static=True))  # (d,) -> (d,), the gradient of log p
    lengthscale: Any = 1.0  # on the scale of scores
    offset: Any = 1.0
    beta: Any = -0.5
    evaluations_per_point = 1

    def __post_init__(self):
        check_positive("lengthscale", self.lengthscale)
        check_exponent(self.beta)
    def radial(self, r2): return (self.offset**2 + r2) ** self.beta
    def __call__(self, x, y):
        return self.radial(jnp.sum(((self.score_fn(x) - self.score_fn(y)) / self.lengthscale) ** 2))
    def features(self, points): return jax.vmap(self.score_fn)(points) / self.lengthscale
    def gram(self, features_x, features_y): return self.radial(squared_distances(features_x, features_y))

@pytree_dataclass
class RandomFourier(Kernel):
    "mean over frequencies of cos(f . (x - y)): a kernel of finite dimension 2D"
    frequencies: Any  # (D, d)
    stationary = True

    def __call__(self, x, y): return jnp.mean(jnp.cos(self.frequencies @ (x - y)))
    def features(self, points):
        angles = jnp.matmul(points, self.frequencies.T, precision="highest")
        return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], 1) / jnp.sqrt(len(self.frequencies))
    def gram(self, features_x, features_y): return jnp.matmul(features_x, features_y.T, precision="highest")
    def diagonal(self, features): return jnp.sum(features**2, 1)

def random_fourier(
    key: jax.Array,
    num_frequencies: int,  # D
    dimension: int,  # d
    lengthscale=1.0,  # of the RBF kernel that it approximates; scalar or (d,)
) -> RandomFourier:
    "Frequencies drawn from the spectral density of the RBF kernel."
    check_count("num_frequencies", num_frequencies)
    check_count("dimension", dimension)
    check_positive("lengthscale", lengthscale)
    return RandomFourier(jax.random.normal(key, (num_frequencies, dimension)) / lengthscale)

class Scored(NamedTuple):
    "What a Stein kernel keeps of its points, so that each score is taken once."
    position: jax.Array  # (n, d)
    score: jax.Array  # (n, d)
    extra: Any = ()  # what the base kernel wants besides (Hessians, for ScoreIMQ)

def derivatives(f: Callable, t: jax.Array):
    "f, f' and f'' entry by entry."
    one = jnp.ones_like(t)
    first = lambda u: jax.jvp(f, (u,), (one,))
    (value, slope), (_, curvature) = jax.jvp(first, (t,), (one,))
    return value, slope, curvature

def stein_gram_radial(base: Radial, x: Scored, y: Scored) -> jax.Array:
    "Langevin Stein kernel over a radial base in four matrix products."
    inverse2 = jnp.broadcast_to(1.0 / jnp.asarray(base.lengthscale) ** 2, x.position.shape[-1:])
    centre = jax.lax.stop_gradient(jnp.mean(y.position, axis=0))
    px, py = (x.position - centre) * inverse2, (y.position - centre) * inverse2
    r2 = squared_distances(x.position / base.lengthscale, y.position / base.lengthscale)
    value, slope, curvature = derivatives(base.radial, r2)
    product = lambda a, b: jnp.matmul(a, b.T, precision="highest")
    along = product(px, y.score) + product(x.score, py) - jnp.sum(px * x.score, 1)[:, None] - jnp.sum(py * y.score, 1)
    return (value * product(x.score, y.score) + 2 * slope * (along - jnp.sum(inverse2))
            - 4 * curvature * squared_distances(px, py))

def stein_gram_fourier(base: RandomFourier, x: Scored, y: Scored) -> jax.Array:
    "Langevin Stein kernel over random Fourier features: matrix products of width 2D."
    product = lambda a, b: jnp.matmul(a, b.T, precision="highest")
    fx, fy = base.features(x.position), base.features(y.position)
    turn = lambda f: jnp.concatenate([-f[:, f.shape[1] // 2 :], f[:, : f.shape[1] // 2]], 1)
    both = lambda a: jnp.concatenate([a, a], 1)
    rate_x, rate_y = both(product(x.score, base.frequencies)), both(product(y.score, base.frequencies))
    square = both(jnp.sum(base.frequencies**2, 1)[None])
    return (product(fx, fy) * product(x.score, y.score) + product(fx * square, fy)
            + product(turn(fx), rate_y * fy) + product(fx * rate_x, turn(fy)))

def stein_gram_score(base: ScoreIMQ, x: Scored, y: Scored) -> jax.Array:
    "Langevin Stein kernel over IMQ on scores, one row at a time; `extra` holds the Hessians."
    scale = base.lengthscale
    def row(one):
        score, hessian = one
        gap = (score - y.score) / scale  # (m, d)
        value, slope, curvature = derivatives(base.radial, jnp.sum(gap**2, 1))
        pull_x = (gap / scale) @ hessian  # (m, d): gradient of r^2 / 2 in x
        pull_y = jnp.einsum("md,mde->me", gap / scale, y.extra)
        trace = jnp.einsum("de,mde->m", hessian / jnp.asarray(scale)[..., None] ** 2, y.extra)
        along = jnp.sum(pull_x * y.score, 1) - pull_y @ score
        return value * (y.score @ score) + 2 * slope * (along - trace) - 4 * curvature * jnp.sum(pull_x * pull_y, 1)
    return jax.lax.map(row, (x.score, x.extra))

def stein_gram_any(base: Kernel, x: Scored, y: Scored) -> jax.Array:
    "Langevin Stein kernel over any base by automatic differentiation, one row at a time: O(n m d^2), for small d."
    def pair(x, score_x, y, score_y):
        mixed = jnp.trace(jax.jacfwd(jax.grad(base, 0), 1)(x, y))
        slope_x, slope_y = jax.grad(base, (0, 1))(x, y)
        return mixed + slope_x @ score_y + slope_y @ score_x + base(x, y) * (score_x @ score_y)
    row = lambda one: jax.vmap(lambda *other: pair(*one, *other))(y.position, y.score)
    return jax.lax.map(row, (x.position, x.score))

@pytree_dataclass
class Stein(Kernel):
    "The Langevin Stein kernel of a target over a base kernel: its mean under the target is zero."
    base: Kernel  # any kernel above, or your own
    score_fn: Callable = field(metadata=dict(static=True))  # (d,) -> (d,), the gradient of log p
    evaluations_per_point = 1

    def features(self, points):
        extra = jax.vmap(jax.jacfwd(self.score_fn))(points) if isinstance(self.base, ScoreIMQ) else ()
        return Scored(points, jax.vmap(self.score_fn)(points), extra)
    def gram(self, features_x, features_y):
        for family, form in ((Radial, stein_gram_radial), (RandomFourier, stein_gram_fourier), (ScoreIMQ, stein_gram_score)):
            if isinstance(self.base, family): return form(self.base, features_x, features_y)
        return stein_gram_any(self.base, features_x, features_y)
    def __call__(self, x, y): return self.matrix(x[None], y[None])[0, 0]

def median_lengthscale(
    points: jax.Array,  # (n, d)
    divide_by_log: bool = True,  # h^2 = median(r^2) / (2 log(n + 1)), SVGD's rule; else h = median distance
    max_points: int = 200,  # distances are taken among at most this many, evenly spaced in the set
) -> jax.Array:
    "The median rule, diagonal left out; a set of equal points gets 1."
    n = len(points)
    some = points[:: -(-n // max_points)]
    rows, columns = jnp.triu_indices(len(some), 1)
    r2 = jnp.median(squared_distances(some, some)[rows, columns]) if len(some) > 1 else jnp.zeros((), points.dtype)
    h2 = r2 / (2 * jnp.log(n + 1.0)) if divide_by_log else r2
    return jnp.where(h2 > 0, jnp.sqrt(jnp.where(h2 > 0, h2, 1.0)), 1.0).astype(points.dtype)

def ksd_lengthscale(
    points: jax.Array,  # (n, d)
    score_fn: Callable,  # (d,) -> (d,)
    make_base: Callable = RBF,  # lengthscale -> kernel
    num_steps: int = 100,
    learning_rate: float = 0.05,  # in log h
    factor: float = 10.0,  # h stays within this factor of the median rule
) -> jax.Array:
    "The paper's third rule: gradient descent on KSD over log h, from the median rule."
    start = jnp.log(median_lengthscale(points))
    scored = Scored(points, jax.vmap(score_fn)(points))
    ksd2 = lambda log_h: jnp.mean(stein_gram_radial(make_base(jnp.exp(log_h)), scored, scored))
    optimizer = optax.adam(learning_rate)
    def body(carry, _):
        log_h, state = carry
        updates, state = optimizer.update(jax.grad(ksd2)(log_h), state)
        return (jnp.clip(log_h + updates, start - jnp.log(factor), start + jnp.log(factor)), state), None
    (log_h, _), _ = jax.lax.scan(body, (start, optimizer.init(start)), length=num_steps)
    return jnp.exp(log_h)

def lengthscale_from_gamma(gamma): return (0.5 / gamma) ** 0.5  # exp(-gamma r^2), as scikit-learn writes it
def lengthscale_from_blackjax(length_scale): return (length_scale / 2) ** 0.5  # exp(-r^2 / l), as BlackJAX writes it
