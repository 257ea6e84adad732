"""Results on disk: whatever `fit` makes comes back bit for bit and goes on; what is wrong with a file is said."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mmdfw
from mmdfw import _saved
from mmdfw.kernels import random_fourier
from mmdfw.oracles import (
    CachedOracle,
    GridOracle,
    MonteCarloOracle,
    NearParticles,
    NearPoint,
    NelderMeadOracle,
    cached_oracle,
    greedy_value,
    pool_starts,
)
from mmdfw.steps import BlendedPairwise, DecayEarly

START = {"a": jnp.zeros(2), "b": jnp.zeros(())}
QUICK = dict(refine=False, progress=False)
BOX = ((-3.0, 3.0),) * 3


def bent(z):
    return -0.5 * jnp.sum(z["a"] ** 2) - 0.5 * ((z["b"] - z["a"][0] ** 2) / 0.5) ** 2


def draws(n=60):
    return jax.random.normal(jax.random.key(9), (n, 3))


def reference(kernel=mmdfw.RBF(1.0)):
    return mmdfw.reference_embedding(kernel, draws())


def cached():
    embedding = reference()
    walker = mmdfw.GradientOracle(NearParticles(0.5), num_steps=3)
    return cached_oracle(embedding, embedding.kernel, draws(8), walker)


CASES = {
    "cloud": dict(embedding="cloud"),
    "gaussian": dict(embedding="gaussian"),
    "nuts": dict(embedding="nuts"),
    "particles": dict(embedding="particles"),
    "stein": dict(embedding="stein"),
    "reference": dict(embedding=reference(mmdfw.IMQ(1.5))),
    "fourier": dict(embedding=reference(random_fourier(jax.random.key(1), 20, 3, 1.0))),
    "constant steps": dict(embedding=reference(), step_rule=mmdfw.ConstantStep()),
    "decay": dict(embedding=reference(), step_rule=DecayEarly(mmdfw.OpenLoop(3.0), 2, 0.8)),
    "pairwise": dict(embedding=reference(), step_rule=BlendedPairwise(5)),
    "simplex": dict(embedding=reference(), step_rule=mmdfw.Quadrature("simplex")),
    "grid": dict(embedding=reference(), oracle=GridOracle(BOX, 5)),
    "Monte Carlo": dict(embedding=reference(), oracle=MonteCarloOracle(BOX, objective=greedy_value)),
    "Nelder-Mead": dict(embedding=reference(), oracle=NelderMeadOracle(NearParticles(0.5), 5)),
    "near a point": dict(embedding=reference(), oracle=mmdfw.GradientOracle(NearPoint(jnp.ones(3)), num_steps=3)),
    "cached": dict(embedding=reference(), oracle=cached()),
    "lazy": dict(
        embedding=reference(),
        oracle=mmdfw.LazyOracle(mmdfw.GradientOracle(pool_starts(reference(), mmdfw.RBF(1.0)), num_steps=3)),
        step_rule=mmdfw.LineSearch(),
    ),
}


def equal(one, other):
    return jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b, equal_nan=True), one, other))


def made(case, num):
    return mmdfw.fit(jax.random.key(5), bent, START, num_particles=num, **(QUICK | CASES[case]))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_away_and_back(case, tmp_path):
    part = made(case, 3)
    again = mmdfw.load(part.save(tmp_path / "part.npz"), bent, START)
    look = lambda r: (r.particles, r.weights, tuple(r.history), r.evaluations, r.discrepancy)
    assert equal(look(again), look(part)) and repr(again) == repr(part)
    assert equal(look(again.add(2)), look(part.add(2)))
    assert equal(again.expectation(lambda z: z["b"])[:2], part.expectation(lambda z: z["b"])[:2])


def test_a_cached_oracle_is_what_it_says():
    assert isinstance(cached(), CachedOracle)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return made("reference", 3).save(tmp_path_factory.mktemp("saved") / "three.npz", {"said": "three"})


def changed(path, tmp_path, change, sign=True):
    "The file with another header or other arrays, signed as if it were whole."
    arrays = dict(np.load(path))
    header = json.loads(str(arrays["header"]))
    change(header, arrays)
    arrays["header"] = np.array(json.dumps(header))
    arrays.pop("digest")
    digest = _saved.digest_arrays(arrays) if sign else "0"
    np.savez(tmp_path / "changed.npz", digest=np.array(digest), **arrays)
    return tmp_path / "changed.npz"


def test_notes_and_versions_are_in_the_header(saved):
    header, _ = _saved.read_header(saved)
    assert header["notes"] == {"said": "three"} and header["format"] == 2 and "jax" in header["versions"]


def test_nothing_is_pickled(saved):
    arrays = np.load(saved, allow_pickle=False)
    assert all(not arrays[name].dtype.hasobject for name in arrays.files)
    assert {"result.state.particles.position", "result.parts.embedding.points"} <= set(arrays.files)


def set_field(path, value):
    def change(header, arrays):
        place = header["spec"]["dict"]
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value

    return change


@pytest.mark.parametrize(
    "change, words",
    (
        (lambda h, a: h.update(format=99), "format 99, this version reads 2: install a newer"),
        (set_field(["parts", "fields", "kernel", "class"], "os.system"), "'os.system', which is not known here"),
        (
            set_field(["parts", "fields", "oracle", "fields", "optimizer"], {"named": "eval"}),
            "'eval', which is not known",
        ),
        (set_field(["parts", "fields", "oracle", "fields", "num_steps"], -3), "num_steps must be a whole number"),
        (set_field(["parts", "fields", "step_rule", "fields", "constraint"], "any"), "constraint must be one of"),
        (lambda h, a: a.pop("result.weights"), "cannot be read"),
    ),
)
def test_a_file_that_asks_for_nonsense(saved, tmp_path, change, words):
    with pytest.raises(ValueError, match=words):
        mmdfw.load(changed(saved, tmp_path, change), bent, START)


def test_a_file_that_was_changed_cut_or_is_none(saved, tmp_path):
    poked = changed(saved, tmp_path, lambda h, a: a.update({"result.weights": np.zeros(3, np.float32)}), sign=False)
    with pytest.raises(ValueError, match="not a whole saved result"):
        mmdfw.load(poked, bent, START)
    for size in (0, 10, 1000, saved.stat().st_size - 30):
        poked.write_bytes(saved.read_bytes()[:size])
        with pytest.raises(ValueError, match="not a whole saved result"):
            mmdfw.load(poked, bent, START)
    with pytest.raises(FileNotFoundError, match="no saved result"):
        mmdfw.load(tmp_path / "none.npz", bent, START)


def test_files_of_the_first_formats_are_told_from_broken_ones(tmp_path):
    path = tmp_path / "old.npz"
    for old in (dict(fingerprint=np.array("mmdfw fit 1")), dict(header=np.array('{"format": "mmdfw model fit 1"}'))):
        np.savez(path, **old)
        with pytest.raises(ValueError, match="saved by mmdfw 0.1.*fit again"):
            mmdfw.load(path, bent, START)


def test_another_target_is_refused_and_a_constant_is_not(saved):
    with pytest.raises(ValueError, match="belongs to another target"):
        mmdfw.load(saved, lambda z: 2 * bent(z), START)
    with pytest.raises(ValueError, match="3 numbers"):
        mmdfw.load(saved, bent, START | {"a": jnp.zeros(3)})
    with pytest.raises(ValueError, match="needs its target"):
        mmdfw.load(saved)
    assert len(mmdfw.load(saved, lambda z: bent(z) + 3e4, START)) == 3


def test_an_interrupted_write_leaves_the_last_good_file(saved, tmp_path, monkeypatch):
    path = tmp_path / "kept.npz"
    path.write_bytes(saved.read_bytes())

    def full(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="no space"):
        made("reference", 3).save(path)
    assert path.read_bytes() == saved.read_bytes() and list(tmp_path.iterdir()) == [path]
