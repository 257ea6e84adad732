"""Accidents: a call that is killed, ended or robbed of its disk goes on from its checkpoint, with the same numbers.

Real processes are killed at random moments; `make test` does a few, MMDFW_KILLS=20 in the environment does twenty.
"""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
import warnings

import jax, jax.numpy as jnp, numpy as np, pytest

import mmdfw
from mmdfw import _checkpoint, _files
from mmdfw._checkpoint import Checkpoint
from mmdfw.samplers import _chains, _pooled

KEY = jax.random.key(6)


def bent(x):
    return -0.5 * jnp.sum(x**2) - 2 * (x[1] - x[0] ** 2) ** 2


@pytest.fixture
def always(monkeypatch):
    "Everything is written at once."
    monkeypatch.setattr(_checkpoint, "EVERY", 0.0)
    monkeypatch.setattr(_checkpoint, "SHARE", np.inf)


def same(one, other):
    assert np.array_equal(one.positions, other.positions) and np.array_equal(one.weights, other.weights)
    assert one.evaluations == other.evaluations and one.verdict == other.verdict
    for mine, theirs in zip(one.history, other.history):
        assert np.array_equal(mine, theirs, equal_nan=True)
    for mine, theirs in zip(*map(jax.tree.leaves, (one.state, other.state))):
        assert mine.dtype == theirs.dtype and np.array_equal(mine, theirs, equal_nan=True)
    return True


class Pulled(Exception):
    "The plug."


def pull_after(monkeypatch, place, name, number, error=Pulled):
    "A function of a module fails from its so manieth call on."
    whole, calls = getattr(place, name), []

    def fragile(*given, **named):
        calls.append(1)
        if len(calls) > number:
            raise error
        return whole(*given, **named)

    monkeypatch.setattr(place, name, fragile)
    return calls


# fit


def small(checkpoint=None, key=KEY, target=bent, d=2, **more):
    options = dict(num_particles=12, max_refinement_steps=20) | more
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return mmdfw.fit(key, target, jnp.zeros(d), checkpoint=checkpoint, progress=False, **options)


@pytest.fixture(scope="module")
def plain():
    return small()


def test_a_fit_with_a_checkpoint_is_the_fit_and_a_second_call_returns_at_once(plain, tmp_path, always, monkeypatch):
    path = tmp_path / "new" / "fit.ckpt"
    assert same(small(path), plain) and [one.name for one in path.parent.iterdir()] == ["fit.ckpt"]
    monkeypatch.setattr("mmdfw._fit.find_start", None)  # nothing that was dear is done again
    monkeypatch.setattr("mmdfw._ladder.try_cloud", None)
    monkeypatch.setattr("mmdfw._loop._grow_once", None)
    monkeypatch.setattr("mmdfw._result.refine", None)
    written = path.stat().st_mtime_ns
    assert same(small(path), plain) and path.stat().st_mtime_ns == written


def test_a_finished_fit_grows_on_where_more_are_asked_for(plain, tmp_path):
    path = tmp_path / "fit.ckpt"
    small(path)
    assert same(small(path, num_particles=17), small(num_particles=17))
    assert same(small(path, num_particles=19), plain.add(7))
    with pytest.raises(ValueError, match="holds 19 particles already, and 12 are asked for: ask for as many or more"):
        small(path)
    held = Checkpoint(path, _checkpoint.read_tree(*_checkpoint.read_header(path), {}, path)["owner"])
    assert held.read("particles") == (12,)


@pytest.mark.parametrize("step", [0, 3, 10])
def test_a_fit_goes_on_in_its_growth(plain, tmp_path, always, step):
    path = tmp_path / "fit.ckpt"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Pulled):
        pull_after(patch, mmdfw._loop, "next_step", step)
        small(path)
    with pytest.MonkeyPatch.context() as patch:
        calls = pull_after(patch, mmdfw._loop, "next_step", 99)
        assert same(small(path), plain) and len(calls) == 11 - step


