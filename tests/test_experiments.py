"""The experiments: all are found, each runs in quick form, and what committed results say beyond noise is held here.

A new experiment is found by itself. What its quick form must show goes into SHOWS, if there is something; what its
result must keep saying is a test of its own that reads it with `committed`.
"""

import json
from dataclasses import replace
from pathlib import Path
import jax, numpy as np, optax, pytest

import mmdfw.experiments
from mmdfw.cli import main
from mmdfw.data._load import load_table
from mmdfw.data._split import split
from mmdfw.experiments._bench_regression import summarise_regression
from mmdfw.experiments._covertype import SPEEDUP_GOAL
from mmdfw.experiments._framework import Findings, Settings, Trial, bench, experiments, read_results, reproduce
from mmdfw.experiments._networks import GOALS
from mmdfw.experiments._race import SVGD, Race, UNIT_ADAM, prior_particles
from mmdfw.models._bnn import mlp
from mmdfw.samplers._svgd import svgd

RESULTS = Path(__file__).parents[1] / "results"
ALL = experiments()
EVERY = [*ALL.values(), *experiments("bench").values()]
WITH_PARTS = [name for name, experiment in ALL.items() if not experiment.of]
QUICK = [name for name in WITH_PARTS if ALL[name].same_code_as is None]


def committed(name):
    return read_results(name, RESULTS)


def last(curve):
    return list(curve.values())[-1]


def below(less, more, factor=1.0):
    return less["high"] < factor * more["low"]


# Declarations


def test_what_there_is_is_found():
    "Both commands have what they had."
    toy, real = {"mixture", "bandwidth", "cache", "lazy", "stein-points"}, {"covertype", "naval", "protein", "year"}
    assert set(ALL) >= toy | real | {"parallel", "table1"}
    assert set(experiments("bench")) >= {"mixture", "regression", "logistic", "speed", "scale"}


@pytest.mark.parametrize("experiment", EVERY, ids=lambda one: f"{one.command} {one.name}")
def test_declaration(experiment):
    "No number and no label twice; the quick form has no part that the full form has not."
    if experiment.of:
        assert set(experiment.of) <= set(ALL) and experiment.parts is None
        return
    full, quick = (experiment.parts(Settings(quick=quick, data=experiment.data)) for quick in (False, True))
    for parts in (full, quick):
        assert len({part.number for part in parts}) == len({part.label for part in parts}) == len(parts)
    assert {part.number for part in quick} <= {part.number for part in full}
    assert all(json.dumps(part.parameters) for part in full), "parameters must be such as JSON can hold"
    assert experiment.about and experiment.summarise is not None


def test_a_label_changes_no_number():
    "Keys come from numbers: what a part finds does not depend on what it is called, nor on the parts beside it."
    part = next(part for part in ALL["mixture"].parts(Settings(quick=True)) if part.label == "independent")
    trial = Trial(0, Settings(quick=True))
    assert replace(part, label="draws").run(trial) == part.run(trial)
    assert replace(part, number=part.number + 1).run(trial)["mmd2"] != part.run(trial)["mmd2"]
    assert part.run(Trial(1, trial.settings))["mmd2"] != part.run(trial)["mmd2"]


OWN = """
from dataclasses import dataclass
import jax
from mmdfw.experiments._framework import Experiment, Part

@dataclass(frozen=True)
class Draw(Part):
    "One normal draw, times a factor."

    factor: float = 1.0

    def run(self, trial):
        return {"value": self.factor * float(jax.random.normal(trial.key(self.number)))}

def mean(found):
    return {part.label: sum(one["value"] for one in found.of(part)) / len(found.trials) for part in found.parts}

parts = lambda settings: [Draw(1, "once"), Draw(2, "twice", 2.0)]
EXPERIMENTS = (
    Experiment("own", "one draw", parts, mean, trials=2),
    Experiment("own", "one draw", parts, mean, command="bench", counted_as="seeds", flat=True),
)
"""


def test_an_experiment_of_ones_own_is_one_file(tmp_path, monkeypatch, capsys):
    "A module beside ours is all that it takes: help, `reproduce`, `bench` and the reader know it."
    (tmp_path / "_own.py").write_text(OWN)
    monkeypatch.setattr(mmdfw.experiments, "__path__", [*mmdfw.experiments.__path__, str(tmp_path)])
    assert main(["reproduce", "own", "--out", str(tmp_path / "results")]) == 0
    found = read_results("own", tmp_path / "results")
    draws = [float(jax.random.normal(jax.random.fold_in(jax.random.key(seed), 2))) for seed in (0, 1)]
    assert [one["value"] for one in found.of(found.find(factor=2.0))] == [2 * draw for draw in draws]
    assert found.summary["twice"] == pytest.approx(sum(draws)) and found.made["seeds"] == [0, 1]
    assert main(["bench", "own", "--out", str(tmp_path / "own.json"), "--seeds", "2"]) == 0
    assert json.loads((tmp_path / "own.json").read_text())["twice"] == found.summary["twice"]
    assert main(["bench", "own", "--out", str(tmp_path / "own.json"), "--splits", "2"]) == 1
    assert "bench own has no --splits: beside --quick, --seed and --out it takes --seeds" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["reproduce", "--help"])
    assert "own" in capsys.readouterr().out


