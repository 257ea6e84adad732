"""Several devices and several processes find what one finds; blocks of coordinates; a process that dies; going on.

MMDFW_LOSSES=10 loses a process at ten random moments instead of one, and lets four processes fit besides two."""

import json, os, random, socket, subprocess, sys, time
from typing import NamedTuple
import jax, jax.numpy as jnp, numpy as np, pytest

from mmdfw._checks import assert_close
from mmdfw._across import Speeds, step_seconds
from mmdfw._processes import ProcessLost, explain_loss
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


# Several devices

DEVICES = """
import json, jax, jax.numpy as jnp, numpy as np, optax
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
print(json.dumps([found, refused]))
"""


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

TOGETHER = """
import os, signal, sys, threading, time, jax, numpy as np
import mmdfw  # before the processes know of each other: it computes nothing
place, num, port, out, checkpoint, dies_after = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
if num > 1:
    limits = dict(initialization_timeout=300, heartbeat_timeout_seconds=15, shutdown_timeout_seconds=120)
    jax.distributed.initialize(f"localhost:{port}", num, place, **limits)
rng = np.random.default_rng(0)
x = rng.normal(size=(101, 3))
y = (x[:, 0] + rng.normal(size=101) > 0).astype(float)
ends = [0, 101] if num == 1 else [0, 40, 101] if num == 2 else [0, 10, 40, 60, 101]  # shares that are not equal
mine = slice(*ends[place:place + 2])
target = mmdfw.posterior_across(mmdfw.Logistic(3), x[mine], y[mine], chunk_size=16)
if float(dies_after):
    threading.Timer(float(dies_after), os.kill, (os.getpid(), signal.SIGKILL)).start()
begun, key, found = time.perf_counter(), jax.random.key(0), {}
settings = dict(num_particles=6, max_refinement_steps=25, checkpoint=checkpoint or None)
fitted = mmdfw.fit(key, target, **settings)
found |= dict(fit=fitted.positions, weights=fitted.weights, took=time.perf_counter() - begun)
if not checkpoint:
    short = dict(num_particles=4, particles_per_step=2, first_steps=40, later_steps=20, batch_size=30)
    model = mmdfw.fit_model(key, target, **short)
    start = mmdfw.Logistic(3).sample_prior(key)
    draws = mmdfw.nuts(key, target, start, num_draws=4, num_chains=2, num_warmup=4)
    found |= dict(fit_model=model.positions, nuts=draws.positions)
    if num > 1:
        for call in (lambda: mmdfw.fit(key, target, seconds=5.0), lambda: mmdfw.nuts(key, target, start, cache="x")):
            try:
                call()
            except ValueError as problem:
                print(problem)
np.savez(f"{out}-{place}.npz", **found)
"""


PATIENCE = 900  # seconds: a busy machine is no failure


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


class Ended(NamedTuple):
    "How processes ended."

    codes: list
    said: list  # what each printed, and its errors
    outlived: float  # seconds from the first end to the last


def launch(num, out, checkpoint="", victim=None, dies_after=0.0):
    "Start processes, one of which may die, and wait for all."
    env, port = environment(XLA_FLAGS="--xla_backend_optimization_level=0"), str(free_port())
    settings = lambda i: [str(num), port, str(out), str(checkpoint), str(dies_after if i == victim else 0)]
    files = [open(f"{out}-{i}.txt", "w+") for i in range(num)]
    each = [
        subprocess.Popen([sys.executable, "-c", TOGETHER, str(i), *settings(i)], env=env, stdout=file, stderr=file)
        for i, file in enumerate(files)
    ]
    ended: dict = {}
    try:
        limit = time.monotonic() + PATIENCE
        while len(ended) < num and time.monotonic() < limit:
            ended |= {i: time.monotonic() for i, one in enumerate(each) if i not in ended and one.poll() is not None}
            time.sleep(0.05)
    finally:
        for process in each:
            process.kill()
            process.wait()
        for file in files:
            file.close()
    said = [open(f"{out}-{i}.txt").read() for i in range(num)]
    assert len(ended) == num, said
    return Ended([one.returncode for one in each], said, max(ended.values()) - min(ended.values()))


def results(num, out):
    "What each process has found."
    return [dict(np.load(f"{out}-{i}.npz")) for i in range(num)]


