"""The paper's experiments: each runs in quick form, and what the committed results say beyond noise is held here.

A new experiment goes into QUICK; what its result must keep saying is a test of its own that reads it with `committed`.
"""
import json
from pathlib import Path
import pytest

from mmdfw.reproduce import find_experiment, read_results, reproduce

RESULTS = Path(__file__).parents[1] / "results"
QUICK = ["mixture", "bandwidth", "cache", "lazy", "stein-points"]


def committed(name): return read_results(name, RESULTS)


def last(curve): return list(curve.values())[-1]


@pytest.mark.parametrize("name", QUICK)
def test_quick_form(name, tmp_path):
    "One small trial: JSON with every part in it, the summary, the figures, and nothing left over."
    result = reproduce(name, quick=True, out=tmp_path, progress=False)
    written = json.loads((tmp_path / f"{name}.json").read_text())
    assert written["experiment"] == name and written["seeds"] == [0] and written["settings"]["quick"]
    assert [list(trial) for trial in written["trials"]] == [find_experiment(name).parts(find_experiment_settings(quick=True))]
    assert written["summary"] and written["machine"]["cores"] >= 1
    figures = [Path(file) for file in result["files"] if file.endswith(".png")]
    assert figures and all(file.stat().st_size > 10_000 for file in figures)
    assert not list((tmp_path / ".parts").glob("*"))


def find_experiment_settings(**options):
    from mmdfw.reproduce import Settings
    return Settings(**options)


@pytest.mark.parametrize("name", QUICK)
def test_committed_result(name):
    "Made by the full form, with as many trials as the experiment asks for, and small."
    result, experiment = committed(name), find_experiment(name)
    assert not result["settings"]["quick"] and len(result["trials"]) == experiment.trials
    assert all(list(trial) == experiment.parts(find_experiment_settings()) for trial in result["trials"])
    assert (RESULTS / f"{name}.json").stat().st_size < 300_000