def test_an_unknown_name_is_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["reproduce", "mixtures"])
    assert stop.value.code == 2 and "'mixtures'" in capsys.readouterr().err


# Quick forms


def ends(result, **parameters):
    part = result.find(**parameters)
    return [last(one["mmd2"]) for one in result.of(part)]


def shows_mixture(result):
    "The cloud is ahead of the paper's algorithm, which is ahead of nothing; weights make the difference."
    assert ends(result, kind="cloud", num_steps=50) < ends(result, kind="own term", num_steps=50)
    assert ends(result, kind="cloud", num_steps=50) < ends(result, label="independent")


def shows_cache(result):
    "A cloud around SVGD's particles makes more of them than SVGD."
    assert ends(result, kind="cloud", with_cache=True) < ends(result, number=1)


def shows_lazy(result):
    "Fewer calls for as many steps."
    (every,), (lazy,) = (result.of(result.find(lazy=lazy)) for lazy in (False, True))
    assert lazy["steps"][-1] == every["steps"][-1] == every["calls"][-1] > 2 * lazy["calls"][-1]


def shows_stein_points(result):
    "Low KSD, as that is what they go for."
    (points,), (draws,) = (
        result.of(result.find(**which)) for which in (dict(search="Monte Carlo"), dict(method="draws"))
    )
    assert points["gaussian_ksd2"] < draws["gaussian_ksd2"] and points["farthest"] <= 4


def shows_covertype(result):
    "A compressed run is nearer to the judge than as many of its draws; everybody predicts better than chance."
    assert result.summary["mmd2"]["mmdfw"]["10"] < result.summary["mmd2"]["draws"]["10"]
    assert all(result.summary["methods"][name]["accuracy"]["mean"] > 0.7 for name in ("mmdfw", "svgd 0.005 constant"))


def shows_networks(result):
    "Those that follow the clock take their time, and no method takes twice as much."
    budget = result.settings["budget"]
    seconds = {part.number: result.of(part)[0]["curve"]["seconds"][-1] for part in result.parts if part.label != "mmd2"}
    assert all(2 / 3 * budget < seconds[number] < 2 * budget for number in (1, 3, 11)), seconds


def shows_parallel(result):
    "Dividing the work does not change it: the same steps, and nearly the same end."
    one, two = (result.of(result.find(number=number))[0] for number in (1, 2))
    assert one["devices"] == two["devices"] == 2
    assert one["curve"]["scores"] == two["curve"]["scores"] and one["curve"]["particles"] == two["curve"]["particles"]
    assert one["curve"]["rmse"][-1] == pytest.approx(two["curve"]["rmse"][-1], rel=0.02)


SHOWS = {
    "mixture": shows_mixture,
    "cache": shows_cache,
    "lazy": shows_lazy,
    "stein-points": shows_stein_points,
    "covertype": shows_covertype,
    "naval": shows_networks,
    "parallel": shows_parallel,
}


@pytest.mark.parametrize("name", QUICK)
def test_quick_form(name, tmp_path):
    "One small trial: JSON with every part in it, the summary, the figures, nothing left over; and what it must show."
    files = [Path(file) for file in reproduce(name, quick=True, out=tmp_path, progress=False)["files"]]
    written = json.loads((tmp_path / f"{name}.json").read_text())
    declared = ALL[name].parts(Settings(quick=True))
    assert written["experiment"] == name and written["seeds"] == [0] and written["settings"]["quick"]
    assert [part["number"] for part in written["parts"]] == [part.number for part in declared]
    assert [list(trial) for trial in written["trials"]] == [[part.label for part in declared]]
    assert written["summary"] and written["machine"]["cores"] >= 1 and written["made_with"]["mmdfw"]
    figures = [file for file in files if file.suffix == ".png"]
    assert figures and all(file.stat().st_size > 10_000 for file in figures)
    assert not list((tmp_path / ".parts").glob("*"))
    SHOWS.get(name, lambda result: None)(read_results(name, tmp_path))


