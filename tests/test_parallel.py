"""Several devices and several processes find what one finds; blocks of coordinates; a process that dies; going on."""

import json, os, socket, subprocess, sys, time
import jax, jax.numpy as jnp, numpy as np, pytest

from mmdfw._checks import assert_close
from mmdfw._across import ProcessLost, Speeds, explain_loss, step_seconds
from mmdfw.oracles._batches import BatchOracle
from mmdfw.kernels._kernel import IMQ
from mmdfw.oracles._oracle import GradientOracle, NearParticles, Problem
from mmdfw.oracles._blocks import (
    BlockOracle,
    Blocks,
    cut,
    divide_work,
    join,
    make_mesh,
    program_cost,
    shard_rows,
    terms_of,
)


def environment(**more):
    "Of a process of its own: compiled code is kept, and compiled in a hurry."
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "IN_TEST")}
    return (
        kept
        | {
            "JAX_PLATFORMS": "cpu",
            "MPLBACKEND": "agg",
            "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir or "",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_ENABLE_X64": "1",
        }
        | more
    )


DATA = """
x = rng.normal(size=(101, 3))
y = (x[:, 0] + rng.normal(size=101) > 0).astype(float)
"""

# Several devices

DEVICES = """
import json, jax, jax.numpy as jnp, numpy as np, optax
from mmdfw._across import fit_across, posterior_across
from mmdfw._target import as_target
from mmdfw.embeddings._embedding import ParticleEmbedding, Particles, reference_embedding
from mmdfw.kernels._kernel import RBF
from mmdfw.models._logistic import Logistic
from mmdfw.oracles._batches import BatchOracle
from mmdfw.oracles._blocks import BlockOracle, Blocks, ShardedStarts, block_walk, divide_work, make_mesh, shard_rows
from mmdfw.oracles._oracle import GradientOracle, NearParticles, Problem, walk
from mmdfw.samplers._svgd import normal_logdensity, svgd

found, refused = {}, {}
meshes = {n: make_mesh(n) for n in (1, 2, 4)}
unlike = lambda a, b: float(np.max(np.abs(np.asarray(a) - np.asarray(b))))
rng = np.random.default_rng(0)
points = jnp.asarray(rng.normal(size=(8, 7)))
kernel = RBF(jnp.asarray(rng.uniform(2, 3, size=7)))

def attempt(name, f):
    try:
        f()
    except ValueError as problem:
        refused[name] = str(problem)

descend = lambda start: svgd(normal_logdensity, start, 5, bandwidth=2.0).positions
gram, moved = kernel.matrix(points, points), descend(points)
for n, mesh in meshes.items():
    rows = shard_rows(points, mesh)
    found[f"gram {n}"] = unlike(kernel.matrix(rows, points), gram)
    found[f"svgd {n}"] = unlike(descend(rows), moved)

def problem_with(embedding, kernel=kernel, count=5):
    position = np.asarray(points)
    weights = np.where(np.arange(8) < count, 1 / count, 0.0)
    features = position / np.asarray(kernel.unit)
    return Problem(kernel, embedding, Particles(position, features, -position, weights, jnp.asarray(count)))

def oracle(mesh=None, num=4):
    starts = NearParticles(0.5) if mesh is None else ShardedStarts(NearParticles(0.5), mesh)
    return GradientOracle(starts, optax.adam(0.1), 10, num, scale=kernel.unit)

reference = problem_with(reference_embedding(kernel, jnp.asarray(rng.normal(size=(30, 7)))))
key = jax.random.key(1)
ask = jax.jit(lambda oracle, key, problem: oracle(key, problem).points)
alone = ask(oracle(meshes[1]), key, reference)
for n in (2, 4):
    found[f"starts {n}"] = unlike(ask(oracle(meshes[n]), key, reference), alone)
attempt("starts", lambda: ask(oracle(meshes[4], 6), key, reference))

plain, first = oracle(), points[:4] + 0.3

def blocks(problem, *settings):
    return jax.jit(block_walk)(BlockOracle(plain, Blocks(*settings)), problem, first)[0]

def walked(problem):
    return jax.jit(walk)(plain, problem, first[:, None])[0][:, 0]

score = lambda x: -x - 0.1 * x**3
end = walked(reference)
found["one worker, meets once"] = unlike(blocks(reference, 1, 10), end)
found["4 devices, meet at every step"] = unlike(blocks(reference, 4, 1, meshes[4]), end)
papers = blocks(reference, 2, 10)
found["2 devices, meet once"] = unlike(blocks(reference, 2, 10, meshes[2]), papers)
found["differs: fixed factors"] = unlike(papers, end)
for term in ("included", "alone"):
    problem = problem_with(ParticleEmbedding(kernel, score, term))
    found[f"2 devices, meet at every step, {term}"] = unlike(blocks(problem, 2, 1, meshes[2]), walked(problem))

model = Logistic(3)
x, y = rng.normal(size=(50, 3)), rng.integers(2, size=50).astype(float)
target = as_target(model, x, y)
serial = BatchOracle(target, particles_per_step=2, batch_size=8, piece=20, restart="prior")
points = jax.vmap(lambda k: serial.begin(k, reference).positions[0])(jax.random.split(key, 8))
there = problem_with(ParticleEmbedding(RBF(1.0), None, "alone"), RBF(1.0), count=1)

def advanced(workers, **settings):
    shared = divide_work(BatchOracle(target, 2, 8, piece=20, restart="prior", **settings), workers)
    run = jax.jit(lambda o: o.advance(key, o.begin(key, there), there, 20.0))
    return run(shared).positions

alone = advanced(None)
for n in (2, 4):
    found[f"growth, rows {n}"] = unlike(advanced(meshes[n]), alone)
found["growth, one worker"] = unlike(advanced(Blocks(1, 20)), alone)
found["growth, 2 devices, meet at every step"] = unlike(advanced(Blocks(2, 1, meshes[2])), alone)
given = dict(kernel=RBF(jnp.linspace(1.0, 2.0, 5)))
found["growth, given kernel"] = unlike(advanced(Blocks(2, 1, meshes[2]), **given), advanced(None, **given))
found["differs: growth with a given kernel"] = unlike(advanced(None, **given), alone)
papers = advanced(Blocks(2, 20))
found["growth, 2 devices, meet once"] = unlike(advanced(Blocks(2, 20, meshes[2])), papers)
found["differs: growth with fixed factors"] = unlike(papers, alone)
attempt("minibatch", lambda: divide_work(BatchOracle(target, batch_size=10), meshes[4]))
attempt("rows", lambda: shard_rows({"a": points, "b": points[:7]}, meshes[2]))
attempt("mesh", lambda: Blocks(3, 1, meshes[2]))
rng = np.random.default_rng(0)
DATA
target = posterior_across(Logistic(3), x, y, meshes[1], chunk_size=16)
fitted = fit_across(jax.random.key(0), target, num_particles=6, num_starts=2, num_steps=10)
print(json.dumps([found, refused, fitted.positions.tolist()]))
""".replace("DATA", DATA)


