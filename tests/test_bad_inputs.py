"""Input that makes no sense is refused where the user called, in the package's own words: one row for each case.

More of the kind stands beside what it belongs to: counts, lengthscales and log densities at their start in
test_faults.py; CSV files and splits in test_data.py; files cut or changed anywhere, and settings of `fit_model`, in
test_models.py; estimators in test_estimators.py; the verdict where nothing stands for the target in test_trust.py.
"""

import io, json, os, tempfile, traceback, zipfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Callable, NamedTuple

import jax, jax.numpy as jnp, numpy as np, optax, pandas as pd, pytest, scipy.stats
from flax import linen, nnx

import mmdfw
from mmdfw._files import digest_arrays
from mmdfw.cli import main
from mmdfw.data import as_table, load_table, split
from mmdfw.kernels import IMQ, RBF
from mmdfw.models import Bernoulli, Gaussian, Logistic, Poisson, Softmax, bnn, mlp
from mmdfw.steps import Quadrature
from mmdfw.supports import Interval, transform

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(40, 3)), RNG.normal(size=40)
LABELS = (Y > 0).astype(float)
DRAWS = RNG.normal(size=(200, 2)).astype(np.float32)
AT = jnp.zeros(2)
OUTSIDE = ("jax", "jaxlib", "flax", "optax", "numpy", "scipy", "pandas", "blackjax", "sklearn", "matplotlib")
SHORT = dict(num_particles=2, first_steps=20, later_steps=20, walk=False, progress=False)


def normal(x):
    return -0.5 * jnp.sum(x**2)


class Case(NamedTuple):
    "What is called, and what must come back."

    name: str
    call: Callable
    phrase: str  # a part of the message
    kind: type = ValueError


@cache
def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="mmdfw-inputs-"))


def file(name: str, content: bytes | str) -> Path:
    "A file with this content."
    path = folder() / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def fit(logdensity_fn: Any = normal, position: Any = AT, key: Any = KEY, **options: Any):
    return mmdfw.fit(key, logdensity_fn, position, **(dict(num_particles=3, progress=False) | options))


def compress(draws: Any = DRAWS, num_particles: Any = 3, key: Any = KEY, **options: Any):
    return mmdfw.compress(key, draws, num_particles, progress=False, **options)


def fit_model(model: Any = None, x: Any = X, y: Any = Y, **options: Any):
    return mmdfw.fit_model(KEY, mlp(3, 2) if model is None else model, x, y, **(SHORT | options))


@cache
def fitted():
    return fit()


@cache
def trained():
    return fit_model(Logistic(3), X, LABELS)


@cache
def saved() -> Path:
    return Path(fitted().save(folder() / "whole.npz"))


@cache
def saved_model() -> Path:
    return Path(trained().save(folder() / "model.npz"))


# Keys, positions and log densities -----------------------------------------------------------------------------------


def branching(x):
    return -(x[0] ** 2) if x[0] > 0 else -2 * x[0] ** 2


def raising(x):
    raise RuntimeError("my own fault")


def by_callback(x):
    return jax.pure_callback(lambda x: np.float32(-np.sum(np.square(x))), jax.ShapeDtypeStruct((), np.float32), x)


def looping(x):
    return -jax.lax.while_loop(lambda s: s < 10, lambda s: s * 2, jnp.sum(x**2) + 1)


KEYS = [
    Case("key is an int", lambda: fit(key=0), "key must be a random key, got 0"),
    Case("key is None", lambda: fit(key=None), "key must be a random key, got None"),
    Case("key is a Generator", lambda: fit(key=RNG), "key must be a random key, got Generator"),
    Case("key is a batch", lambda: fit(key=jax.random.split(KEY)), "one random key, got (2,) of them"),
    Case("key is an old batch", lambda: fit(key=jnp.zeros((3, 2), "uint32")), "array of uint32 and shape (3, 2)"),
    Case("key is a vector", lambda: fit(key=jnp.zeros(2)), "array of float32 and shape (2,)"),
    Case("key of compress", lambda: compress(key=7), "key must be a random key, got 7"),
    Case("key of nuts", lambda: mmdfw.nuts(np.int64(3), normal, AT), "key must be a random key"),
    Case("key of sgld", lambda: mmdfw.sgld("key", normal, AT), "key must be a random key, got 'key'"),
    Case("key of svgd", lambda: mmdfw.svgd(normal, jnp.ones((3, 2)), key=5), "key must be a random key, got 5"),
    Case("key of fit_model", lambda: mmdfw.fit_model(0, mlp(3), X, Y), "key must be a random key, got 0"),
    Case("key of sample", lambda: fitted().sample(0, 3), "key must be a random key, got 0"),
]

POSITIONS = [
    Case("position left out", lambda: mmdfw.fit(KEY, normal), "needs a position"),
    Case("position of integers", lambda: fit(position=jnp.arange(2)), "1.0 instead of 1"),
    Case("position of booleans", lambda: fit(position=jnp.ones(2, bool)), "dtype bool"),
    Case("position of bfloat16", lambda: fit(position=jnp.ones(2, jnp.bfloat16)), "give float32 or float64"),
    Case("position with a word", lambda: fit(position={"a": jnp.ones(2), "b": "two"}), "['b'] must hold numbers"),
    Case("position with an object", lambda: fit(position={"a": object()}), "['a'] must hold numbers"),
    Case("position is NaN", lambda: fit(position=jnp.array([0, jnp.nan])), "position must be finite"),
    Case("position is empty", lambda: fit(position={}), "position is empty"),
    Case("position is complex", lambda: fit(position=jnp.ones(2) * 1j), "dtype complex64"),
    Case("position is a list", lambda: fit(position=[0.0, 0.0]), "jnp.array"),
    Case("position is a frame", lambda: fit(position=pd.DataFrame({"a": [1.0]})), "must hold numbers"),
    Case("position of other names", lambda: fit(lambda p: normal(p["b"]), {"a": AT}), "the position has the keys a"),
    Case("position of other shape", lambda: fit(lambda x: normal(x @ jnp.ones((3, 3)))), "position of shape (2,)"),
    Case("position of another target", lambda: fit(transform(normal, AT, None), jnp.ones(3)), "the target has"),
]