def test_the_rival_is_the_librarys_svgd():
    "A race's SVGD, in two pieces, ends where `svgd` with the same keys, rates and minibatches ends."
    data = split(load_table("diabetes"))
    race = Race(mlp(data.x.shape[1], (3,)), data, 10, 5, budget=None, piece=20, look_every=0.0)
    key = jax.random.key(3)
    curve = SVGD(0.01, "constant", 40)(key, race)
    start_key, walk_key = jax.random.split(jax.random.split(key)[1])
    target = race.target()
    positions = prior_particles(start_key, race.model, 5)
    slow = optax.chain(UNIT_ADAM, optax.scale(0.01))
    first = svgd(target, positions, 20, slow, key=jax.random.fold_in(walk_key, 0))
    scores = race.look(target.layout.unravel_all(first.positions), np.full(5, 0.2, np.float32))
    assert curve["scores"] == [100, 200] and curve["rmse"][0] == pytest.approx(float(scores["rmse"]), rel=1e-4)
    assert curve["rmse"][1] != curve["rmse"][0]


def test_speedups_of_the_regression_bench():
    "The best schedule is chosen by mean RMSE, and the speedup is against it."
    parts = experiments("bench")["regression"].parts(Settings(quick=True))
    curve = lambda *rmse: {
        "seconds": [1.0, 2.0],
        "rmse": list(rmse),
        "log_likelihood": [0.0, 0.0],
        "particles": [1, 1],
        "scores": [1, 2],
    }
    curves = {1: curve(0.4, 0.3), 2: curve(0.9, 0.5), 3: curve(0.9, 0.4), 4: curve(0.9, 0.6), 5: curve(0.9, 0.8)}
    found = {number: {"curve": one, "data": "diabetes", "note": ""} for number, one in curves.items()}
    settings = {"first_seed": 0, "quick": True}
    summary = summarise_regression(Findings("regression", settings, tuple(parts), (found,)))
    assert summary["svgd"]["setting"] == parts[2].label and summary["speedups"] == [2.0] == [summary["speedup"]]


@pytest.mark.parametrize("name, only", [("speed", "cold"), ("scale", "particles")])
def test_quick_form_of_what_is_timed(name, only, tmp_path):
    "Children answer; ratios, goals, peak memory and how busy the machine was are in the file, and figures beside it."
    written = bench(name, tmp_path / "found.json", quick=True, only=only, progress=False)
    assert json.loads((tmp_path / "found.json").read_text())["experiment"] == name and written["said"]
    assert len(list(tmp_path.glob("figures/*.png"))) == len(written["files"]) - 1 >= 1
    assert written["busy"] in (True, False, None) and not written.get("failed") and not written[only].get("failed")
    if name == "speed":
        found = written["cold"]
        assert set(found) == {"fit_over_svgd", "programs", "warm_fit_over_svgd"} and found["programs"]["found"] > 1
        assert all(one["met"] == (one["found"] <= one["goal"]) for one in found.values())
    else:
        one = written["particles"]["sizes"]["50"]
        assert one["cold"]["median"] > 0 and (one["peak_mib"] is None or one["peak_mib"]["median"] > 50)


# Committed results