@pytest.fixture(scope="module")
def on_devices():
    "What a process with four devices finds, and what it refuses."
    env = environment(XLA_FLAGS="--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0")
    out = subprocess.run([sys.executable, "-c", DEVICES], env=env, capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stderr[-3000:]
    return json.loads(out.stdout.splitlines()[-1])


def test_devices_change_nothing(on_devices):
    same = {name: error for name, error in on_devices[0].items() if not name.startswith("differs")}
    assert len(same) == 19
    assert max(same.values()) < 1e-9, same


def test_fixed_factors_are_another_algorithm(on_devices):
    assert all(error > 1e-3 for name, error in on_devices[0].items() if name.startswith("differs"))


@pytest.mark.parametrize(
    "name, said",
    [
        ("starts", "got 6 rows: take 4 or 8"),
        ("minibatch", "got 10 rows: take 8 or 12"),
        ("rows", "leaf ['b'] equally, got 7 rows"),
        ("mesh", "3 blocks need as many devices"),
    ],
)
def test_uneven_shares_are_refused(on_devices, name, said):
    assert said in on_devices[1][name]


# One device is enough for these


@pytest.mark.parametrize("d, num", [(1, 1), (5, 2), (6, 3), (2, 4)])
def test_blocks_come_together_again(d, num):
    array = jnp.arange(3.0 * d).reshape(3, d)
    assert cut(array, num).shape == (num, 3, -(-d // num))
    assert_close(join(cut(array, num), d), array, rtol=0)


def test_kernels_and_embeddings_without_blocks_are_refused():
    with pytest.raises(ValueError, match="got IMQ"):
        terms_of(Problem(IMQ(1.0), None, None))
    with pytest.raises(ValueError, match="multiple of sync_every, got 10 and 3"):
        BlockOracle(GradientOracle(NearParticles(), num_steps=10), Blocks(2, 3))
    with pytest.raises(ValueError, match="particles_per_step 2"):
        BlockOracle(GradientOracle(NearParticles(), particles_per_step=2))
    with pytest.raises(ValueError, match="got 'two'"):
        divide_work(BatchOracle(None), "two")
    with pytest.raises(ValueError, match="20 steps of a piece, got 3"):
        divide_work(BatchOracle(None, piece=20), Blocks(2, 3))


def test_more_devices_than_there_are():
    with pytest.raises(ValueError, match="999 devices"):
        make_mesh(999)
    assert shard_rows(jnp.ones((3, 2)), make_mesh(1)).shape == (3, 2)


def test_cost_counts_operations():
    cost = program_cost(lambda a, b: a @ b, jnp.ones((8, 16)), jnp.ones((16, 4)))
    assert cost.flops == 2 * 8 * 16 * 4 and cost.messages == cost.bytes == 0


def test_speed_model_has_a_best_number_of_devices():
    times = step_seconds(Speeds(1e-5, 1e-9, 1e-4, 1e-9), 10**7, 1000, 2 ** np.arange(12))
    best = int(np.argmin(times))
    assert 0 < best < 11 and all(np.diff(times[: best + 1]) < 0)


def test_only_losses_are_explained():
    with pytest.raises(ProcessLost, match="begins anew"):
        with explain_loss():
            raise RuntimeError("UNAVAILABLE: Task 1 heartbeat timeout")
    with pytest.raises(ZeroDivisionError):
        with explain_loss():
            raise ZeroDivisionError("no loss")
    for mine in (OSError("no connection to the database"), RuntimeError("the connection to my service is unavailable")):
        with pytest.raises(type(mine), match=str(mine)):
            with explain_loss():
                raise mine


# Several processes

FIT = """
import os, sys, jax
place, port, checkpoint, dies_at, out = int(sys.argv[1]), *sys.argv[2:]
limits = dict(initialization_timeout=60, heartbeat_timeout_seconds=10, shutdown_timeout_seconds=10)
jax.distributed.initialize(f"localhost:{port}", 2, place, **limits)
import numpy as np
from mmdfw._across import fit_across, posterior_across
from mmdfw.models._logistic import Logistic
rng = np.random.default_rng(0)
DATA
mine = slice(0, 40) if place == 0 else slice(40, None)  # shares that are not equal
target = posterior_across(Logistic(3), x[mine], y[mine], chunk_size=16)

def look(particles, weights):
    print("particle", len(weights), flush=True)
    if place == 1 and len(weights) == int(dies_at):
        os._exit(9)
    return {"n": len(weights)}

settings = dict(num_particles=6, num_starts=2, num_steps=10)
if int(dies_at):
    np.save(f"{out}-whole-{place}.npy", fit_across(jax.random.key(0), target, **settings).positions)
result = fit_across(jax.random.key(0), target, checkpoint=checkpoint, monitor=look, **settings)
np.save(f"{out}-{place}.npy", result.positions)
""".replace("DATA", DATA)


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def launch(out, checkpoint, dies_at):
    "Start two processes, wait for both: what they said, their return codes, how long the first outlived the second."
    env, port = environment(XLA_FLAGS="--xla_backend_optimization_level=0"), str(free_port())
    each = [
        subprocess.Popen(
            [sys.executable, "-c", FIT, str(i), port, str(checkpoint), str(dies_at), str(out)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        second = each[1].communicate(timeout=150)
        begun = time.perf_counter()
        return (
            [each[0].communicate(timeout=60), second],
            [process.returncode for process in each],
            time.perf_counter() - begun,
        )
    finally:
        for process in each:
            process.kill()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    "Two processes that fit once, and a second time until one of them dies; then the same two, started again."
    folder = tmp_path_factory.mktemp("processes")
    return folder, launch(folder / "cut", folder / "run.npz", 4), launch(folder / "again", folder / "run.npz", 0)


def test_two_processes_find_what_one_finds(runs, on_devices):
    alone = np.array(on_devices[2])
    assert alone.shape == (6, 5)
    for place in (0, 1):
        assert_close(np.load(runs[0] / f"cut-whole-{place}.npy"), alone, rtol=1e-7, atol=1e-9)


def test_a_death_ends_the_other_with_a_clear_error(runs):
    folder, (((said, error), _), codes, outlived), _ = runs
    assert codes[1] == 9 and codes[0] != 0
    said_so = "ProcessLost: process 0 of 2 has lost another one" in error and "the run goes on from" in error
    assert said_so, error[-3000:]
    assert outlived < 40 and not (folder / "cut-0.npy").exists()  # the heartbeat's limit is 10 seconds
    assert "particle 3" in said and "particle 6" not in said


def test_the_checkpoint_goes_on(runs, on_devices):
    folder, _, (((said, error), _), codes, _) = runs
    assert codes == [0, 0], error[-3000:]
    assert "particle 4" not in said and "particle 6" in said  # it did not begin anew
    for place in (0, 1):
        assert_close(np.load(folder / f"again-{place}.npy"), np.array(on_devices[2]), rtol=1e-7, atol=1e-9)