DENSITIES = [
    Case("density by NumPy", lambda: fit(lambda x: -np.linalg.norm(x)), "must be written with jax.numpy"),
    Case("density by scipy.stats", lambda: fit(lambda x: scipy.stats.norm.logpdf(x).sum()), "with jax.numpy"),
    Case("density with if", lambda: fit(branching), "no `if` on values"),
    Case("density with float", lambda: fit(lambda x: -(float(x[0]) ** 2)), "no float()"),
    Case("density with math", lambda: fit(lambda x: __import__("math").exp(x[0])), "must be written with jax.numpy"),
    Case("density with item", lambda: fit(lambda x: -(x[0].item() ** 2)), "must be written with jax.numpy"),
    Case("density with a mask", lambda: fit(lambda x: -jnp.sum(x[x > 0])), "must be written with jax.numpy"),
    Case("density of a set of indices", lambda: fit(lambda x: np.arange(3.0)[x.astype(int)].sum()), "jax.numpy"),
    Case("density is a vector", lambda: fit(lambda x: -(x**2)), "must return a scalar, got an array of shape (2,)"),
    Case("density is one row", lambda: fit(lambda x: normal(x)[None]), "got an array of shape (1,)"),
    Case("density is None", lambda: fit(lambda x: None), "must return a scalar, got None"),
    Case("density is a tuple", lambda: fit(lambda x: (normal(x), x)), "must return a scalar, got ("),
    Case("density is a word", lambda: fit(lambda x: "no"), "not a valid JAX type"),
    Case("density is a plain number", lambda: fit(lambda x: 1.0), "or is flat"),
    Case("density is an integer", lambda: fit(lambda x: jnp.sum(x).astype(int)), "got dtype int32"),
    Case("density is a boolean", lambda: fit(lambda x: x[0] > 0), "got dtype bool"),
    Case("density is complex", lambda: fit(lambda x: jnp.sum(x) + 0j), "got dtype complex64"),
    Case("density raises", lambda: fit(raising), "my own fault", RuntimeError),
    Case("density is no function", lambda: fit(3.0), "logdensity_fn must be a function, got 3.0"),
    Case("density is a word in place of a function", lambda: fit("normal"), "must be a function, got 'normal'"),
    Case("density takes two", lambda: fit(lambda x, y: normal(x)), "must take one position"),
    Case("density takes none", lambda: fit(lambda: 0.0), "must take one position"),
    Case("density has no slope", lambda: fit(by_callback), "cannot be differentiated"),
    Case("density loops as long as it likes", lambda: fit(looping), "cannot be differentiated"),
    Case("density is NaN", lambda: fit(lambda x: jnp.nan * normal(x)), "logdensity_fn is nan at the start"),
    Case("density is zero there", lambda: fit(lambda x: jnp.where(x[0] > 500, 0, -jnp.inf)), "is -inf at the start"),
    Case("wrong sign", lambda: fit(lambda x: x @ x), "Is its sign wrong"),
    Case("flat", lambda: fit(lambda x: 0 * jnp.sum(x)), "Is its sign wrong, or a prior missing"),
    Case("linear", lambda: fit(lambda x: jnp.sum(x)), "Is its sign wrong, or a prior missing"),
]

# The four nouns, and numbers ------------------------------------------------------------------------------------------

NOUNS = [
    Case("kernel is a class", lambda: fit(kernel=RBF), "kernel must be an object such as mmdfw.RBF(0.5)"),
    Case("kernel is a name", lambda: fit(kernel="rbf"), "kernel must be an object such as mmdfw.RBF(0.5), got 'rbf'"),
    Case("kernel is a number", lambda: fit(kernel=0.5), "kernel must be an object"),
    Case("kernel is a function", lambda: fit(kernel=lambda x, y: x @ y), "kernel must be an object"),
    Case("kernel of width zero", lambda: RBF(0.0), "lengthscale must be positive and finite, got 0.0"),
    Case("kernel of negative width", lambda: RBF(-1.0), "lengthscale must be positive and finite, got -1.0"),
    Case("kernel with a word", lambda: RBF("wide"), "lengthscale must be positive and finite, got 'wide'"),
    Case("kernel with a list of widths", lambda: fit(kernel=RBF([1, 2, 3])), "lengthscale has shape (3,)"),
    Case("kernel of three widths", lambda: fit(kernel=RBF(jnp.ones(3))), "lengthscale has shape (3,)"),
    Case("kernel with a matrix", lambda: fit(kernel=RBF(jnp.eye(2))), "lengthscale"),
    Case("kernel of compress", lambda: compress(kernel="imq"), "kernel must be an object"),
    Case("kernel of compress, a class", lambda: compress(kernel=IMQ), "kernel must be an object"),
    Case("kernel of fit_model", lambda: fit_model(kernel=2.0), "kernel must be an object"),
    Case("oracle is a name", lambda: fit(oracle="gradient"), "oracle must be an object such as"),
    Case("oracle is a class", lambda: fit(oracle=mmdfw.GradientOracle), "oracle must be an object such as"),
    Case("step rule is a name", lambda: fit(step_rule="simplex"), "step_rule must be an object such as"),
    Case("step rule is a number", lambda: fit(step_rule=0.1), "step_rule must be an object such as"),
    Case("step rule is a class", lambda: fit(step_rule=Quadrature), "step_rule must be an object such as"),
    Case("step rule of compress", lambda: compress(step_rule="simplex"), "step_rule must be an object such as"),
    Case("step rule of compress is None", lambda: compress(step_rule=None), "step_rule must be an object such as"),
    Case("weights of no kind", lambda: Quadrature("positive"), "positive"),
    Case("embedding of no kind", lambda: fit(embedding="clouds"), "embedding must be one of"),
    Case("embedding is None", lambda: fit(embedding=None), "embedding must be an object"),
    Case("embedding is a number", lambda: fit(embedding=5), "embedding must be an object"),
    Case(
        "embedding of another dimension",
        lambda: fit(embedding=mmdfw.reference_embedding(RBF(1.0), jnp.ones((5, 3)))),
        "does not take points of dimension 2",
    ),
    Case(
        "embedding of another kernel",
        lambda: fit(embedding=mmdfw.reference_embedding(RBF(1.0), DRAWS), kernel=RBF(2.0)),
        "leave kernel out",
    ),
    Case("start of no kind", lambda: fit(start="mode"), "start must be one of ['given', 'map', 'prior']"),
    Case("start without a prior", lambda: fit(start="prior"), "needs prior="),
    Case("prior of another size", lambda: fit(start="prior", prior=lambda k: jnp.ones(3)), "gives 3 numbers where"),
    Case("prior is no function", lambda: fit(start="prior", prior=jnp.zeros(2)), "prior must be a function"),
    Case("prior by NumPy", lambda: fit(start="prior", prior=lambda k: RNG.normal(k, size=2)), "prior must be written"),
    Case("no particles", lambda: fit(num_particles=0), "num_particles must be a whole number of at least 1, got 0"),
    Case("half a particle", lambda: fit(num_particles=2.5), "got 2.5"),
    Case("too few evaluations", lambda: fit(num_evaluations=10), "num_evaluations must be a whole number"),
    Case("no evaluations", lambda: fit(max_evaluations=0), "max_evaluations must be a whole number of at least 1"),
    Case("no time", lambda: fit(seconds=0), "seconds must be positive and finite, got 0"),
    Case("endless time", lambda: fit(seconds=float("inf")), "seconds must be positive and finite, got inf"),
    Case("negative gap", lambda: fit(gap_tolerance=-1.0), "gap_tolerance must be positive"),
    Case("gap that nobody measures", lambda: fit(embedding="particles", gap_tolerance=0.1), "needs values of mu_p"),
    Case("gap is a word", lambda: fit(gap_tolerance="small"), "gap_tolerance must be positive"),
]

