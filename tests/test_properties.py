"""What must hold of any input: hypothesis looks for the one for which it does not. The shapes are few."""

import ast, csv, json
from functools import cache, partial
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np, pandas as pd, pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

import mmdfw
from mmdfw import _saved
from mmdfw._summary import highest_density, summarise, systematic, weighted_quantiles
from mmdfw.data._read import load_file
from mmdfw.embeddings._embedding import reference_embedding
from mmdfw.embeddings._summaries import with_summaries
from mmdfw.kernels import (
    IMQ,
    RBF,
    InverseLog,
    MultiscaleRBF,
    ScoreIMQ,
    Stein,
    default_kernel,
    random_fourier,
)
from mmdfw.steps import BlendedPairwise, LineSearch, Quadrature
from mmdfw.steps._quadrature import grow_factor, jitted_reweigh
from mmdfw.steps._simplex_by_numpy import factor_of, grown_factor, weights_by_numpy
from mmdfw.steps._step import System

N, D, M = 8, 3, 40  # particles, dimensions, points of a reference set
PRECISIONS = ("float32", "float64")
few = partial(
    settings, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=False
)


def numbers(width=32, reach=8.0):
    return st.floats(-reach, reach, width=width, allow_subnormal=False)


def sets(n=N, d=D, reach=8.0):
    "Points of any kind: equal ones, lattices, some far away, all in single precision so that both types hold them."
    return arrays(np.float32, (n, d), elements=numbers(32, reach))


def shares(n=N):
    "Probabilities, many of them zero."
    raw = arrays(np.float64, n, elements=st.one_of(st.just(0.0), st.floats(1e-6, 1.0)))
    return raw.filter(lambda w: w.sum() > 1e-3).map(lambda w: w / w.sum())


scales = st.floats(0.05, 20.0).map(np.float32)


def eps_of(dtype):
    return float(np.finfo(dtype).eps)


def each_precision(test):
    return pytest.mark.parametrize("precision", PRECISIONS)(test)


def quartic_score(x):
    return -x - 0.1 * x**3


KERNELS = {
    "rbf": lambda h, x: RBF(h),
    "rbf ard": lambda h, x: RBF(h * jnp.asarray([0.5, 1.0, 3.0], x.dtype)),
    "imq": lambda h, x: IMQ(h),
    "inverse log": lambda h, x: InverseLog(h),
    "fourier": lambda h, x: random_fourier(jax.random.key(1), 20, D, h),
    "score imq": lambda h, x: ScoreIMQ(quartic_score, h),
    "multiscale": lambda h, x: MultiscaleRBF(1.0, h, np.full(4, 0.25)),
    "default": lambda h, x: default_kernel(h * x),
    "stein rbf": lambda h, x: Stein(RBF(h), quartic_score),
    "stein imq": lambda h, x: Stein(IMQ(h), quartic_score),
    "stein inverse log": lambda h, x: Stein(InverseLog(h), quartic_score),
    "stein fourier": lambda h, x: Stein(random_fourier(jax.random.key(1), 20, D, h), quartic_score),
    "stein score imq": lambda h, x: Stein(ScoreIMQ(quartic_score, h), quartic_score),
}


def summarised(h, x):
    "What refinement minimises: the default kernel, with moments and marginals read off the same set."
    kernel = default_kernel(h * x)
    return with_summaries(kernel, reference_embedding(kernel, h * x))[0]


KERNELS["with summaries"] = summarised


def of_default(kernel, points, largest):
    "How far rounding may move the entries of the default kernel's Gram matrix, with summaries or without."
    kernel = getattr(kernel, "base", kernel)
    narrowest = float(kernel.widest) * 0.5 ** (np.count_nonzero(kernel.shares) - 1)
    reach = np.max(np.sum(np.asarray(kernel.features(points), float) ** 2, 1))
    return 30 * eps_of(points.dtype) * (1 + reach / narrowest**2 + largest * (1 + reach))