MANY = int(os.environ.get("MMDFW_LOSSES", "1"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    "One process, two, and where there is time four: what each has found, by their number."
    folder = tmp_path_factory.mktemp("processes")
    runs = {}
    for num in (1, 2, 4) if MANY > 1 else (1, 2):
        ended = launch(num, folder / f"whole{num}")
        assert ended.codes == [0] * num, ended.said
        runs[num] = results(num, folder / f"whole{num}"), ended
    return runs


@pytest.mark.parametrize("num", (2, 4) if MANY > 1 else (2,))
def test_several_processes_find_what_one_finds(runs, num):
    (alone,), each = runs[1][0], runs[num][0]
    for other in each[1:]:  # to the last bit
        assert all(np.array_equal(other[name], each[0][name]) for name in ("fit", "weights", "fit_model", "nuts"))
    assert alone["fit"].shape == (6, 5) and alone["nuts"].shape == (8, 5)
    assert_close(each[0]["fit"], alone["fit"], rtol=1e-6, atol=1e-6)
    assert_close(each[0]["weights"], alone["weights"], rtol=1e-6, atol=1e-6)
    assert_close(each[0]["fit_model"], alone["fit_model"], rtol=1e-7, atol=1e-9)
    assert_close(each[0]["nuts"], alone["nuts"], rtol=1e-5, atol=1e-7)  # longer chains part: rounding doubles


def test_what_one_process_alone_would_decide_is_refused(runs):
    for said in runs[2][1].said:
        assert "seconds=5.0 cannot be kept by several processes" in said and "cache='x' needs all rows" in said


@pytest.mark.parametrize("seed", range(MANY))
def test_a_death_at_a_random_moment(runs, tmp_path, seed):
    "The others end with a clear error, and as many processes or fewer go on from the checkpoint."
    draw, whole = random.Random(seed), runs[2][0][0]
    victim, moment = draw.randrange(2), draw.uniform(0.0, float(whole["took"]))
    checkpoint, survivor = tmp_path / "run.ckpt", 1 - victim
    ended = launch(2, tmp_path / "cut", checkpoint, victim, moment)
    if ended.codes[victim] == 0:  # it was quicker this time, and had ended already
        assert ended.codes == [0, 0]
    else:
        assert ended.codes[victim] == -9
        told = ended.said[survivor]
        clear = "ProcessLost: process" in told and f"the run goes on from {checkpoint}" in told
        assert clear or "another task died" in told, told[-3000:]
        assert ended.codes[survivor] not in (0, None) and ended.outlived < 30
    print(f"process {victim} lost after {moment:.1f} of {whole['took']:.1f} s", end=": ")
    print("checkpoint" if checkpoint.exists() else "no checkpoint yet", f"the other ended {ended.outlived:.1f} s later")
    num = 2 - seed % 2
    again = launch(num, tmp_path / "again", checkpoint)
    assert again.codes == [0] * num, again.said
    for one in results(num, tmp_path / "again"):
        close = dict(rtol=0) if num == 2 else dict(rtol=1e-6, atol=1e-6)
        assert_close(one["fit"], whole["fit"], **close)


# As Slurm starts them

SLURM = {"SLURM_JOB_ID": "4711", "SLURM_STEP_NODELIST": "node[017-018,020],big1", "SLURM_NTASKS": "3"}


READ = """
import json
from jax._src import distributed
from mmdfw._runs import join_processes
given = {}

def client(address, place, **settings):
    given.update(address=address, place=place, **settings)
    raise KeyError("far enough")

distributed._jax.get_distributed_runtime_client = client  # nobody is called
try:
    join_processes()
except KeyError:
    print(json.dumps(given | dict(num=distributed.global_state.num_processes)))
"""


def test_what_is_read_of_slurm():
    "JAX parses Slurm's variables; what `join_processes` makes of them is the address, the number and the place."
    env = environment(**SLURM, SLURM_PROCID="2", SLURM_LOCALID="1")
    out = subprocess.run([sys.executable, "-c", READ], env=env, capture_output=True, text=True, timeout=100)
    assert out.returncode == 0, out.stderr
    given = json.loads(out.stdout)
    assert given["address"] == f"node017:{4711 % 4096 + 65535 - 4095}"
    assert (given["place"], given["num"], given["heartbeat_timeout"]) == (2, 3, 15)


def test_no_scheduler_is_said(monkeypatch):
    from jax._src import distributed
    from mmdfw._runs import join_processes

    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "PMI", "JAX_COORD"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(distributed.xla_bridge, "backends_are_initialized", lambda: False)
    with pytest.raises(ValueError, match="--across found no scheduler"):
        join_processes()


def test_the_command_line_across_processes(tmp_path):
    "Two processes with Slurm's variables fit one table; the first alone prints and writes."
    port = str(free_port())
    slurm = SLURM | {"SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2", "JAX_COORDINATOR_PORT": port}
    command = [sys.executable, "-m", "mmdfw", "fit", "--across", "--data", "diabetes", "--out", str(tmp_path / "run")]
    command += ["--particles", "4", "--first-steps", "60", "--later-steps", "20", "--hidden", "3"]
    each = [
        subprocess.Popen(
            command,
            env=environment(**slurm, SLURM_PROCID=str(i), SLURM_LOCALID=str(i), JAX_ENABLE_X64="0"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    said = [process.communicate(timeout=PATIENCE) for process in each]
    assert [process.returncode for process in each] == [0, 0], said
    assert "4 particles" in said[0][0] and "Written:" in said[0][0]
    assert [line for line in said[1][0].splitlines() if "Gloo" not in line] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json", "run.npz", "run.png"]
    again = [*command[:3], "fit", "--resume", str(tmp_path / "run")]
    refused = subprocess.run(again, env=environment(), capture_output=True, text=True, timeout=100)
    assert refused.returncode == 1 and "was fitted by 2 processes" in refused.stderr


def test_importing_computes_nothing():
    "So `jax.distributed.initialize` may come after `import mmdfw`, and after all that the command line imports."
    look = (
        "import mmdfw; [getattr(mmdfw, name) for name in mmdfw.__all__]; import mmdfw._runs; from mmdfw.cli import "
        "make_parser; make_parser().parse_args(['fit', '--across']); from jax._src import xla_bridge; "
        "assert not xla_bridge.backends_are_initialized(); import jax; jax.devices(); "
        "assert xla_bridge.backends_are_initialized()"
    )
    out = subprocess.run([sys.executable, "-c", look], env=environment(), capture_output=True, text=True, timeout=100)
    assert out.returncode == 0, out.stderr