# What a result is asked ----------------------------------------------------------------------------------------------

RESULTS = [
    Case(
        "expectation by NumPy", lambda: fitted().expectation(lambda x: np.linalg.norm(x)), "f must be written with jax"
    ),
    Case("expectation with if", lambda: fitted().expectation(lambda x: 1.0 if x[0] > 0 else 0.0), "f must be written"),
    Case("expectation with float", lambda: fitted().expectation(lambda x: float(x[0])), "f must be written with jax"),
    Case(
        "expectation is a dict",
        lambda: fitted().expectation(lambda x: {"a": x[0]}),
        "f must return one number or array",
    ),
    Case(
        "expectation is a tuple",
        lambda: fitted().expectation(lambda x: (x[0], x[1])),
        "f must return one number or array",
    ),
    Case("expectation is None", lambda: fitted().expectation(lambda x: None), "f must return one number or array"),
    Case("expectation is a word", lambda: fitted().expectation(lambda x: "x"), "not a valid JAX type"),
    Case("expectation of no function", lambda: fitted().expectation(3.0), "f must be a function"),
    Case("expectation by another name", lambda: fitted().expectation(lambda p: p["a"]), "f cannot take a particle"),
    Case("expectation beyond the end", lambda: fitted().expectation(lambda x: x @ jnp.ones(3)), "f cannot take a"),
    Case(
        "expectation of two",
        lambda: fitted().expectation(lambda x, y: x),
        "f must take one particle; yours takes (x, y)",
    ),
    Case("no draws", lambda: fitted().sample(KEY, 0), "num must be a whole number of at least 1, got 0"),
    Case("half a draw", lambda: fitted().sample(KEY, 1.5), "got 1.5"),
    Case("add nobody", lambda: fitted().add(0), "num must be a whole number of at least 1, got 0"),
    Case("add for no time", lambda: fitted().add(1, seconds=-1.0), "seconds must be positive and finite, got -1.0"),
    Case("refine by no step", lambda: fitted().refine(0), "max_steps must be a whole number of at least 1, got 0"),
    Case("a level of 95", lambda: fitted().summary(levels=(95,)), "must lie between 0 and 1, got 95"),
    Case("a mass of 2", lambda: fitted().summary(mass=2), "mass must lie between 0 and 1, got 2"),
    Case("a row of no name", lambda: fitted().summary().row("tau"), "'tau' is none of", KeyError),
    Case("predict without a model", lambda: fitted().predict(X), "only a model predicts"),
    Case("draws of no tree", lambda: fitted().to_datatree(0), "num_draws must be a whole number"),
    Case("save into a file", lambda: fitted().save(file("taken", "") / "a.npz"), "taken", FileExistsError),
    Case("predict from other columns", lambda: trained().predict(X[:, :2]), "x must be (rows, 3)"),
    Case("predict from words", lambda: trained().predict([["a", "b", "c"]]), "x must hold numbers"),
    Case("predict from NaN", lambda: trained().predict(X * np.nan), "x holds NaN"),
    Case("predict from a row", lambda: trained().predict(X[0]), "x must be (rows, 3)"),
]

# Draws in, and other samplers ----------------------------------------------------------------------------------------