def rounding(name, x, h, dtype):
    "How far rounding may move the entries of a Gram matrix: what the largest number on the way is, in units of eps."
    x = x.astype(float)
    r = np.max(np.abs(x - x.mean(0)))
    size = 1 + (r / (0.5 * h)) ** 2 if "score" not in name else 1 + (np.max(np.abs(quartic_score(x))) / h) ** 2
    if name == "multiscale":
        size *= 64
    if name.startswith("stein"):
        slope = np.max(np.abs(1 + 0.3 * x**2)) if "score" in name else 1.0
        size *= (1 + D * np.max(np.abs(quartic_score(x))) + D * slope / min(h, 1.0)) ** 2
    return 30 * eps_of(dtype) * size


@each_precision
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_are_positive_semidefinite_and_symmetric(name, precision):
    @few(max_examples=12)
    @given(sets(), scales)
    def check(x, h):
        with jax.enable_x64(precision == "float64"):
            x = jnp.asarray(x, precision)
            kernel = KERNELS[name](h, x)
            of_set = name in ("default", "with summaries")
            points = h * x if of_set else x
            found = np.asarray(kernel.matrix(points, points), float)
            most = rounding(name, np.asarray(x), float(h), precision)
            most = of_default(kernel, points, np.max(np.abs(found))) if of_set else most
            assert np.isfinite(found).all()
            assert np.max(np.abs(found - found.T)) <= most
            assert np.linalg.eigvalsh((found + found.T) / 2)[0] >= -N * most
            diagonal = np.asarray(kernel.diagonal(kernel.features(points)), float)
            assert np.max(np.abs(diagonal - np.diagonal(found))) <= most

    check()


# MMD ------------------------------------------------------------------------------------------------------------------

STATIONARY = [name for name in KERNELS if name.startswith(("rbf", "imq", "inverse", "fourier", "multiscale"))]
lattice = st.integers(-256, 256).map(lambda i: i / 32)  # exact in both types, also after a shift by whole numbers


@each_precision
@pytest.mark.parametrize("name", ["rbf", "imq", "multiscale", "fourier", "stein imq"])
def test_mmd_is_symmetric_and_zero_on_itself_in_any_order(name, precision):
    @few(max_examples=10)
    @given(sets(), sets(), shares(), shares(), scales, st.permutations(range(N)))
    def check(x, y, w, v, h, order):
        with jax.enable_x64(precision == "float64"):
            x, y, w, v = (jnp.asarray(array, precision) for array in (x, y, w, v))
            kernel, order = KERNELS[name](h, x), np.array(order)
            most = N * rounding(name, np.concatenate([x, y]), float(h), precision)
            there, back = mmdfw.mmd2(kernel, x, y, w, v), mmdfw.mmd2(kernel, y, x, v, w)
            assert float(there) >= 0 and abs(float(there - back)) <= most
            assert float(mmdfw.mmd2(kernel, x, x[order], w, w[order])) <= most
            assert abs(float(mmdfw.mmd2(kernel, x[order], y, w[order], v) - there)) <= most

    check()


@each_precision
@pytest.mark.parametrize("name", STATIONARY)
def test_kernels_of_the_difference_do_not_care_where_the_origin_is(name, precision):
    @few(max_examples=6)
    @given(arrays(np.float32, (N, D), elements=lattice), st.integers(-1000, 1000), scales)
    def check(x, shift, h):
        with jax.enable_x64(precision == "float64"):
            x = jnp.asarray(x, precision)
            kernel = KERNELS[name](h, x)
            there, here = np.asarray(kernel.matrix(x + shift, x + shift)), np.asarray(kernel.matrix(x, x))
            most = rounding(name, np.asarray(x), float(h), precision)
            if name == "fourier":  # features are of the points, not of their differences
                most *= 1 + abs(shift) * np.max(np.abs(kernel.frequencies))
            assert np.max(np.abs(there - here)) <= most

    check()


def affine_maps():
    "Rotation, stretching by up to 30 either way, rotation, and a shift."
    square = arrays(np.float64, (D, D), elements=st.floats(-1, 1))
    stretch = arrays(np.float64, D, elements=st.floats(-1.5, 1.5))
    orthogonal = lambda a: np.linalg.qr(a + 2 * np.eye(D))[0]
    made = lambda a, s, b: orthogonal(a) @ np.diag(10**s) @ orthogonal(b)
    return st.builds(made, square, stretch, square), arrays(np.float64, D, elements=st.floats(-100, 100))