def test_chains_go_on_at_their_window(tmp_path, always):
    "Five windows are warm-up. Chains end by themselves when they are interrupted later; that is not kept."
    path, step = tmp_path / "fit.ckpt", _pooled.jitted_window
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Pulled):
        pull_after(patch, _pooled, "jitted_window", 3)
        small(path, embedding="nuts")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt, match="goes on from"):
        calls = []

        def sent(*given):
            calls.append(1)
            if len(calls) == 5:
                signal.raise_signal(signal.SIGTERM)
            return step(*given)

        patch.setattr(_pooled, "jitted_window", sent)
        small(path, embedding="nuts")
    with pytest.MonkeyPatch.context() as patch:
        calls = pull_after(patch, _pooled, "jitted_window", 99)
        resumed = small(path, embedding="nuts")
        later = len(calls)
        assert same(resumed, small(embedding="nuts")) and len(calls) - later == later + 7


def test_the_nearest_gaussian_is_kept(tmp_path, always):
    path, more = tmp_path / "fit.ckpt", dict(embedding="gaussian", num_particles=4, refine=False)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Pulled):
        pull_after(patch, mmdfw._loop, "next_step", 2)
        small(path, **more)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmdfw._fit.nearest_gaussian", None)
        again = small(path, **more)
    assert same(again, small(**more))


# fit_model, on batches too


rows = np.random.default_rng(6).normal(size=(40, 2)).astype(np.float32)
answers = np.sin(rows[:, 0]) + 0.1 * rows[:, 1]
net = mmdfw.mlp(2, (2,))


def model_fit(checkpoint=None, num=6, feed=None, **more):
    given = (rows, answers) if feed is None else ()
    options = dict(num_particles=num, particles_per_step=2, first_steps=60, later_steps=20, batch_size=20) | more
    if feed is not None:
        options |= dict(batches=feed, num_rows=40)
    return mmdfw.fit_model(KEY, net, *given, checkpoint=checkpoint, progress=False, **options)


def endless():
    draw = np.random.default_rng(7)
    while True:
        some = draw.integers(0, 40, 20)
        yield rows[some], answers[some]


@pytest.mark.parametrize("piece, feed", [(1, endless), (4, endless), (2, None), (3, None)])
def test_a_model_goes_on_inside_a_call(tmp_path, always, piece, feed):
    "Each call is one piece or more, of at most twenty steps; rows from an iterator are skipped."
    path, whole = tmp_path / "model.ckpt", model_fit(feed=feed and feed())
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Pulled):
        pull_after(patch, mmdfw._loop, "_advance", piece)
        model_fit(path, feed=feed and feed())
    with pytest.MonkeyPatch.context() as patch:
        calls = pull_after(patch, mmdfw._loop, "_advance", 99)
        assert same(model_fit(path, feed=feed and feed()), whole) and len(calls) == 5 - piece
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mmdfw._loop, "_grow_once", None)
        assert same(model_fit(path, feed=feed and feed()), whole)


def test_monitor_records_and_their_clock_go_on(tmp_path, always):
    path, look = tmp_path / "model.ckpt", lambda particles, weights: {"particles": len(weights)}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Pulled):
        pull_after(patch, mmdfw._loop, "_advance", 4)
        model_fit(path, monitor=look)
    before = Checkpoint(path, _checkpoint.read_tree(*_checkpoint.read_header(path), {}, path)["owner"]).read("watch")[0]
    records = model_fit(path, monitor=look).records
    assert [one.particles for one in records] == [2, 4, 6] and [one.steps for one in records] == [120, 160, 200]
    assert records[1].seconds == before[1][1].seconds < records[2].seconds


