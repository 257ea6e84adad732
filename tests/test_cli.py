"""The command line as a user meets it: help, exit codes, one line for an error, JSON, and what a fit says first."""

import json

import pytest

import mmdfw
from mmdfw import cli
from mmdfw.cli import main

SHORT = ["--hidden", "2", "--particles", "3", "--first-steps", "50", "--later-steps", "50"]


def test_help_has_examples_and_exit_codes(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    told = capsys.readouterr().out
    assert stop.value.code == 0 and "mmdfw fit --data diabetes" in told and "exit codes: 0 done" in told


def test_version(capsys):
    assert main(["--version"]) == 0 and capsys.readouterr().out.strip() == mmdfw.__version__


def test_data_as_json(capsys):
    assert main(["data", "--json"]) == 0
    assert {"naval", "diabetes"} <= {entry["name"] for entry in json.loads(capsys.readouterr().out)}


def test_a_fit_says_first_what_it_will_do_and_prints_json_alone(tmp_path, capsys):
    assert main(["fit", "--data", "diabetes", *SHORT, "--out", str(tmp_path / "run"), "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["particles"] == 3
    assert told.err.startswith("diabetes: ") and "This will take some seconds" in told.err


@pytest.mark.parametrize(
    "problem, code, words",
    [
        (ValueError("two\nlines"), 1, "mmdfw: two lines\n"),
        (OSError("no room"), 1, "mmdfw: no room\n"),
        (ModuleNotFoundError("No module named 'pandas'", name="pandas"), 1, "pip install 'mmdfw[tables]'"),
        (KeyError("weights"), 3, "this should not have happened: KeyError: 'weights'"),
        (KeyboardInterrupt(), 130, "mmdfw: interrupted\n"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_are_one_line(problem, code, words, monkeypatch, capsys):
    def fail(options):
        raise problem

    monkeypatch.setattr(cli, "run_demo", fail)
    assert main(["demo"]) == code
    told = capsys.readouterr().err
    assert words in told and told.count("\n") == 1
    monkeypatch.setenv("MMDFW_TRACEBACK", "1")
    main(["demo"])
    assert "Traceback" in capsys.readouterr().err


def test_options_that_need_what_is_missing(monkeypatch, capsys):
    def fail(parser):
        raise ModuleNotFoundError("No module named 'pandas'", name="pandas")

    monkeypatch.setattr(cli, "fit_options", fail)
    assert main(["fit", "--data", "diabetes"]) == 1
    assert "this command needs pandas, which is not installed: pip install 'mmdfw[tables]'" in capsys.readouterr().err
