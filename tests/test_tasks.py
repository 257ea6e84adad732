"""A model says what it predicts: labels it cannot take are refused, and one of a user's own goes all the way."""

import json
import subprocess
import sys
from dataclasses import dataclass

import jax, jax.numpy as jnp, numpy as np, pandas as pd, pytest

import mmdfw
from mmdfw._checks import assert_close, pytree_dataclass
from mmdfw._runs import MODELS, Job, load_job, make_monitor
from mmdfw._target import as_target
from mmdfw.cli import main
from mmdfw.data._split import split
from mmdfw.data._table import as_table
from mmdfw.models import Logistic, Model, Task, bnn, mlp, posterior
from mmdfw.models._model import check_data, stack_batches

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(40, 2))
SHORT = dict(num_particles=5, particles_per_step=5, batch_size=10, first_steps=200, later_steps=100, progress=False)

# Targets ------------------------------------------------------------------------------------------

LABELS = {
    "-1 and 1": (np.where(X[:, 0] > 0, 1.0, -1.0), r"got 2 values: \[-1.0, 1.0\].*\(y == 1\).astype\(float\)"),
    "1 and 2": (np.where(X[:, 0] > 0, 2, 1), r"got 2 values: \[1.0, 2.0\].*\(y == 2\).astype\(float\)"),
    "three": (np.arange(40) % 3, r"got 3 values.*one class against the rest is \(y == 2\).astype\(float\)"),
    "numbers": (X[:, 0], "got 40 values.*for a regression"),
}
DOORS = {
    "fit_model": lambda y: mmdfw.fit_model(KEY, Logistic(2), X, y, **SHORT),
    "posterior": lambda y: posterior(Logistic(2), X, y),
    "posterior_across": lambda y: mmdfw.posterior_across(Logistic(2), X, y),
    "as_target": lambda y: as_target(Logistic(2), X, y),
    "batches": lambda y: stack_batches(iter([(X, y)]), 1, Logistic(2)),
    "fit_model on batches": lambda y: mmdfw.fit_model(
        KEY, Logistic(2), batches=iter([(X[:10], y[:10])] * 1000), num_rows=40, **SHORT
    ),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("labels", LABELS)
def test_labels_that_logistic_regression_cannot_take(labels, door):
    y, words = LABELS[labels]
    with pytest.raises(ValueError, match="0 or 1" if "batches" in door and labels == "numbers" else words):
        DOORS[door](y)


@pytest.mark.parametrize("y", [np.zeros(40), np.ones(40), np.arange(40) % 2, (np.arange(40) % 2).astype(np.float32)])
def test_labels_that_it_can(y):
    assert posterior(Logistic(2), X, y).num_rows == 40


def test_a_regression_takes_any_numbers():
    for y, _ in LABELS.values():
        assert posterior(mlp(2, (3,)), X, y).num_rows == 40
    assert check_data(X, LABELS["three"][0])[1].tolist() == list(np.arange(40) % 3), "without a model nothing is asked"


# Tasks of the models that are here ----------------------------------------------------------------


def test_scores_and_monitor_agree():
    "A monitor shows some of the scores, in the target's own units."
    table = as_table(X, 100 + 7 * X[:, 0] + np.sin(X[:, 1]))
    data, model = split(table), mlp(2, (3,))
    particles, weights = jax.vmap(model.sample_prior)(jax.random.split(KEY, 4)), jnp.full(4, 0.25)
    predictive = model.predict(particles, weights, jnp.asarray(data.x_test, dtype=float))
    scores = model.scores(predictive, jnp.asarray(data.y_test, dtype=float), data.scale.y_scale)
    seen = make_monitor(model, data)(particles, weights)
    assert set(seen) == {"rmse", "log_likelihood"} < set(scores)
    for name, value in seen.items():
        assert_close(value, np.float32(scores[name]), rtol=1e-4)
    original = predictive.rescale(data.scale.y_shift, data.scale.y_scale)
    there = model.scores(original, jnp.asarray(data.scale.original_y(data.y_test), dtype=float))
    assert_close(scores["rmse"], there["rmse"], rtol=1e-3)


def test_a_task_is_chosen_by_the_table_or_by_the_user(tmp_path):
    frame = pd.DataFrame(X, columns=["a", "b"])
    for name, y in (("classes", (X[:, 0] > 0).astype(int)), ("numbers", X[:, 0]), ("ones", np.ones(40, int))):
        frame.assign(y=y).to_csv(tmp_path / f"{name}.csv", index=False)
    chosen = {
        name: load_job(Job(str(tmp_path / f"{name}.csv"), "y")).model.task.name for name in ("classes", "numbers")
    }
    assert chosen == {"classes": "classification", "numbers": "regression"}
    assert load_job(Job(str(tmp_path / "classes.csv"), "y", "regression")).data.scale.y_scale != 1
    with pytest.raises(ValueError, match="for a regression"):
        load_job(Job(str(tmp_path / "numbers.csv"), "y", "classification"))


def test_a_network_that_is_flat_has_doubts():
    model = mlp(2, (3,))
    start = jax.tree.map(lambda leaf: leaf[None], model.sample_prior(KEY))
    flat = jax.tree.map(jnp.zeros_like, start)
    x, one = jnp.asarray(X, dtype=float), jnp.ones(1)
    assert "zero weights" in model.doubts(model.predict(flat, one, x)) and not model.doubts(
        model.predict(start, one, x)
    )
    assert not model.doubts(model.predict(flat, one, x[:1])), "one row is always flat"


def test_what_a_model_must_have():
    class Nothing(Model):
        pass

    with pytest.raises(TypeError, match="log_likelihood.*log_prior.*sample_prior"):
        Nothing()

    class Silent(Logistic):
        predict = Model.predict

    with pytest.raises(NotImplementedError, match="Silent has no method `predict`"):
        Silent(2).predict({}, jnp.ones(1), X)
    assert bnn(lambda rngs: mlp(2, (3,)).make(rngs), 2).task.name == "regression"


# A model of a user's own: counts ------------------------------------------------------------------


@pytree_dataclass
class PoissonPredictive:
    "A mixture of Poisson distributions."

    log_rates: jax.Array  # (particles, rows)
    weights: jax.Array  # (particles,)

    def log_likelihood(self, y):
        logs = y * self.log_rates - jnp.exp(self.log_rates) - jax.scipy.special.gammaln(y + 1)
        return jax.nn.logsumexp(logs, axis=0, b=self.weights[:, None])


class Counts(Task):
    name = "counts"
    monitored = {"log_likelihood": "log likelihood"}

    def check_targets(self, y):
        if np.any(y < 0) or np.any(y != np.round(y)):
            raise ValueError(f"counts are whole numbers from 0 on, got {np.asarray(y)[:5].tolist()}")

    def scores(self, predictive, y, scale=1.0):
        return {"log_likelihood": jnp.mean(predictive.log_likelihood(y))}

    def plot_calibration(self, predictive, y, ax=None):
        ax.plot(jnp.exp(predictive.log_rates).mean(0), y, ".")
        return ax


@dataclass(frozen=True)
class Poisson(Model):
    num_features: int
    task = Counts()

    def sample_prior(self, key):
        return {"weights": jax.random.normal(key, (self.num_features,)), "bias": jnp.zeros(())}

    def log_prior(self, params):
        return -0.5 * jnp.sum(params["weights"] ** 2) - 0.5 * params["bias"] ** 2

    def log_likelihood(self, params, x, y):
        log_rate = x @ params["weights"] + params["bias"]
        return y * log_rate - jnp.exp(log_rate)

    def predict(self, particles, weights, x):
        return PoissonPredictive(particles["weights"] @ x.T + particles["bias"][:, None], weights)


@pytest.fixture
def visits(tmp_path):
    "A table of counts, as a file."
    rng = np.random.default_rng(1)
    frame = pd.DataFrame(rng.normal(size=(300, 2)), columns=["rain", "sun"])
    frame["visits"] = rng.poisson(np.exp(0.5 + 0.8 * frame.sun - 0.4 * frame.rain))
    frame.to_csv(tmp_path / "visits.csv", index=False)
    return tmp_path / "visits.csv"


def test_a_model_of_ones_own_is_fitted_and_judged(visits):
    table = mmdfw.load_table(visits, target="visits")
    x = (table.x - table.x.mean(0)) / table.x.std(0)
    result = mmdfw.fit_model(KEY, Poisson(2), x, table.y, **SHORT | dict(first_steps=2000, batch_size=50))
    assert_close(np.mean(result.particles["weights"], 0), np.array([-0.4, 0.8]), rtol=0.3)
    fitted = Poisson(2).scores(result.predict(x), jnp.asarray(table.y))["log_likelihood"]
    flat = PoissonPredictive(jnp.full((1, 300), np.log(table.y.mean())), jnp.ones(1))
    assert fitted > Poisson(2).scores(flat, jnp.asarray(table.y))["log_likelihood"] + 0.1
    with pytest.raises(ValueError, match="counts are whole numbers from 0 on, got .*0.5"):
        mmdfw.fit_model(KEY, Poisson(2), x, table.y + 0.5, **SHORT)


def test_a_model_of_ones_own_on_the_command_line(visits, monkeypatch, capsys):
    "One line in the registry, and `mmdfw fit` knows it: split, monitor, metrics, figure, and more particles later."
    monkeypatch.setitem(MODELS, "counts", lambda columns, job: Poisson(columns))
    out = visits.with_name("run")
    steps = ["--first-steps", "500", "--later-steps", "500", "--batch-size", "50"]
    arguments = ["--data", str(visits), "--target", "visits", "--task", "counts", "--particles", "5", "--out", str(out)]
    assert main(["fit", *arguments, *steps]) == 0, capsys.readouterr().err
    report = json.loads(out.with_suffix(".json").read_text())
    assert set(report["metrics"]) == {"log_likelihood"} and report["job"]["task"] == "counts"
    assert report["records"][-1]["metrics"].keys() == {"log_likelihood"} and out.with_suffix(".png").exists()
    assert main(["fit", "--resume", str(out.with_suffix(".npz")), "--particles", "3"]) == 0, capsys.readouterr().err
    assert json.loads(out.with_suffix(".json").read_text())["particles"] == 8
    wrong = [*arguments[:2], "--target", "sun", *arguments[4:]]
    assert main(["fit", *wrong, *steps]) == 1
    assert "counts are whole numbers" in capsys.readouterr().err


# Command line -------------------------------------------------------------------------------------

BRIEF = ["--data", "diabetes", "--hidden", "3", "--particles", "5", "--first-steps", "100", "--later-steps", "100"]


@pytest.fixture
def untrained(monkeypatch):
    "No training: whoever begins one fails."

    def training(*arguments, **settings):
        raise AssertionError("training has begun")

    monkeypatch.setattr("mmdfw._runs.fit_model", training)
    monkeypatch.setattr("mmdfw._runs.load", training)


def test_names_with_dots_are_different_runs_and_are_resumed_by_the_same_name(tmp_path, capsys):
    for name in ("v1.1", "v1.2"):
        assert main(["fit", *BRIEF, "--out", str(tmp_path / name)]) == 0, capsys.readouterr().err
    written = {f"{name}{suffix}" for name in ("v1.1", "v1.2") for suffix in (".npz", ".json", ".png")}
    assert {path.name for path in tmp_path.iterdir()} == written
    assert main(["fit", "--resume", str(tmp_path / "v1.1"), "--particles", "2"]) == 0, capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == written
    particles = {name: json.loads((tmp_path / f"{name}.json").read_text())["particles"] for name in ("v1.1", "v1.2")}
    assert particles == {"v1.1": 7, "v1.2": 5}
    assert main(["fit", "--resume", str(tmp_path / "v1.2.npz"), "--particles", "1", "--out", str(tmp_path / "v2")]) == 0
    assert json.loads((tmp_path / "v2.json").read_text())["particles"] == 6
    assert json.loads((tmp_path / "v1.2.json").read_text())["particles"] == 5, "the first is as it was"


OPTIONS = {
    "--data": ["diabetes"],
    "--target": ["y"],
    "--task": ["auto"],
    "--hidden": ["3", "3"],
    "--batch-size": ["100"],
    "--first-steps": ["100000"],
    "--later-steps": ["20000"],
    "--split-seed": ["0"],
    "--seed": ["0"],
}


@pytest.mark.parametrize("option", OPTIONS)
def test_resume_refuses_what_it_cannot_follow(option, tmp_path, untrained, capsys):
    "Also where the value is the default: nobody is left to think that it had an effect."
    assert main(["fit", "--resume", str(tmp_path / "run"), option, *OPTIONS[option]]) == 1
    assert f"so {option} cannot be given with it; only --particles, --seconds and --out can" in capsys.readouterr().err


def test_help_says_what_resume_makes_of_particles(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "with --resume, how many to add to those it has" in told
    assert "only --particles, --seconds and --out may be given" in told and "(default: 160000)" in told


def test_an_out_that_cannot_be_written_is_noticed_before_training(tmp_path, untrained, capsys):
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "taken.npz").mkdir()
    for out, words in (("file/run", "cannot write into"), ("taken", "taken.npz: it is a folder")):
        assert main(["fit", *BRIEF, "--out", str(tmp_path / out)]) == 1
        assert words in capsys.readouterr().err
    assert main(["fit", *BRIEF, "--out", str(tmp_path / "new" / "run")]) != 0
    assert "training has begun" in capsys.readouterr().err
    assert not list((tmp_path / "new").iterdir()), "looking leaves nothing behind"


def test_version_and_module():
    told = subprocess.run([sys.executable, "-m", "mmdfw", "--version"], capture_output=True, text=True)
    assert (told.returncode, told.stdout.strip()) == (0, mmdfw.__version__), told.stderr