def test_an_oracle_of_ones_own_goes_on(tmp_path, always):
    path, oracle = tmp_path / "own.ckpt", mmdfw.GradientOracle(mmdfw.oracles.NearParticles(), num_steps=3)
    model, classes, more = mmdfw.Logistic(2), (answers > 0).astype(np.float32), dict(oracle=oracle, num_particles=4)
    call = lambda path=None: mmdfw.fit_model(KEY, model, rows, classes, checkpoint=path, progress=False, **more)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Pulled):
        pull_after(patch, mmdfw._loop, "next_step", 2)
        call(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmdfw._fit_model.find_start", None)
        again = call(path)
    assert same(again, call())


# compress and nuts


@pytest.mark.parametrize("points", ["free", "pool"])
def test_compression_goes_on(tmp_path, always, points):
    draws, path = np.random.default_rng(8).normal(size=(300, 2)).astype(np.float32), tmp_path / "draws.ckpt"
    call = lambda path=None: mmdfw.compress(KEY, draws, 8, points=points, checkpoint=path, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Pulled):
            pull_after(patch, mmdfw._loop, "next_step", 4)
            call(path)
        assert same(call(path), call())
    draws[7, 1] += 1e-3
    with pytest.raises(ValueError, match="another run: another data"):
        call(path)


@pytest.mark.filterwarnings("ignore")
def test_nuts_goes_on_in_its_draws(tmp_path, always):
    path = tmp_path / "chains.ckpt"
    call = lambda path=None: mmdfw.nuts(KEY, bent, jnp.zeros(2), 20, 2, 30, checkpoint=path, progress=False)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Pulled):
        pull_after(patch, _chains, "jitted_draws", 7)
        call(path)
    whole = call()
    with pytest.MonkeyPatch.context() as patch:
        calls = pull_after(patch, _chains, "jitted_draws", 99)
        resumed = call(path)
        assert len(calls) == 13
    assert np.array_equal(whole.positions, resumed.positions) and whole.evaluations == resumed.evaluations
    assert np.array_equal(whole.step_size, resumed.step_size) and np.array_equal(whole.ess, resumed.ess)


# Ends


@pytest.fixture
def heard():
    "Ctrl-C as a terminal has it: a shell starts a job in the background with SIGINT ignored."
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_growth_and_the_call_goes_on(plain, tmp_path, number, heard):
    path, before = tmp_path / "fit.ckpt", [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)]
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        step, calls = mmdfw._loop.next_step, []

        def sent(*given):
            calls.append(1)
            if len(calls) == 6:
                os.kill(os.getpid(), number)
            return step(*given)

        patch.setattr(mmdfw._loop, "next_step", sent)
        part = mmdfw.fit(
            KEY, bent, jnp.zeros(2), num_particles=12, max_refinement_steps=20, checkpoint=path, progress=False
        )
    assert len(part) == 6 and part.refinement is None
    word = "SIGTERM" if number == signal.SIGTERM else "interrupted"
    assert any(f"{word}: 6 of 12 particles are kept" in str(one.message) for one in said)
    assert any(f"the same call goes on from {path}" in str(one.message) for one in said)
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)] == before
    with pytest.MonkeyPatch.context() as patch:
        calls = pull_after(patch, mmdfw._loop, "next_step", 99)
        assert same(small(path), plain) and len(calls) == 6


def test_handlers_are_left_alone_outside_the_main_thread_and_without_a_checkpoint(tmp_path):
    before, seen = signal.getsignal(signal.SIGTERM), []

    def look(particles, weights):
        seen.append(signal.getsignal(signal.SIGTERM))
        return {}

    calls = [threading.Thread(target=lambda: model_fit(tmp_path / "thread.ckpt", num=2, monitor=look))]
    calls[0].start()
    calls[0].join()
    model_fit(num=2, monitor=look)
    assert seen and all(one is before for one in seen)
    seen.clear()
    model_fit(tmp_path / "main.ckpt", num=2, monitor=look)
    assert seen and all(one is not before for one in seen) and signal.getsignal(signal.SIGTERM) is before