@each_precision
def test_the_default_kernel_promises_affine_maps(precision):
    @few(max_examples=25)
    @given(arrays(np.float64, (M, D), elements=st.floats(-3, 3)), *affine_maps())
    def check(x, stretch, shift):
        x = x + np.random.default_rng(0).normal(size=(M, D))  # so that no map of them is flat
        with jax.enable_x64(precision == "float64"):
            here, there = (jnp.asarray(points, precision) for points in (x, x @ stretch.T + shift))
            own, mapped = default_kernel(here), default_kernel(there)
            least = np.linalg.svd(stretch)[1][-1]
            most = 300 * eps_of(precision) * (1 + np.max(np.abs(shift))) * (1 + np.max(np.abs(there)) / least)
            assert np.max(np.abs(own.matrix(here, here) - mapped.matrix(there, there))) <= most
            half = M // 2
            apart = [mmdfw.mmd2(k, p[:half], p[half:]) for k, p in ((own, here), (mapped, there))]
            assert abs(float(apart[0] - apart[1])) <= most

    check()


@few(max_examples=25)
@given(sets(6), arrays(np.float64, D, elements=st.floats(-4, 4)), st.permutations(range(D)))
def test_a_small_set_still_does_not_care_for_units_and_order_of_columns(x, powers, order):
    x = x + np.random.default_rng(0).normal(size=x.shape)
    moved = (x * 10**powers)[:, np.array(order)]
    with jax.enable_x64(True):
        here, there = (default_kernel(points).matrix(points, points) for points in (x, moved))
    assert np.max(np.abs(here - there)) < 1e-9


# Step rules -----------------------------------------------------------------------------------------------------------

RULES = {
    "line search": LineSearch(),
    "shorter": LineSearch(0.5),
    "longer": LineSearch(1.9),
    "pairwise": BlendedPairwise(5),
    "free": Quadrature("free"),
    "sum to one": Quadrature("sum_to_one"),
    "simplex": Quadrature("simplex"),
}


@jax.jit
def grown(gram):
    "The Cholesky factor, one row after another, and the jitter of each."
    step = lambda factor, i: grow_factor(factor, jnp.where(jnp.arange(N) < i, gram[i], 0.0), gram[i, i], i)
    return jax.lax.scan(step, jnp.eye(N, dtype=gram.dtype), jnp.arange(N))


ruled = jax.jit(lambda rule, system: rule(system)[0])


def problem(x, y, h, precision):
    "Gram matrix, kernel means and double integral of a set and a reference set, rounded to a precision."
    r2 = lambda a, b: np.sum((a[:, None] - b).astype(float) ** 2, -1) / float(h) ** 2
    near = lambda a, b: np.exp(-r2(a, b) / 2)
    return *(near(x, z).astype(precision) for z in (x, y)), near(y, y).mean()


@each_precision
@pytest.mark.parametrize("name", RULES)
def test_rules_that_descend_never_raise_mmd(name, precision):
    @few(max_examples=20)
    @given(sets(), sets(M), shares(N - 1), scales)
    def check(x, y, before, h):
        gram, means, _ = problem(x, y, h, precision)
        means, before = means.mean(1), np.append(before, 0.0).astype(precision)
        with jax.enable_x64(precision == "float64"):
            factor, _ = grown(gram)
            after = ruled(RULES[name], System(before, gram, means, factor, np.int32(N - 1), np.int32(N)))
        wide = [np.asarray(array, float) for array in (gram, means, before, after)]
        mmd2 = lambda w: w @ wide[0] @ w - 2 * w @ wide[1]
        largest = max(1.0, np.sum(np.abs(wide[3]))) ** 2
        assert np.isfinite(wide[3]).all()
        assert mmd2(wide[3]) <= mmd2(wide[2]) + 100 * N * eps_of(precision) * largest
        if RULES[name].sums_to_one:
            assert abs(np.sum(wide[3]) - 1) <= 100 * N * eps_of(precision) * largest

    check()