def nearly(one, other) -> bool:
    "Whether two results from JSON agree, numbers to nine digits."
    if isinstance(one, dict):
        return set(one) == set(other) and all(nearly(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(nearly, one, other))
    return one == other if not isinstance(one, float) else one == pytest.approx(other, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("name", WITH_PARTS)
def test_committed_result(name):
    "Made by the full form, with as many trials as the experiment asks for, and small; it says with which version."
    result, experiment = committed(name), ALL[name]
    assert not result.settings["quick"] and len(result.trials) == experiment.trials
    assert {part.number for part in result.parts} == {part.number for part in experiment.parts(Settings())}
    assert result.made["made_with"]["mmdfw"] and result.made["made_with"]["commit"]
    assert (RESULTS / f"{name}.json").stat().st_size < 300_000


@pytest.mark.parametrize("name", WITH_PARTS)
def test_committed_summary_is_what_the_code_makes_of_the_trials(name):
    result = committed(name)
    again = json.loads(json.dumps(ALL[name].summarise(replace(result, summary={}))))
    assert nearly(again, result.summary)


def test_table1_is_made_from_the_races_beside_it():
    "Data set -> method -> figures, all of them numbers."
    table = committed("table1").summary
    assert nearly(ALL["table1"].summarise({name: committed(name) for name in ALL["table1"].of}), table)
    for name in ("naval", "protein", "year"):
        for method in ("paper_svgd", "paper_mmdfw", "svgd", "blackjax_svgd", "mmdfw_paper_settings", "mmdfw"):
            row = table[name][method]
            assert row["seconds"] > 0
            for metric in ("rmse", "log_likelihood"):
                assert all(isinstance(row[metric][key], float) for key in ("mean", "sem"))


def test_mixture():
    "SVGD is ahead of the algorithm as printed; the cloud is ahead of SVGD by far."
    result = committed("mixture")
    curves = result.summary["curves"]
    end = lambda **parameters: last(curves[result.find(**parameters).label]["mmd2"])
    svgd_end = last(curves["SVGD"]["mmd2"])
    assert all(below(svgd_end, end(kind="as printed", num_steps=num)) for num in (10, 50, 100, 250))
    assert below(end(kind="cloud", num_steps=50), svgd_end, 0.01) and below(end(kind="exact"), svgd_end, 0.01)
    assert below(last(curves["refined"]["mmd2"]), svgd_end, 0.01)


def test_linear_means_geometric_for_known_means_alone():
    rates = committed("mixture").summary["rates"]
    assert rates["exact"]["linear_misfit"] < rates["exact"]["power_misfit"]
    for name in ("SVGD", "independent", "as printed, L = 50"):
        assert rates[name]["power_misfit"] < rates[name]["linear_misfit"]


def test_bandwidth():
    "Wide kernels gather particles as printed, and spread them with a cloud."
    result = committed("bandwidth")
    near = lambda kind, h: result.summary["found"][result.find(kind=kind, bandwidth=h).label]["neighbour"]
    assert below(near("as printed", 1.0), near("as printed", 0.3))
    assert below(near("as printed", 0.3), near("as printed", 0.1))
    assert below(near("cloud", 0.1), near("cloud", 0.3)) and below(near("cloud", 0.3), near("cloud", 1.0))


def test_cache():
    "The cache is as good as its embedding; the cloud alone is better, with far fewer evaluations."
    curves = committed("cache").summary["curves"]
    end = {name: last(one["mmd2"]) for name, one in curves.items()}
    used = {name: last(one["evaluations"]) for name, one in curves.items()}
    assert below(end["cache, cloud"], end["SVGD"], 0.05) and below(end["no cache, cloud"], end["cache, cloud"], 0.25)
    assert below(end["no cache, own term, L = 250"], end["cache, own term"])
    assert used["no cache, cloud"]["high"] * 40 < used["cache, cloud"]["low"]


def test_lazy():
    "Fewer calls, fewer still with a cache, and MMD^2 no worse with it."
    result = committed("lazy")

    def at_end(measure, **which):
        values = result.summary["found"][result.find(**which).label][measure]
        return {name: each[-1] for name, each in values.items()}

    for world in ("cloud", "Stein"):
        calls = lambda lazy, with_cache, world=world: at_end("calls", world=world, lazy=lazy, with_cache=with_cache)
        assert below(calls(True, False), calls(False, False), 1 / 3) and below(
            calls(True, True), calls(True, False), 0.6
        )
    both, every = (at_end("discrepancy", world="cloud", lazy=lazy, with_cache=lazy) for lazy in (True, False))
    assert below(both, every)


def test_stein_points():
    "Low KSD, high MMD: worse than independent draws with the paper's kernel, and far worse than MMD-FW."
    found = committed("stein-points").summary["found"]
    for search in ("Monte Carlo", "Nelder-Mead", "grid"):
        points, draws = found[f"greedy, {search}, Gaussian"], found["independent"]
        assert below(points["gaussian_ksd2"], draws["gaussian_ksd2"], 0.2) and below(draws["mmd2"], points["mmd2"])
        assert below(found["MMD-FW, cloud"]["mmd2"], points["mmd2"], 0.02)


@pytest.mark.parametrize("name", GOALS)
def test_networks_meet_the_goals(name):
    "The scores aimed at, ahead of every SVGD on both, and the speedups."
    summary, goal = committed(name).summary, GOALS[name]
    ours = summary["mmdfw"]
    assert ours["rmse"]["mean"] <= goal.rmse and ours["log_likelihood"]["mean"] >= goal.log_likelihood
    assert summary["speedup"]["median"] >= goal.speedup
    for rival in (summary["blackjax_svgd"], summary["mmdfw_paper_settings"], *summary["svgd"]["tried"].values()):
        assert ours["rmse"]["mean"] < rival["rmse"]["mean"]
        assert ours["log_likelihood"]["mean"] > rival["log_likelihood"]["mean"]


def test_year_says_that_it_is_a_subset():
    result = committed("year")
    assert "subset" in result.summary["note"]
    assert all("subset" in one["note"] for one in result.of(result.find(number=1)))


def test_covertype():
    "SVGD's last accuracy in at most a third of its time; smaller MMD than SVGD and than draws at every size."
    summary = committed("covertype").summary
    assert summary["rows"] == 522_911 and summary["speedup"]["accuracy"]["median"] >= SPEEDUP_GOAL
    mmd2 = summary["mmd2"]
    assert all(mmd2["mmdfw"][n] < min(mmd2["svgd"][n], mmd2["draws"][n]) for n in mmd2["svgd"])