def test_an_interrupt_before_there_are_particles_ends_the_call(tmp_path, always):
    path = tmp_path / "fit.ckpt"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        pull_after(patch, mmdfw._fit, "climb_ladder", 0, KeyboardInterrupt)
        small(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmdfw._fit.find_start", None)
        assert len(small(path)) == 12


# Disks


@pytest.mark.parametrize("what", ["full", "locked", "gone"])
def test_a_disk_that_fails_on_the_way_leaves_run_and_file(plain, tmp_path, always, monkeypatch, what):
    path, after = tmp_path / "fit.ckpt", []
    good = path.with_name("good.ckpt")

    def fails(*given, **named):
        after.append(1)
        if len(after) < 5:
            return whole(*given, **named)
        if not good.exists():
            good.write_bytes(path.read_bytes())
        raise problem

    if what == "locked":
        whole, problem = type(path).replace, PermissionError(errno.EACCES, "the file is in use")
        monkeypatch.setattr(type(path), "replace", fails)
    else:
        number = errno.ENOSPC if what == "full" else errno.EIO
        whole, problem = os.fsync, OSError(number, os.strerror(number))
        monkeypatch.setattr(_files.os, "fsync", fails)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = mmdfw.fit(
            KEY, bent, jnp.zeros(2), num_particles=12, max_refinement_steps=20, checkpoint=path, progress=False
        )
    told = [str(one.message) for one in said if "could not be written" in str(one.message)]
    assert same(found, plain) and len(told) == 1 and problem.strerror in told[0] and "the run goes on" in told[0]
    assert len(after) > 6 and path.read_bytes() == good.read_bytes()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["fit.ckpt", "good.ckpt"]
    monkeypatch.undo()
    assert same(small(path), plain)


def test_a_folder_that_cannot_be_written_is_an_error_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("mmdfw._fit.find_start", None)

    def forbidden(**named):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(_files.tempfile, "TemporaryFile", forbidden)
    with pytest.raises(OSError, match="cannot write into .*: Permission denied"):
        small(tmp_path / "fit.ckpt")
    monkeypatch.undo()
    with pytest.raises(OSError, match="it is a folder"):
        small(tmp_path)
    with pytest.raises(ValueError, match="must be the name of a file"):
        small(True)


# Whose it is


def test_what_belongs_to_another_run_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "fit.ckpt"
    small(path)
    kept = path.read_bytes()
    moved = lambda x: bent(x) - 0.001 * x[0]
    wrong = {
        "another run: another log density. Give what was given then. Name another file, or delete": dict(target=moved),
        "another run: another key": dict(key=jax.random.key(7)),
        "max_evaluations was 2000000 and is 3000": dict(max_evaluations=3000),
        "kernel": dict(kernel=mmdfw.RBF(1.0)),
        "start was 'map' and is 'given'": dict(start="given"),
        "refine was True and is False": dict(refine=False),
        "another data": dict(target=lambda x, rows=jnp.ones(3): bent(x) + jnp.sum(rows)),
    }
    for words, other in wrong.items():
        with pytest.raises(ValueError, match="another run: ") as refused:
            small(path, **other)
        assert words in str(refused.value)
    with jax.enable_x64(True), pytest.raises(ValueError, match="precision was 'float32' and is 'float64'"):
        small(path)
    with pytest.raises(ValueError, match="call was 'fit' and is 'fit_model'"):
        model_fit(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_checkpoint, "version", lambda name: "9.9")
        with pytest.raises(ValueError, match=r"mmdfw was '.*' and is '9.9'; jax was"):
            small(path)
    assert path.read_bytes() == kept


def test_data_of_a_model_are_told_apart(tmp_path):
    path = tmp_path / "model.ckpt"
    model_fit(path)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match="another run: another data"):
        changed = answers.copy()
        changed[39] += 1e-4
        patch.setitem(globals(), "answers", changed)
        model_fit(path)
    with pytest.raises(ValueError, match="later_steps was 20 and is 21"):
        model_fit(path, later_steps=21)


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "fit.ckpt"
    result = small(path)
    whole = path.read_bytes()
    for damaged in (whole[:-50], b"", b"text", whole[: len(whole) // 2] + b"x" + whole[len(whole) // 2 + 1 :]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="the checkpoint cannot be read: .*delete this one to begin anew"):
            small(path)
        assert path.read_bytes() == damaged
    result.save(tmp_path / "result.npz")
    with pytest.raises(ValueError, match="is no checkpoint, but a saved result"):
        small(tmp_path / "result.npz")


# Processes that are killed


BEGIN = """
import sys, warnings
import mmdfw._checkpoint as c
warnings.simplefilter("ignore")
c.EVERY, c.SHARE = 0.05, 1.0
enter = c.Checkpoint.__enter__
def noted(self):
    print("begun", flush=True)
    return enter(self)
c.Checkpoint.__enter__ = noted
path, out = sys.argv[1:3]
"""
CALLS = {
    "fit": """
import jax, jax.numpy as jnp, mmdfw
bent = lambda x: -0.5 * jnp.sum(x**2) - 2 * jnp.sum((x[1:] - x[:-1] ** 2) ** 2)
mmdfw.fit(jax.random.key(1), bent, jnp.zeros(4), num_particles=60, max_refinement_steps=60, checkpoint=path).save(out)
""",
    "fit_model": """
import jax, numpy as np, mmdfw
x = np.random.default_rng(0).normal(size=(300, 3)).astype("float32")
model, steps = mmdfw.mlp(3, (4,)), dict(first_steps=10_000, later_steps=1_000)
mmdfw.fit_model(jax.random.key(1), model, x, np.sin(x[:, 0]), num_particles=32, checkpoint=path, **steps).save(out)
""",
    "command": """
from mmdfw.cli import main
steps = ["--hidden", "4", "--particles", "16", "--first-steps", "8000", "--later-steps", "1000"]
sys.exit(main(["fit", "--data", "diabetes", "--checkpoint", path, "--out", out, *steps]))
""",
}
KILLS = int(os.environ.get("MMDFW_KILLS", 4))


def start(call, path, out):
    "A process at the moment at which its call begins."
    cache = jax.config.jax_compilation_cache_dir
    kept = {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"} if cache else {}
    code = BEGIN + CALLS[call]
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path), str(out)],
        env=os.environ | kept,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout.readline() == "begun\n"
    return process


def finish(process):
    process.stdout.read()
    assert process.wait() == 0


def arrays(out):
    with np.load(out) as file:
        return {name: file[name] for name in file.files if name.split(".")[1:2] in (["positions"], ["weights"])}


@pytest.mark.parametrize("call, share", [("fit", 0.35), ("fit_model", 0.35), ("command", 0.3)])
def test_a_killed_process_goes_on(tmp_path, call, share):
    "What a process leaves behind that was killed at some moment, another one makes the same result of."
    if KILLS < 20 and call == "fit_model":
        pytest.skip("the command line runs the same; MMDFW_KILLS=20 in the environment kills all three")
    number = max(2, round(share * KILLS))
    for name in ["first", "whole"][KILLS < 20 :]:  # the first one compiles
        process, begun = start(call, tmp_path / f"{name}.ckpt", tmp_path / f"{name}.npz"), time.monotonic()
        finish(process)
        length = time.monotonic() - begun
    whole = arrays(tmp_path / "whole.npz")
    assert len(whole) == 2
    moments = np.random.default_rng(20).uniform(0, length, number)
    sizes = []
    for i, moment in enumerate(moments):
        path, out = tmp_path / f"{i}.ckpt", tmp_path / f"{i}.npz"
        process = start(call, path, out)
        time.sleep(moment)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        sizes.append(path.stat().st_size if path.exists() else 0)
        finish(start(call, path, out))
        again = arrays(out)
        assert all(np.array_equal(again[name], whole[name]) for name in whole), f"after {moment:.2f} of {length:.2f} s"
    print(f"{call}: {number} of {number}; killed at {np.sort(moments / length).round(2)}, bytes kept {sizes}")
    assert any(sizes) or KILLS < 20  # some were killed after something had been written