@each_precision
def test_the_grown_factor_is_a_fresh_one(precision):
    @few(max_examples=40)
    @given(sets(), scales)
    def check(x, h):
        gram = problem(x, x, h, precision)[0]
        eps = eps_of(precision)
        with jax.enable_x64(precision == "float64"):
            factor, jitters = (np.asarray(array, float) for array in grown(gram))
        by_numpy, also = np.zeros((0, 0)), []
        for i in range(N):
            by_numpy, jitter = grown_factor(by_numpy, gram[i, :i].astype(float), float(gram[i, i]), eps)
            also.append(jitter)
        for found, added, rounded in ((factor, jitters, eps), (by_numpy, np.array(also), eps_of("float64"))):
            raised = gram.astype(float) + np.diag(added)
            assert np.isfinite(found).all() and np.all(np.diagonal(found) > 0) and np.all(added >= 0)
            assert np.max(np.abs(found @ found.T - raised)) <= 100 * N * rounded
            fresh = np.linalg.cholesky(raised)
            assert np.max(np.abs(found - fresh)) <= 100 * N * rounded * np.linalg.cond(raised)
        if not np.any(also):
            assert np.max(np.abs(by_numpy - np.linalg.cholesky(gram.astype(float)))) <= 1e-8
        whole = factor_of(gram.astype(float), eps)
        assert whole is not None and np.max(np.abs(whole @ whole.T - gram)) <= 11 * N * eps

    check()


def gap_of(weights, gram, means):
    "How much moving all weight to one particle promises at most: zero at the optimum on the simplex, by KKT."
    slope = gram @ weights - means
    return weights @ slope - slope.min()


@each_precision
def test_simplex_weights_are_probabilities_and_optimal_in_both_solvers(precision):
    @few(max_examples=60)
    @given(sets(), sets(M), shares(), scales)
    def check(x, y, start, h):
        gram, means, _ = problem(x, y, h, precision)
        means, eps = means.mean(1), eps_of(precision)
        wide = gram.astype(float), means.astype(float)
        with jax.enable_x64(precision == "float64"):
            rule = Quadrature("simplex")
            factor = grown(gram)[0]
            compiled = jitted_reweigh(rule, gram, means, factor, start.astype(precision), np.int32(N))
        by_numpy = weights_by_numpy("simplex", *wide, np.asarray(factor, float), start, eps)
        value = []
        for w in (np.asarray(compiled, float), by_numpy):
            assert np.isfinite(w).all() and w.min() >= 0 and abs(w.sum() - 1) <= 4 * N * eps
            assert gap_of(w, *wide) <= 300 * N * eps, "KKT"
            value.append(w @ wide[0] @ w - 2 * w @ wide[1])
        assert abs(value[0] - value[1]) <= 600 * N * eps

    check()


# Files ----------------------------------------------------------------------------------------------------------------

kinds = st.sampled_from(["<f4", "<f8", "<f2", ">f8", "<i4", "|u1", "|b1", "<c8", "<U3"])
plain_arrays = kinds.flatmap(
    lambda kind: arrays(np.dtype(kind), array_shapes(min_dims=0, max_dims=3, max_side=3, min_side=0))
)
device_arrays = arrays(np.float32, st.sampled_from([(), (0,), (2, 3)])).map(jnp.asarray)
keys = st.integers(0, 99).flatmap(
    lambda i: st.sampled_from(["threefry2x32", "rbg"]).map(lambda k: jax.random.key(i, impl=k))
)
words = st.one_of(st.text(max_size=4), st.sampled_from(["a", "a.b", "b", "array", "../x", "/", "0", "key", "", "A"]))
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), plain_arrays, device_arrays, keys
)
below = lambda inner: st.one_of(
    st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), st.dictionaries(words, inner, max_size=3)
)
trees = st.dictionaries(words, st.recursive(leaves, below, max_leaves=6), max_size=4)


def same(one, other):
    "Equal in type, form and every bit."
    if type(one) is dict:
        return type(other) is dict and list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if type(one) in (list, tuple):
        return type(other) is type(one) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, jax.Array) and jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
        alike = jax.random.key_impl(one) == jax.random.key_impl(other)
        return alike and np.array_equal(jax.random.key_data(one), jax.random.key_data(other))
    if isinstance(one, (jax.Array, np.ndarray)):
        alike = isinstance(other, jax.Array) == isinstance(one, jax.Array) and one.dtype == other.dtype
        return alike and one.shape == other.shape and np.asarray(one).tobytes() == np.asarray(other).tobytes()
    return type(one) is type(other) and (one == other or one != one and other != other)