COMPRESS = [
    Case("draws of integers", lambda: compress(np.arange(10)), "draws must"),
    Case("draws in a row", lambda: compress(DRAWS[:, 0]), "(n, d) array"),
    Case("draws of words", lambda: compress(np.array([["a", "b"]])), "draws must hold floating point numbers"),
    Case("draws are None", lambda: compress(None), "draws must be an (m, d) array"),
    Case("draws are a word", lambda: compress("draws.csv"), "draws must be an (m, d) array"),
    Case("draws are a function", lambda: compress(normal), "draws must be an (m, d) array"),
    Case("draws with NaN", lambda: compress(np.where(DRAWS > 2, np.nan, DRAWS)), "NaN or infinite"),
    Case("draws of unlike lengths", lambda: compress({"a": np.ones(5), "b": np.ones(6)}), "same leading axis"),
    Case("draws of four axes", lambda: compress(np.ones((2, 3, 4, 5))), "draws"),
    Case("draws in a ragged list", lambda: compress([[1.0, 2.0], [3.0]]), "not equally long"),
    Case("draws of objects", lambda: compress(DRAWS.astype(object)), "draws must hold"),
    Case("chains of three draws", lambda: compress(np.ones((4, 3, 2)), chains=True), "need at least 4"),
    Case("chains that are none", lambda: compress(DRAWS[:, 0], chains=True), "with chains"),
    Case("more particles than draws", lambda: compress(DRAWS, 201), "at most the number of draws, 200, got 201"),
    Case("no particles of draws", lambda: compress(DRAWS, 0), "num_particles must be a whole number"),
    Case("weights of other length", lambda: compress(weights=np.ones(3)), "must have shape (200,)"),
    Case("negative weights", lambda: compress(weights=-np.ones(200)), "weights must be at least zero"),
    Case("weights of zero", lambda: compress(weights=np.zeros(200)), "with a positive sum"),
    Case("weights with NaN", lambda: compress(weights=np.full(200, np.nan)), "NaN or infinite"),
    Case("points of no kind", lambda: compress(points="draws"), "points must be one of ['free', 'pool']"),
    Case("a pool that is too small", lambda: compress(points="pool", pool_size=2), "leaves 2 draws to take 3"),
    Case("one landmark", lambda: compress(num_landmarks=1), "num_landmarks must be a whole number of at least 2"),
    Case("debias without a target", lambda: compress(debias=True), "needs target="),
    Case("target by NumPy", lambda: compress(target=lambda x: -np.linalg.norm(x)), "must be written with jax.numpy"),
    Case("target of other draws", lambda: compress(target=lambda x: normal(x["a"])), "logdensity_fn"),
    Case("effective size below zero", lambda: compress(effective_size=-5), "effective_size must be positive"),
    Case("a result as draws", lambda: compress(fitted()), "give its .particles, and weights="),
    Case("a data set without draws", lambda: compress(pd.DataFrame({"a": ["x", "y"]})), "draws"),
]

SAMPLERS = [
    Case("nuts without a position", lambda: mmdfw.nuts(KEY, normal), "needs a position"),
    Case("nuts, no draws", lambda: mmdfw.nuts(KEY, normal, AT, 0), "num_draws must be a whole number of at least 4"),
    Case("nuts, no chains", lambda: mmdfw.nuts(KEY, normal, AT, 10, 0), "num_chains must be a whole number"),
    Case("nuts, no warm-up", lambda: mmdfw.nuts(KEY, normal, AT, 10, 1, 0), "num_warmup must be a whole number"),
    Case("nuts, acceptance", lambda: mmdfw.nuts(KEY, normal, AT, target_acceptance=1.5), "between 0 and 1, got 1.5"),
    Case("nuts, spread", lambda: mmdfw.nuts(KEY, normal, AT, spread=-1.0), "spread must be a finite number"),
    Case("nuts by NumPy", lambda: mmdfw.nuts(KEY, lambda x: np.sum(np.sin(x)), AT), "must be written with jax.numpy"),
    Case("nuts where nothing is", lambda: mmdfw.nuts(KEY, lambda x: normal(x) * jnp.nan, AT, 10), "not finite where"),
    Case("nuts, a positional count too many", lambda: mmdfw.nuts(KEY, normal, AT, 4000, 2.0), "num_chains must be"),
    Case("svgd without positions", lambda: mmdfw.svgd(normal), "svgd needs positions"),
    Case("svgd of one vector", lambda: mmdfw.svgd(normal, AT), "positions must be an (n, d) array"),
    Case("svgd of integers", lambda: mmdfw.svgd(normal, jnp.ones((3, 2), int)), "positions must hold floating point"),
    Case("svgd, no steps", lambda: mmdfw.svgd(normal, jnp.ones((3, 2)), 0), "num_steps must be a whole number"),
    Case("svgd, bandwidth", lambda: mmdfw.svgd(normal, jnp.ones((3, 2)), bandwidth="mean"), "bandwidth must be one of"),
    Case("svgd, bandwidth below zero", lambda: mmdfw.svgd(normal, jnp.ones((3, 2)), bandwidth=-1), "must be positive"),
    Case("svgd, optimizer", lambda: mmdfw.svgd(normal, jnp.ones((3, 2)), 5, "adam"), "optimizer must be"),
    Case("svgd by NumPy", lambda: mmdfw.svgd(lambda x: np.sum(np.sin(x)), jnp.ones((3, 2))), "must be written with"),
    Case("sgld, step size", lambda: mmdfw.sgld(KEY, trained().target, trained_start(), step_size=-1), "step_size"),
    Case("sgld without rows", lambda: mmdfw.sgld(KEY, normal, AT), "key"),
    Case("sgld, no draws", lambda: mmdfw.sgld(KEY, trained().target, trained_start(), num_draws=0), "num_draws must"),
]


def trained_start():
    return jax.tree.map(lambda leaf: leaf[0], trained().particles)


# Files ---------------------------------------------------------------------------------------------------------------


def rewritten(name: str, change: Callable, forged: bool = True) -> Path:
    "A saved result with its arrays changed, and a digest of what is there now where it is forged."
    with np.load(saved_model() if name.startswith("model") else saved()) as held:
        arrays = {key: held[key] for key in held.files}
    digest = arrays.pop("digest")
    change(arrays)
    np.savez(folder() / name, digest=np.array(digest_arrays(arrays)) if forged else digest, **arrays)
    return folder() / name


def header_changed(name: str, change: Callable) -> Path:
    def alter(arrays):
        header = json.loads(str(arrays["header"]))
        change(header)
        arrays["header"] = np.array(json.dumps(header))

    return rewritten(name, alter)


def filled(value: float) -> Callable:
    "All of the state and the particles, overwritten."

    def change(arrays):
        for name, array in arrays.items():
            if array.dtype.kind == "f":
                arrays[name] = np.full_like(array, value)

    return change


def state_filled(value: float) -> Callable:
    "The state alone, from which the run would go on."

    def change(arrays):
        for name, array in arrays.items():
            if array.dtype.kind == "f" and ".state." in name:
                arrays[name] = np.full_like(array, value)

    return change


