"""Run notebooks and files of tests, each in a process of its own; `make notebooks` and `make pytest` run this.

    python tools/run_tests.py 2 nbs/theory/10_kernel.ipynb tests/test_loop.py    # two at a time

Four seconds of every process would go into imports. So one server imports the libraries, and every process is forked from it.
The server must not run JAX, whose threads do not survive a fork: mmdfw is not imported there, since blackjax computes on import.
"""

import gc
import os
import re
import sys
import tempfile
import time
from collections import Counter
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
SLOW = (
    "test_experiments",
    "test_site",
    "test_contracts",
    "test_combinations",
)  # these start first, lest one of them runs alone at the end


def run(file: str, log: str):
    "One notebook as nbdev_test runs it, or one file of tests; what it says goes into the log."
    said = os.open(log, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(said, stream)
    gc.freeze(), gc.set_threshold(50_000)  # what was imported is never looked through for garbage, the rest seldom
    if file.endswith(".py"):
        import pytest

        sys.exit(pytest.main([file, "-rs"]))
    from nbdev.test import nbdev_test

    nbdev_test.__wrapped__(file, n_workers=0)


def report(file: str, seconds: float, code: int, log: str) -> Counter:
    "One line for what passed, with what pytest counted and skipped; everything that was said for what failed. A notebook counts as one test."
    lines = Path(log).read_text(encoding="utf-8", errors="replace").splitlines()
    counted = lines[-1].strip("= ").rsplit(" in ", 1)[0] if lines and file.endswith(".py") else ""
    if code:
        print(*lines, f"FAILED {seconds:5.0f} s  {file}  exit code {code}", sep="\n", flush=True)
    else:
        print(
            f"ok     {seconds:5.0f} s  {file}  {counted}".rstrip(),
            *(line for line in lines if line.startswith("SKIPPED")),
            sep="\n               ",
            flush=True,
        )
    numbers = Counter(
        {what: int(number) for number, what in re.findall(r"(\d+) (passed|failed|skipped)", counted)}
    ) or Counter(passed=not code)
    return numbers + Counter(
        failed=bool(code) and not numbers["failed"]
    )  # an error that pytest does not count, or a process that died


def run_all(files: list, jobs: int, folder: str) -> list:
    "Those that failed; the last line counts what passed and what did not."
    context = get_context(
        "forkserver" if sys.platform == "linux" else "spawn"
    )  # a Mac's own libraries do not survive a fork
    context.set_forkserver_preload(LIBRARIES)
    os.environ.setdefault(
        "OPENBLAS_NUM_THREADS", "1"
    )  # no thread in the server, and no more processes at work than jobs
    todo, running, failed = (
        sorted(files, key=lambda file: SLOW.index(Path(file).stem) if Path(file).stem in SLOW else len(SLOW)),
        [],
        [],
    )
    total = Counter(passed=0, failed=0, skipped=0)
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
            total.update(report(file, time.monotonic() - start, process.exitcode, log))
            if process.exitcode:
                failed.append(file)
    print(", ".join(f"{number} {what}" for what, number in total.items()))
    return failed


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        failed = run_all(sys.argv[2:], int(sys.argv[1]), folder)
    if failed:
        sys.exit("\n".join(["", "These failed:", *failed]))