def test_any_tree_comes_back_from_a_file(tmp_path):
    @few(max_examples=150)
    @given(trees)
    def check(tree):
        path = _saved.write_tree(tmp_path / "tree.npz", tree, {})
        assert same(_saved.read_tree(*_saved.read_header(path), {}, path), tree)

    check()


cells = st.floats(allow_nan=False, allow_infinity=False, width=64)
titles = st.text("abcxyz ßé_.-()\"',;", min_size=1, max_size=6).filter(lambda t: t.strip() and t == t.strip())


def tables():
    "Column names, all different, and a table of numbers under them."
    names = st.lists(titles, min_size=2, max_size=4, unique=True)
    return names.flatmap(
        lambda n: st.tuples(st.just(n), arrays(np.float64, (4, len(n)), elements=cells, fill=st.nothing()))
    )


@pytest.mark.parametrize("writer", ["csv", "pandas"])
def test_any_table_comes_back_from_a_csv(writer, tmp_path):
    @few(max_examples=80)
    @given(tables(), st.integers(0, 3))
    def check(table, at):
        names, values = table
        at = at % len(names)
        path = tmp_path / "table.csv"
        if writer == "pandas":
            pd.DataFrame(values, columns=names).to_csv(path, index=False)
        else:
            with open(path, "w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([names, *values.tolist()])
        read = load_file(path, names[at])
        assert (*read.columns[:at], read.target, *read.columns[at:]) == tuple(names)
        assert np.array_equal(np.insert(read.x, at, read.y, 1), values)

    check()


# What is read off weighted particles ----------------------------------------------------------------------------------


@few(max_examples=150)
@given(shares(12), st.integers(1, 1000), st.floats(0, 1, exclude_max=True))
def test_systematic_draws_keep_each_count_within_one(w, num, offset):
    counts = np.bincount(systematic(w, num, offset), minlength=12)
    assert counts.sum() == num and np.all(counts[w == 0] == 0)
    assert np.max(np.abs(counts - num * w)) <= 1 + 1e-9


values_of = arrays(np.float64, (12, 2), elements=st.floats(-1e6, 1e6))
levels_of = st.lists(st.floats(0, 1), min_size=2, max_size=6).map(sorted)


@few(max_examples=150)
@given(values_of, shares(12), levels_of, st.permutations(range(12)))
def test_quantiles_rise_stay_within_what_has_weight_and_know_no_order(values, w, levels, order):
    found = weighted_quantiles(values, w, levels)
    heavy = values[w > 0]
    assert np.all(np.diff(found, axis=0) >= 0)
    assert np.all(found >= heavy.min(0)) and np.all(found <= heavy.max(0))
    order = np.array(order)
    # equal values in another order have other partial sums, which round otherwise
    assert np.allclose(weighted_quantiles(values[order], w[order], levels), found, rtol=1e-9, atol=1e-6)


@few(max_examples=150)
@given(values_of, shares(12), st.floats(0.01, 0.99))
def test_intervals_lie_within_what_has_weight_and_hold_their_mass(values, w, mass):
    low, high = highest_density(values, w, mass)
    heavy = values[w > 0]
    assert np.all(low <= high) and np.all(low >= heavy.min(0)) and np.all(high <= heavy.max(0))
    heaviest = w.max()
    for column, a, b in zip(values.T, low, high):  # up to one step at either end
        assert w[(column >= a - 1e-9 * abs(a)) & (column <= b + 1e-9 * abs(b))].sum() >= mass - 2 * heaviest - 1e-9


@few(max_examples=100)
@given(values_of, shares(12))
def test_particles_without_weight_do_not_matter(values, w):
    moved = np.where(w[:, None] > 0, values, -1e9)
    some = w > 0
    for other in (summarise(moved, w), summarise(values[some], w[some])):
        assert all(np.allclose(summarise(values, w)[name], other[name], rtol=1e-9, atol=1e-6) for name in other.columns)


# How exact: the factors that the page on sharp bits states ------------------------------------------------------------


@cache
def stated():
    "What the page says of each function's error."
    page = json.loads((Path(__file__).parent.parent / "nbs/guides/30_sharp_bits.ipynb").read_text(encoding="utf-8"))
    source = next(text for cell in page["cells"] if (text := "".join(cell["source"])).startswith("FACTORS = "))
    return ast.literal_eval(source.partition("= ")[2])


LONG = np.longdouble  # more digits than either, where the machine has them
RADIAL = {
    "rbf": (RBF, lambda r2: np.exp(-r2 / 2), 1),
    "imq": (IMQ, lambda r2: (1 + r2) ** LONG(-0.5), 1),
    "inverse log": (InverseLog, lambda r2: 1 / (1 + np.log1p(r2)), 1),
    "multiscale": (
        lambda h: MultiscaleRBF(1.0, h, np.full(4, 0.25)),
        lambda r2: sum(np.exp(-(4**j) * r2 / 2) for j in range(4)) / 4,
        64,
    ),
}


def exact_distances(x, y, h):
    return np.sum(((x[:, None].astype(LONG) - y) / LONG(h)) ** 2, -1)


@each_precision
@pytest.mark.parametrize("name", RADIAL)
def test_kernels_and_mmd_are_as_exact_as_stated(name, precision):
    make, radial, narrow = RADIAL[name]

    @few(max_examples=20)
    @given(sets(), sets(), shares(), shares(), scales)
    def check(x, y, w, v, h):
        w, v = (array.astype(np.float32) for array in (w, v))
        gram = lambda a, b: radial(exact_distances(a, b, h))
        middle = y.astype(float).mean(0)
        reach = max(np.sum((points - points.astype(float).mean(0)) ** 2, 1).max() for points in (x, y))
        reach = max(reach, np.sum((x - middle) ** 2, 1).max(), np.sum((y - x.astype(float).mean(0)) ** 2, 1).max())
        s = D * (1 + narrow * reach / float(h) ** 2) * eps_of(precision)
        near = lambda found, exact, of, unit: np.max(np.abs(np.asarray(found, LONG) - exact)) <= stated()[of] * unit
        with jax.enable_x64(precision == "float64"):
            a, b, u, z = (jnp.asarray(array, precision) for array in (x, y, w, v))
            kernel = make(h)
            if name == "rbf":
                found = mmdfw.kernels.squared_distances(a / h, b / h)
                assert near(found, exact_distances(x, y, h), "squared_distances", s)
            assert near(kernel.matrix(a, b), gram(x, y), "matrix", s)
            total = float(np.sum(w) + np.sum(v))
            exact = w @ gram(x, x) @ w - 2 * w @ gram(x, y) @ v + v @ gram(y, y) @ v
            assert near(mmdfw.mmd2(kernel, a, b, u, z), exact, "mmd2", s * total**2)
            seen = gram(y, x) @ w - gram(y, y) @ v
            assert near(mmdfw.witness(kernel, b, a, b, u, z), seen, "witness", s * total)
            embedding = reference_embedding(kernel, b)
            even = np.full(N, LONG(1) / N)
            exact = w @ gram(x, x) @ w - 2 * w @ gram(x, y) @ even + even @ gram(y, y) @ even
            assert near(mmdfw.mmd2_to(embedding, a, u), exact, "mmd2_to", s * total**2)

    check()


@each_precision
def test_ksd_is_as_exact_as_stated(precision):
    @few(max_examples=20)
    @given(sets(), shares(), scales)
    def check(x, w, h):
        w, wide, h2 = w.astype(np.float32), x.astype(LONG), LONG(h) ** 2
        score, r2 = -wide, exact_distances(x, x, h)
        apart = wide[:, None] - wide
        along = np.einsum("ijd,ijd->ij", apart, score[:, None] - score) / h2
        exact = np.exp(-r2 / 2) * (score @ score.T + along + D / h2 - r2 / h2)
        reach = np.sum((wide - wide.mean(0)) ** 2, 1).max() / h2
        unit = D * (1 + reach) * eps_of(precision) * np.sum(w) ** 2 * np.max(np.diagonal(exact))
        with jax.enable_x64(precision == "float64"):
            kernel = Stein(RBF(jnp.asarray(h, precision)), minus)
            found = mmdfw.ksd2(kernel, jnp.asarray(x, precision), jnp.asarray(w, precision))
        assert abs(LONG(found) - w @ exact @ w) <= stated()["ksd2"] * unit

    check()


def minus(x):
    return -x


def best_on_simplex(gram, means, start):
    "The smallest w'Kw - 2w'z on the simplex: by away steps in more digits, from a good start; a lower bound."
    value = start @ gram @ start - 2 * start @ means
    return value - 2 * max(gap_of(start, gram, means), 0.0)  # convex: the gap bounds what is left


@each_precision
def test_quadrature_loses_no_more_than_stated(precision):
    "Against weights found in float64 for the same numbers, and the lower bound that their duality gap gives."

    @few(max_examples=20)
    @given(sets(), sets(M), scales)
    def check(x, y, h):
        gram, means, _ = problem(x, y, h, precision)
        means, even = means.mean(1), np.full(N, 1 / N)
        wide, eps = (gram.astype(float), means.astype(float)), np.finfo(float).eps
        with jax.enable_x64(precision == "float64"):
            rule, start = Quadrature("simplex"), even.astype(precision)
            found = np.asarray(jitted_reweigh(rule, gram, means, grown(gram)[0], start, np.int32(N)), float)
        sharp = weights_by_numpy("simplex", *wide, factor_of(wide[0], eps), even, eps)
        bound = max(best_on_simplex(*wide, found), best_on_simplex(*wide, sharp))
        lost = found @ wide[0] @ found - 2 * found @ wide[1] - bound
        assert lost <= stated()["quadrature"] * N * eps_of(precision)

    check()


@few(max_examples=100)
@given(values_of, shares(12), levels_of)
def test_summaries_are_as_exact_as_stated(values, w, levels):
    found = summarise(values, w, levels=(0.25, 0.5))
    exact, heavy = np.sum(values.astype(LONG) * w[:, None], 0), values[w > 0]
    tiny = np.finfo(float).tiny  # below it there are fewer digits
    unit = np.maximum(np.finfo(float).eps * np.max(np.abs(heavy), 0), tiny)
    assert np.all(np.abs(found["mean"] - exact) <= stated()["expectation"] * 12 * unit)
    for level in (0.25, 0.5):
        for j, column in enumerate(values.T):
            if len(np.unique(column[w > 0])) < np.sum(w > 0):
                continue  # equal values are another test's
            order = np.argsort(column[w > 0])
            places, mass = column[w > 0][order], w[w > 0][order].astype(LONG)
            middle = np.cumsum(mass) - mass / 2
            place = np.searchsorted(middle, level)
            steps = np.diff(middle)
            if 0 < place < len(places) and steps.min() > 0.02:  # a step of no mass has no digits
                a, b = places[place - 1].astype(LONG), places[place].astype(LONG)
                at = a + (b - a) * (level - middle[place - 1]) / steps[place - 1]
                assert abs(found[f"{100 * level:g}%"][j] - at) <= stated()["summary"] * 100 * unit[j]


@each_precision
def test_expectations_are_as_exact_as_stated(precision):
    with jax.enable_x64(precision == "float64"):
        draws = np.random.default_rng(0).normal(size=(M, D)).astype(precision)
        embedding = reference_embedding(RBF(1.0), draws)
        result = mmdfw.fit(
            jax.random.key(0), quiet, jnp.zeros(D, precision), num_particles=N, embedding=embedding, refine=False
        )
        found = np.asarray(result.expectation(lambda x: 1e3 * x**3).mean, LONG)
    values = 1000 * np.asarray(result.positions, LONG) ** 3
    w = np.asarray(result.weights, LONG)
    unit = N * eps_of(precision) * (np.abs(w) @ np.abs(values))
    assert np.all(np.abs(found - w @ values) <= stated()["expectation"] * unit)


def quiet(x):
    return -0.5 * jnp.sum(x**2)