def with_lambda() -> Any:
    "A result whose kernel holds a function without a name."
    parts = fitted().parts._replace(kernel=mmdfw.Stein(IMQ(1.0), lambda x: -x))
    return replace(fitted(), parts=parts)


def load(path: Any) -> Any:
    return mmdfw.load(path, normal, AT)


def load_model(path: Any, model: Any = None) -> Any:
    return mmdfw.load(path, Logistic(3) if model is None else model, X, LABELS)


def archive(name: str, **members: bytes) -> Path:
    path = folder() / name
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as held:
        for member, content in members.items():
            held.writestr(member.replace("__", "/"), content)
    return path


def npy_header(shape: tuple) -> bytes:
    "A NumPy array that says it is large, and holds nothing."
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, dict(descr="<f8", fortran_order=False, shape=shape))
    return out.getvalue()


def escaping() -> Path:
    path = folder() / "escape.npz"
    with zipfile.ZipFile(path, "w") as held:
        held.writestr("../escaped.npy", npy_header((1,)) + bytes(8))
        held.writestr("/tmp/escaped.npy", npy_header((1,)) + bytes(8))
    return path


class Forbidden:
    def __reduce__(self):
        return os.mkdir, (str(folder() / "unpickled"),)


def objects(name: str) -> Path:
    np.savez(folder() / name, x=np.array([Forbidden()], dtype=object), header=np.array([Forbidden()], dtype=object))
    return folder() / name


FILES = [
    Case("no file", lambda: load(folder() / "none.npz"), "there is no saved result at", FileNotFoundError),
    Case("a folder", lambda: load(folder()), "there is no saved result at", FileNotFoundError),
    Case("a truncated file", lambda: load(file("cut.npz", saved().read_bytes()[:900])), "is not a whole saved result"),
    Case("an empty file", lambda: load(file("empty.npz", b"")), "is not a whole saved result"),
    Case("a text file", lambda: load(file("text.npz", "a,b\n1,2\n")), "is not a whole saved result"),
    Case("another archive", lambda: load(archive("other.npz", a=b"b")), "is not a whole saved result"),
    Case("an archive that leaves its folder", lambda: load(escaping()), "is not a whole saved result"),
    Case(
        "an array that says it is huge",
        lambda: load(archive("huge.npz", **{"header.npy": npy_header((2**50,))})),
        "is not a whole",
    ),
    Case(
        "a zip bomb",
        lambda: load(archive("bomb.npz", **{"header.npy": npy_header((2**40,)) + bytes(2**20)})),
        "is not a",
    ),
    Case("pickled objects", lambda: load(objects("pickled.npz")), "is not a whole saved result"),
    Case(
        "a newer format",
        lambda: load(header_changed("newer.npz", lambda h: h.update(format=99))),
        "install a newer mmdfw",
    ),
    Case(
        "a class that nobody knows",
        lambda: load(header_changed("class.npz", lambda h: _rename(h))),
        "is not known here",
    ),
    Case(
        "a header without a tree",
        lambda: load(header_changed("bare.npz", lambda h: h.pop("spec"))),
        "is not a whole saved",
    ),
    Case(
        "a tree that lacks its run",
        lambda: load(header_changed("lacks.npz", lambda h: h["spec"]["dict"].pop("run"))),
        "it lacks run",
    ),
    Case("all zeros", lambda: load(rewritten("zeros.npz", filled(0.0))), "zeros.npz"),
    Case("all NaN", lambda: load(rewritten("nans.npz", filled(np.nan))), "nans.npz"),
    Case(
        "a state of zeros",
        lambda: load(rewritten("state0.npz", state_filled(0.0), False)),
        "not those that were written",
    ),
    Case(
        "a state of NaN", lambda: load(rewritten("state1.npz", state_filled(np.nan))), "particles of its state are NaN"
    ),
    Case(
        "a model's state of zeros",
        lambda: load_model(rewritten("model0.npz", state_filled(0.0), False)),
        "not those that were written",
    ),
    Case(
        "a model's state of NaN",
        lambda: load_model(rewritten("model1.npz", state_filled(np.nan))),
        "particles of its state are NaN",
    ),
    Case("a model of zeros", lambda: load_model(rewritten("model2.npz", filled(0.0))), "model2.npz"),
    Case("another density", lambda: mmdfw.load(saved(), lambda x: 2 * normal(x), AT), "belongs to another target"),
    Case("another dimension", lambda: mmdfw.load(saved(), normal, jnp.ones(3)), "2 numbers"),
    Case("no density", lambda: mmdfw.load(saved()), "needs its target"),
    Case("another prior", lambda: load_model(saved_model(), Logistic(3, rate=5.0)), "belongs to another target"),
    Case("another model", lambda: load_model(saved_model(), mlp(3, 2, likelihood=Bernoulli())), "holds particles of"),
    Case("other labels", lambda: mmdfw.load(saved_model(), Logistic(3), X, 1 - LABELS), "belongs to another target"),
    Case("a lambda in the parts", lambda: with_lambda().save(folder() / "lambda.npz"), "cannot be saved"),
]


def _rename(header: dict):
    header["spec"]["dict"]["run"]["class"] = "os.system"


# Tables --------------------------------------------------------------------------------------------------------------


def csv(content: bytes | str, target: Any = "b", name: str = "mine.csv") -> Any:
    return load_table(file(name, content), target)


def wide(num: int = 20_000) -> str:
    return ",".join(f"c{i}" for i in range(num)) + "\n" + 3 * (",".join(["1"] * num) + "\n")


FRAME = pd.DataFrame({"a": [1.0, 2.0, 3.0], "b": [4.0, 5.0, 6.0]})

