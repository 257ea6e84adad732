"""Run notebooks and files of tests, each in a process of its own; `make notebooks` and `make pytest` run this.

    python tools/run_tests.py 2 nbs/theory/10_kernel.ipynb tests/test_loop.py    # two at a time

Four seconds of every process would go into imports. So one server imports the libraries, and every process is forked
from it. The server must not run JAX, whose threads do not survive a fork: mmdfw is not imported there, since blackjax
computes on import. What takes longest starts first, by tools/seconds.json, so that no core waits at the end;
`python tools/run_tests.py 1 --keep FILES` writes the seconds of processor time that it finds into that table.

What is neither a notebook nor a file of tests is a target of make, such as `lint`, and runs beside them.
"""

import functools
import gc
import json
import math
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.metadata import version
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path

LIBRARIES = [
    "IPython",
    "flax.nnx",
    "jax",
    "jax.experimental.multihost_utils",
    "matplotlib.pyplot",
    "nbdev.test",
    "optax",
    "pandas",
    "pooch",
    "pytest",
    "scipy.optimize",
    "scipy.stats",
    "sklearn.datasets",
    "tqdm",
]
# What growth, refinement and compression run hundreds of times, and from how many numbers in an array on that is long.
REPEATED = {"jit_slope", "jit_measure", "jit_jitted_ask", "jit_exchange_round"}
LARGE = 20_000
SECONDS = Path(__file__).parent / "seconds.json"


def run(file: str, log: str):
    "One notebook as nbdev_test runs it, one file of tests, or one target of make; what it says goes into the log."
    said = os.open(log, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(said, stream)
    gc.freeze()  # what was imported is never looked through for garbage,
    gc.set_threshold(50_000)  # the rest seldom
    try:
        if not file.endswith((".py", ".ipynb")):
            sys.exit(subprocess.run(["make", "--no-print-directory", file]).returncode)
        compile_cheaply()
        if file.endswith(".py"):
            import pytest

            sys.exit(pytest.main([file, "-rs"]))
        from nbdev.test import nbdev_test

        nbdev_test.__wrapped__(file, n_workers=0)
    finally:
        Path(log + ".cpu").write_text(str(processor_time()))


def compile_cheaply():
    """What compiling costs where JAX has no switch for it; a JAX that calls these otherwise goes on as it is.

    JAX writes each program in a new MLIR context, a third of what a single operation costs until it runs, and there
    are thousands: here all of a process share one. And the Makefile asks the compiler to optimise little, which is
    right for most programs, but not for those that run hundreds of times over large arrays."""
    from jax._src import compiler
    from jax._src.interpreters import mlir

    if not (hasattr(mlir, "make_ir_context") and hasattr(compiler, "compile_or_get_cached")):
        return
    mlir.make_ir_context = functools.cache(mlir.make_ir_context)
    as_told = compiler.compile_or_get_cached

    def by_size(*given, **named):
        program = next(one for one in given if hasattr(one, "operation")).operation
        options = next(one for one in given if hasattr(one, "executable_build_options"))
        settings = options.executable_build_options.debug_options
        if settings.xla_backend_optimization_level == 0 and program.attributes["sym_name"].value in REPEATED:
            shapes = set(re.findall(r"tensor<(\d+(?:x\d+)*)x", program.get_asm(large_elements_limit=4)))
            if any(math.prod(map(int, shape.split("x"))) >= LARGE for shape in shapes):
                settings.xla_backend_optimization_level = 1
        return as_told(*given, **named)

    compiler.compile_or_get_cached = by_size


def processor_time() -> float:
    "Seconds that this process and the ones it has waited for have computed."
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in spent)


def report(file: str, seconds: float, code: int, log: str) -> tuple:  # -> Counter, seconds of processor time or None
    """One line for what passed, with what pytest counted and skipped; everything that was said for what failed.

    A notebook counts as one test, and so does a target of make."""
    lines = Path(log).read_text(encoding="utf-8", errors="replace").splitlines()
    counted = lines[-1].strip("= ").rsplit(" in ", 1)[0] if lines and file.endswith(".py") else ""
    spent = float(Path(log + ".cpu").read_text()) if Path(log + ".cpu").exists() else None
    computing = "" if spent is None else f" ({spent:3.0f} computing)"
    if code:
        print(*lines, f"FAILED {seconds:5.0f} s{computing}  {file}  exit code {code}", sep="\n", flush=True)
    else:
        skipped = [line for line in lines if line.startswith("SKIPPED")]
        head = f"ok     {seconds:5.0f} s{computing}  {file}  {counted}".rstrip()
        print(head, *skipped, sep="\n               ", flush=True)
    numbers = Counter({what: int(number) for number, what in re.findall(r"(\d+) (passed|failed|skipped)", counted)})
    numbers = numbers or Counter(passed=not code)
    # an error that pytest does not count, or a process that died
    return numbers + Counter(failed=bool(code) and not numbers["failed"]), spent


def longest_first(files: list) -> list:
    "In the order of the table; what it does not know is taken to be as long as most are."
    known = json.loads(SECONDS.read_text(encoding="utf-8")) if SECONDS.exists() else {}
    usual = sorted(known.values())[len(known) // 2] if known else 0
    return sorted(files, key=lambda file: -known.get(file, usual))


def flags_of(jaxlib: str) -> str:
    "What lets XLA compile quickly, where this version knows it: an unknown flag ends every process at once."
    return "--xla_cpu_use_fusion_emitters=false" if tuple(map(int, jaxlib.split(".")[:2])) < (0, 11) else ""


def run_all(files: list, jobs: int, folder: str) -> tuple:  # -> those that failed, seconds of processor time
    "Run them, so many at a time; the last line counts what passed and what did not."
    # a Mac's own libraries do not survive a fork
    context = get_context("forkserver" if sys.platform == "linux" else "spawn")
    context.set_forkserver_preload(LIBRARIES)
    # no thread in the server, and no more processes at work than jobs
    os.environ["XLA_FLAGS"] = f"{flags_of(version('jaxlib'))} {os.environ.get('XLA_FLAGS', '')}".strip()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    todo, running, failed = longest_first(files), [], []
    total = Counter(passed=0, failed=0, skipped=0)
    times = {}
    while todo or running:
        while todo and len(running) < jobs:
            log = tempfile.mkstemp(dir=folder)[1]
            process = context.Process(target=run, args=(todo[0], log))
            process.start()
            running.append((todo.pop(0), time.monotonic(), process, log))
        wait([process.sentinel for _, _, process, _ in running])
        for one in [one for one in running if not one[2].is_alive()]:
            running.remove(one)
            file, start, process, log = one
            counted, times[file] = report(file, time.monotonic() - start, process.exitcode, log)
            total.update(counted)
            if process.exitcode:
                failed.append(file)
    print(", ".join(f"{number} {what}" for what, number in total.items()))
    return failed, times


def keep(times: dict):
    "Write what was measured into the table; files that are no more go."
    known = json.loads(SECONDS.read_text(encoding="utf-8")) if SECONDS.exists() else {}
    known |= {file: round(spent) for file, spent in times.items() if spent is not None}
    there = {file: known[file] for file in sorted(known) if "/" not in file or Path(file).exists()}
    SECONDS.write_text(json.dumps(there, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    jobs, *files = sys.argv[1:]
    keeping = files[:1] == ["--keep"]
    with tempfile.TemporaryDirectory() as folder:
        failed, times = run_all(files[keeping:], int(jobs), folder)
    if keeping:
        keep(times)
    if failed:
        sys.exit("\n".join(["", "These failed:", *failed]))
