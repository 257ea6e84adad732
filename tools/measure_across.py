"""How fast a score of rows on 1, 2 and 4 local processes is, and how many bytes go over the loopback.

    unshare -n sh -c 'ip link set lo up; python tools/measure_across.py'    # as root: a loopback that nobody else uses

Each process is held to one core. Strong scaling: 200,000 rows in all; weak: 100,000 for each process."""

import json, os, socket, subprocess, sys, time

COLUMNS, STEPS = 54, 50


def loopback() -> int:
    "Bytes that have come over the loopback."
    return int(next(line for line in open("/proc/net/dev") if line.strip().startswith("lo:")).split()[1])


def measure(place: int, num: int, port: int, rows: int, candidates: int):
    "As one of the processes: print what was measured, if this is the first."
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[place % len(os.sched_getaffinity(0))]})
    import jax, numpy as np
    import mmdfw
    from mmdfw._processes import to_all
    from mmdfw._target import as_target
    from mmdfw.oracles._blocks import program_cost

    if num > 1:
        jax.distributed.initialize(f"localhost:{port}", num, place, heartbeat_timeout_seconds=60)
    rng, mine = np.random.default_rng(place), rows // num
    x, y = rng.normal(size=(mine, COLUMNS)), rng.integers(2, size=mine)
    target = as_target(mmdfw.posterior_across(mmdfw.Logistic(COLUMNS), x, y))
    scores = jax.jit(lambda u, target: jax.vmap(target.score)(u))
    positions, took = np.zeros((candidates, target.dimension), np.float32), []
    jax.block_until_ready(scores(positions, target))
    to_all(b"ready")
    time.sleep(1.0)
    before = loopback()
    for _ in range(STEPS):
        begun = time.perf_counter()
        jax.block_until_ready(scores(positions, target))
        took.append(time.perf_counter() - begun)
    time.sleep(1.0)
    sent = (loopback() - before) / STEPS
    to_all(b"done")
    cost = program_cost(scores, positions, target)
    formula = 4 * candidates * (target.dimension - 1)  # the precision is in the prior alone
    figures = dict(rows=rows, candidates=candidates, seconds=min(took), median=sorted(took)[STEPS // 2])
    figures |= dict(reduced=cost.bytes, formula=formula, wire=sent, wire_formula=2 * (num - 1) * formula)
    if place == 0:
        print(json.dumps(dict(processes=num) | figures), flush=True)


def run(num: int, rows: int, candidates: int = 4):
    "All processes of one measurement."
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    command = [sys.executable, __file__, str(num), str(port), str(rows), str(candidates)]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
    each = [subprocess.Popen([*command, str(place)], env=env) for place in range(num)]
    if any([process.wait() for process in each]):
        sys.exit("a process has failed")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        num, port, rows, candidates, place = map(int, sys.argv[1:])
        measure(place, num, port, rows, candidates)
    else:
        for num in (1, 2, 4):
            run(num, 200_000)
        for num in (1, 2, 4):
            run(num, 100_000 * num)
        for num, candidates in ((2, 64), (2, 1024), (4, 1024)):  # long messages: headers count for little
            run(num, 1_000, candidates)