TABLES = [
    Case("an empty CSV", lambda: csv(""), "it is empty"),
    Case("a CSV of names alone", lambda: csv("a,b\n"), "at least one row"),
    Case("a CSV without names", lambda: csv("1,2\n3,4\n"), "must name the columns"),
    Case("a name twice", lambda: csv("a,b,a\n1,2,3\n"), "more than once: ['a']"),
    Case("words among numbers", lambda: csv("a,b\n1,2\nred,3\n"), "'a' is not numeric, it holds 'red'"),
    Case("a question mark", lambda: csv("a,b\n1,2\n?,3\n"), "it holds '?'"),
    Case("semicolons", lambda: csv("a;b\nx;2\n3;4\n"), "'a' is not numeric, it holds 'x'"),
    Case("tabs", lambda: csv("a\tb\n1\tx\n"), "the target 'b' must be a number or one of two classes"),
    Case("decimal commas", lambda: csv('a,b\n"1,5",2\n"2,5",3\n'), "write numbers with a decimal point"),
    Case("thousands", lambda: csv('a,b\n"1,500",2\n"2,500",3\n'), "it holds '1,500'"),
    Case("latin-1", lambda: csv("größe,b\n1,2\n".encode("latin-1")), "UTF-8"),
    Case("UTF-16", lambda: csv("a,b\n1,2\n".encode("utf-16")[:-1]), "cannot be read"),
    Case("a row too long", lambda: csv("a,b\n1,2\n1,2,3\n"), "cannot be read"),
    Case("an index", lambda: csv(",a,b\n0,1,2\n"), "to_csv(index=False)"),
    Case("no such column", lambda: csv("a,b\n1,2\n", "price"), "has no column 'price'; its columns are ['a', 'b']"),
    Case("no target", lambda: csv("a,b\n1,2\n", None), "needs a target"),
    Case("a wide CSV without the column", lambda: csv(wide(), "price"), "has no column 'price'"),
    Case("a wide CSV of three rows", lambda: split(csv(wide(300), "c0")), "a part of the split is empty"),
    Case("a gzip that is none", lambda: csv(b"\x1f\x8bjunk"), "cannot be read"),
    Case("a picture", lambda: csv(b"\x89PNG\r\n\x1a\n" + bytes(range(256)), name="cat.png"), "cat.png"),
    Case("no such file", lambda: load_table("navel"), "no set and no file is called 'navel'", FileNotFoundError),
    Case("a folder as a table", lambda: load_table(folder()), "is a folder", IsADirectoryError),
    Case("pickled objects as a table", lambda: load_table(objects("table.npz"), 0), "it holds pickled objects"),
    Case("a frame with words", lambda: as_table(FRAME.assign(c=["x", "y", "z"]), target="b"), "'c' is not numeric"),
    Case(
        "a frame with dates", lambda: as_table(FRAME.assign(c=pd.to_datetime(["2020"] * 3)), target="b"), "not numeric"
    ),
    Case("rows that do not match", lambda: as_table(np.ones((3, 2)), np.ones(2)), "x has 3 rows and y has 2"),
    Case("y as a column", lambda: as_table(np.ones((3, 2)), np.ones((3, 1))), ".ravel()"),
    Case("one row split", lambda: split(as_table(np.ones((1, 2)), np.ones(1))), "a part of the split is empty"),
    Case("arrays split", lambda: split(X, Y), "as_table(x, y)"),
    Case("a frame split", lambda: split(FRAME), "as_table("),
    Case("a fraction of two", lambda: split(as_table(X, Y), test_fraction=2), "between 0 and 1"),
    Case("scaled labels", lambda: split(as_table(X, Y), scale_y=False), "must be a label that is 0 or 1"),
]

# Models --------------------------------------------------------------------------------------------------------------


class Wide(nnx.Module):
    def __init__(self, rngs):
        self.inside = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x):
        return self.inside(x)


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.inside, self.norm = nnx.Linear(3, 1, rngs=rngs), nnx.BatchNorm(1, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.inside(x))[:, 0]


class Old(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(1)(x)[:, 0]


MODELS = [
    Case("labels -1 and 1", lambda: fit_model(Logistic(3), X, 2 * LABELS - 1), "as 0 and 1 it is"),
    Case("labels 1 and 2", lambda: fit_model(Logistic(3), X, LABELS + 1), "must be a label that is 0 or 1"),
    Case("three labels", lambda: fit_model(Logistic(3), X, np.arange(40) % 3), "one class against the rest"),
    Case(
        "standardised labels",
        lambda: fit_model(Logistic(3), X, split(as_table(np.vstack([X, X]), np.tile(LABELS, 2)), test_fraction=0.5).y),
        "0 or 1",
    ),
    Case("labels as words", lambda: fit_model(Logistic(3), X, ["a", "b"] * 20), "y must hold numbers"),
    Case(
        "a fourth class",
        lambda: fit_model(mlp(3, 2, likelihood=Softmax(3)), X, np.arange(40) % 4),
        "whole numbers from 0 to 2",
    ),
    Case("half a count", lambda: fit_model(mlp(3, 2, likelihood=Poisson()), X, LABELS + 0.5), "whole numbers"),
    Case(
        "a count below zero", lambda: fit_model(mlp(3, 2, likelihood=Poisson()), X, -LABELS), "whole numbers from 0 on"
    ),
    Case("other columns", lambda: fit_model(mlp(2), X, Y), "cannot take rows of 3 columns"),
    Case("other columns of Logistic", lambda: fit_model(Logistic(2), X, LABELS), "cannot take rows of 3 columns"),
    Case("x in one row", lambda: fit_model(x=X[:, 0]), "x must be (rows, columns)"),
    Case("x and y of unlike length", lambda: fit_model(y=Y[1:]), "to match x"),
    Case("y as a column of a model", lambda: fit_model(y=Y[:, None]), "y must have shape (40,)"),
    Case("x with NaN", lambda: fit_model(x=np.where(X > 2, np.nan, X)), "x holds NaN"),
    Case("x left out", lambda: fit_model(x=None, y=None), "give either x and y, or batches="),
    Case("the model is a function", lambda: fit_model(normal), "model must be an object such as"),
    Case("the model is a module", lambda: fit_model(Wide(nnx.Rngs(0))), "mmdfw.bnn(lambda rngs:"),
    Case("the model is a class", lambda: fit_model(Logistic), "model must be an object such as"),
    Case("the model is a name", lambda: fit_model("mlp"), "model must be an object such as"),
    Case("hidden is a float", lambda: mlp(3, 2.5), "hidden must be"),
    Case("hidden of zero", lambda: mlp(3, (0,)), "hidden must be a whole number of at least 1, got 0"),
    Case("no features", lambda: mlp(0), "num_features must be a whole number of at least 1, got 0"),
    Case("features are the table", lambda: mlp(X), "num_features must be a whole number"),
    Case(
        "activation by name", lambda: mlp(3, 2, "relu"), "activation must be a function such as jax.nn.relu, got 'relu'"
    ),
    Case("activation by NumPy", lambda: mlp(3, 2, np.tanh), "activation must be written with jax"),
    Case("activation of a shape", lambda: mlp(3, 2, lambda x: x @ x), "activation cannot take a number"),
    Case(
        "likelihood by name",
        lambda: mlp(3, likelihood="softmax"),
        "likelihood must be an object such as mmdfw.models.Softmax(3)",
    ),
    Case(
        "likelihood is a class",
        lambda: mlp(3, likelihood=Gaussian),
        "likelihood must be an object such as mmdfw.models.Softmax(3)",
    ),
    Case("one class of Softmax", lambda: Softmax(1), "at least 2, got 1"),
    Case("prior of no kind", lambda: mlp(3, prior="flat"), "prior must be one of ['layers', 'paper']"),
    Case("shape below zero", lambda: mlp(3, shape=-1.0), "shape must be positive"),
    Case("rate of zero", lambda: Logistic(3, rate=0.0), "rate must be positive and finite, got 0.0"),
    Case("a module of two outputs", lambda: bnn(Wide, 3), "three rows give shape (3, 2)"),
    Case("a module that is made", lambda: bnn(Wide(nnx.Rngs(0)), 3), "lambda rngs:"),
    Case("a Linen module", lambda: bnn(Old(), 3), "flax.nnx"),
    Case(
        "a module's other features",
        lambda: bnn(lambda rngs: Normed(rngs), 5),
        "the module cannot take a table of shape (3, 5)",
    ),
    Case("batch norm that learns", lambda: bnn(Normed, 3), "batch norm to its running average"),
    Case("a module of nothing", lambda: bnn(lambda rngs: 3, 3), "must return a flax.nnx.Module, got 3"),
    Case(
        "an optimizer with a rate",
        lambda: fit_model(optimizer=optax.adam(1e-3)),
        "optax.scale_by_adam() for optax.adam",
    ),
    Case("an optimizer by name", lambda: fit_model(optimizer="adam"), "optimizer"),
    Case("a negative rate", lambda: fit_model(learning_rate=-0.1), "learning_rate must be positive"),
    Case("no steps", lambda: fit_model(first_steps=0), "first_steps must be a whole number"),
    Case("a schedule of no kind", lambda: fit_model(schedule="linear"), "schedule"),
    Case("a restart of no kind", lambda: fit_model(restart="mode"), "restart"),
    Case("workers of no kind", lambda: fit_model(workers=2), "workers"),
    Case("a monitor of no kind", lambda: fit_model(monitor=3), "monitor must be a function, got 3"),
    Case(
        "a monitor that gives a number",
        lambda: fit_model(Logistic(3), X, LABELS, monitor=lambda p, w: 1.0),
        "monitor must return a dict",
    ),
    Case(
        "batches that are no iterator",
        lambda: fit_model(x=None, y=None, batches=5, num_rows=40),
        "batches must be an iterator",
    ),
    Case("batches without a number", lambda: fit_model(x=None, y=None, batches=iter([(X, Y)])), "num_rows"),
    Case("a level of 95 per cent", lambda: trained().predict(X).log_likelihood(Y), "labels must be 0 or 1"),
]

# Estimators, supports, plots, the measures ---------------------------------------------------------------------------


def regressor(**options: Any) -> Any:
    return mmdfw.sklearn.ParticleRegressor(
        **(dict(hidden=2, n_particles=2, first_steps=20, later_steps=20, walk=False) | options)
    )


def classifier() -> Any:
    return mmdfw.sklearn.ParticleClassifier(hidden=2, n_particles=2, first_steps=20, later_steps=20)


REST = [
    Case("an estimator's hidden", lambda: regressor(hidden="wide").fit(X, Y), "hidden must be"),
    Case("an estimator's activation", lambda: regressor(activation="step").fit(X, Y), "activation must be one of"),
    Case("an estimator's likelihood", lambda: regressor(likelihood="normal").fit(X, Y), "likelihood must be one of"),
    Case("an estimator of nobody", lambda: regressor(n_particles=0).fit(X, Y), "n_particles must be a whole number"),
    Case("an estimator's one class", lambda: classifier().fit(X, ["a"] * 40), "y holds one class only, ['a']"),
    Case("supports by another name", lambda: transform(normal, AT, "positiv"), "got 'positiv'"),
    Case("supports of nobody", lambda: transform(normal, {"a": AT}, {"b": "unit"}), "supports names ['b']"),
    Case("supports that do not hold", lambda: transform(normal, AT - 1, "positive"), "must lie inside its support"),
    Case("supports of another kind", lambda: transform(normal, AT, 3), "got 3"),
    Case("supports of another form", lambda: transform(normal, {"a": AT}, ["unit"]), "of the form of the position"),
    Case(
        "a support in a dict",
        lambda: transform(lambda p: normal(p["a"]), {"a": AT}, {"a": 3}),
        "supports['a'] must be a name",
    ),
    Case("an interval turned round", lambda: Interval(1.0, 0.0), "low must be below high"),
    Case("an interval to infinity", lambda: Interval(0.0, np.inf), "both finite"),
    Case("a bounded density by NumPy", lambda: transform(lambda x: np.sum(np.sin(x)), AT, None), "with jax.numpy"),
    Case("measure of unlike sets", lambda: mmdfw.mmd2(RBF(1.0), DRAWS, DRAWS[:, :1]), "dimensions"),
    Case("measure with a name", lambda: mmdfw.mmd2("rbf", DRAWS, DRAWS), "kernel must be an object"),
    Case("measure with a class", lambda: mmdfw.mmd2(RBF, DRAWS, DRAWS), "kernel must be an object"),
    Case("measure of NaN", lambda: mmdfw.mmd2(RBF(1.0), DRAWS * np.nan, DRAWS), "NaN or infinite"),
    Case("embedding of no draws", lambda: mmdfw.reference_embedding(RBF(1.0), jnp.ones((0, 2))), "n, d >= 1"),
    Case("embedding with a name", lambda: mmdfw.reference_embedding("rbf", DRAWS), "kernel must be an object"),
    Case("plot of a word", lambda: mmdfw.plots.plot_pair("result"), "result"),
    Case("plot of nothing", lambda: mmdfw.plots.plot_marginals(None), "result"),
    Case("plot of one number", lambda: mmdfw.plots.plot_pair(np.ones(3)), "(n, d)"),
    Case("plot of no unknown", lambda: mmdfw.plots.plot_marginal(fitted(), "tau"), "plot_marginals takes a result"),
    Case(
        "plot with unlike weights", lambda: mmdfw.plots.plot_pair(DRAWS, np.ones(3)), "weights must have shape (200,)"
    ),
    Case("plot with unlike names", lambda: mmdfw.plots.plot_pair(DRAWS, names=["a"]), "names"),
    Case("history of no result", lambda: mmdfw.plots.plot_history(3), "result"),
    Case("a mixture without widths", lambda: mmdfw.gaussian_mixture(jnp.ones((2, 2))), "sd"),
    Case("a mixture of negative width", lambda: mmdfw.gaussian_mixture(jnp.ones((2, 2)), sd=-1.0), "sd"),
    Case("no such name", lambda: mmdfw.fitt, "fitt", AttributeError),
    Case("no such option", lambda: fit(particles=3), "particles", TypeError),
    Case("cite of nothing", lambda: mmdfw.cite(3), "cite takes what fit"),
    Case(
        "Stein of no kernel", lambda: mmdfw.Stein("imq", lambda x: -x), "base must be an object such as mmdfw.IMQ(1.0)"
    ),
    Case("a posterior of no model", lambda: mmdfw.posterior(normal, X, Y), "model must be an object such as"),
]

# The command line: exit code, one line on standard error, a phrase of it ----------------------------------------------

PLAIN = "a,b\n" + "".join(f"{i % 7},{i}\n" for i in range(40))
COMMANDS = [
    ("fit", 1, "give --data to begin a fit"),
    ("fit --data mine.csv --target b", 1, "--out is missing"),
    ("fit --data none.csv --target b --out run", 1, "no set and no file is called"),
    ("fit --data mine.csv --target price --out run", 1, "has no column 'price'"),
    ("fit --data mine.csv --out run", 1, "needs a target"),
    ("fit --data mine.csv --target b --out mine.csv/run", 1, "cannot write into"),
    ("fit --data mine.csv --target b --task classification --out run", 1, "must be a label that is 0 or 1"),
    ("fit --data naval --target b --out run", 1, "the target of naval is fixed"),
    ("fit --resume none", 1, "there is no saved result at"),
    ("fit --resume mine --seed 3", 1, "--seed cannot be given with it"),
    ("fit --data mine.csv --target b --out run --seconds 0", 1, "seconds must be positive and finite, got 0.0"),
    ("data fetch", 1, "name what to fetch"),
    ("data fetch navel", 1, "navel"),
    ("bench mixture --out mine.csv/x.json", 1, "mine.csv"),
]
USAGE = [
    ("fitt", "invalid choice: 'fitt'"),
    ("fit --particles 0", "must be a whole number of at least 1, got '0'"),
    ("fit --particles many", "got 'many'"),
    ("fit --hidden -1", "--hidden"),
    ("fit --task ranking", "invalid choice: 'ranking'"),
    ("fit --seconds soon", "invalid float value: 'soon'"),
    ("fit --particle-count 3", "unrecognized arguments"),
    ("bench", "required: NAME, --out"),
    ("bench naps --out x.json", "invalid choice: 'naps'"),
    ("reproduce", "required: NAME"),
    ("reproduce figure99", "invalid choice: 'figure99'"),
    ("demo --out mine.csv", "is a file, not a folder"),
    ("data list --folder mine.csv", "is a file, not a folder"),
]


@pytest.mark.parametrize("line, code, phrase", COMMANDS, ids=[line for line, *_ in COMMANDS])
def test_commands_refused_in_one_line(line, code, phrase, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.csv").write_text(PLAIN)
    assert main(line.split()) == code
    told = capsys.readouterr().err.splitlines()
    assert told[-1].startswith("mmdfw: ") and phrase in told[-1] and "Traceback" not in "".join(told)
    assert len(told) == 1 or told[0].startswith("mine.csv: "), "what it will do, and then one line"


@pytest.mark.parametrize("line, phrase", USAGE, ids=[line for line, _ in USAGE])
def test_options_that_there_are_not(line, phrase, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.csv").write_text(PLAIN)
    with pytest.raises(SystemExit) as stop:
        main(line.split())
    told = capsys.readouterr().err
    assert stop.value.code == 2 and phrase in told.splitlines()[-1] and "Traceback" not in told


# --------------------------------------------------------------------------------------------------------------------

CASES = [*KEYS, *POSITIONS, *DENSITIES, *NOUNS, *RESULTS, *COMPRESS, *SAMPLERS, *FILES, *TABLES, *MODELS, *REST]
assert len({case.name for case in CASES}) == len(CASES)


def is_ours(filename: str) -> bool:
    "Whether a frame is of this package or of its user, not of a library below."
    return not any(f"{os.sep}site-packages{os.sep}{name}{os.sep}" in filename for name in OUTSIDE)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_refused_in_plain_words(case):
    with pytest.raises(case.kind) as told:
        case.call()
    words, last = str(told.value), traceback.extract_tb(told.value.__traceback__)[-1].filename
    assert type(told.value) is case.kind or case.kind is OSError or case.kind is AttributeError
    assert case.phrase in words
    assert len(words) < 1500, "a message is read by people"
    assert is_ours(last), f"the last line shown is in {last}"
