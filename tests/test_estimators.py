"""Estimators for scikit-learn: its own checks, its own tools, and predictions in the user's units."""

import pickle
import subprocess
import sys

import numpy as np, pandas as pd, pytest, scipy.sparse
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.exceptions import NotFittedError
from sklearn.impute import SimpleImputer
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder
from sklearn.utils.estimator_checks import parametrize_with_checks

from mmdfw._checks import assert_close
from mmdfw.sklearn import ParticleClassifier, ParticleRegressor

# The checks come with many shapes, and each is compiled: the smallest network, and it only climbs.
SMALL = dict(hidden=(), n_particles=2, first_steps=300, learning_rate=0.05, walk=False, random_state=0)
BRIEF = dict(hidden=(3,), n_particles=4, first_steps=300, later_steps=20, learning_rate=0.05, random_state=0)
RNG = np.random.default_rng(0)
X = 100 + 10 * RNG.normal(size=(60, 2))
Y = 5000 + 20 * (X[:, 0] - 100) + 30 * RNG.normal(size=60)

pytestmark = pytest.mark.filterwarnings("ignore:this result is:UserWarning")  # few steps, and rows without a pattern


@parametrize_with_checks([ParticleRegressor(**SMALL), ParticleClassifier(**SMALL)])
def test_what_scikit_learn_asks_of_estimators(estimator, check):
    check(estimator)


def test_predictions_are_in_the_users_units():
    fitted = ParticleRegressor(**BRIEF).fit(X, Y)
    mean, sd = fitted.predict(X, return_std=True)
    assert fitted.score(X, Y) > 0.8 and np.all((10 < sd) & (sd < 200))
    assert_close(mean, fitted.predict(X))
    low, middle, high = fitted.predict_quantiles(X).T
    assert np.all((low < middle) & (middle < high)) and np.mean((low < Y) & (Y < high)) > 0.8
    assert_close(middle, mean, rtol=0.01)
    shifted = ParticleRegressor(**BRIEF).fit(1000 * X - 7, -3 * Y)
    assert_close(shifted.predict(1000 * X - 7), -3 * mean, rtol=0.01)  # units make no difference


def test_noise_that_depends_on_the_row():
    noisy = Y + 10 * (X[:, 1] - X[:, 1].min()) * RNG.normal(size=60)
    fitted = ParticleRegressor(likelihood="noisy", **BRIEF | dict(first_steps=1000)).fit(X, noisy)
    sd = fitted.predict(X, return_std=True)[1]
    assert np.corrcoef(sd, X[:, 1])[0, 1] > 0.5 and fitted.predict_quantiles(X, 0.5).shape == (60, 1)


def test_counts_have_counts_as_quantiles():
    counts = RNG.poisson(np.exp((X[:, 0] - 90) / 10))
    fitted = ParticleRegressor(likelihood="poisson", **BRIEF).fit(X, counts)
    found = fitted.predict_quantiles(X, [0.05, 0.5, 0.95])
    assert np.all(fitted.predict(X) > 0) and np.array_equal(found, np.round(found))
    assert np.mean((found[:, 0] <= counts) & (counts <= found[:, 2])) > 0.8
    with pytest.raises(ValueError, match="whole numbers"):
        clone(fitted).fit(X, Y + 0.5)


@pytest.mark.parametrize("labels", [["no", "yes"], [-1, 1], [False, True], ["a", "b", "c"], [2.0, 5.0, 7.0]], ids=str)
def test_labels_of_any_type(labels):
    y = np.array(labels)[np.searchsorted([95, 105][: len(labels) - 1], X[:, 0])]
    fitted = ParticleClassifier(**BRIEF).fit(X, y)
    told = fitted.predict_proba(X)
    assert fitted.classes_.tolist() == labels and told.shape == (60, len(labels)) and fitted.score(X, y) > 0.85
    assert fitted.predict(X).dtype == y.dtype
    assert_close(told.sum(1), np.ones(60))
    assert len(fitted.weights_) == 4 and fitted.verdict_ in fitted.report_


def test_more_networks_by_warm_start():
    growing = ParticleRegressor(warm_start=True, **BRIEF).fit(X, Y)
    first = growing.particles_["log_noise_precision"]
    growing = pickle.loads(pickle.dumps(growing)).set_params(n_particles=8).fit(X, Y)
    assert_close(growing.particles_["log_noise_precision"][:4], first)
    at_once = ParticleRegressor(**BRIEF | dict(n_particles=8)).fit(X, Y)
    assert_close(growing.predict(X), at_once.predict(X), rtol=1e-4)
    assert growing.fit(X, Y).weights_.shape == (8,), "nothing to add"
    for change, data in (({}, (X, Y + 1)), ({"hidden": (4,)}, (X, Y)), ({"later_steps": 21}, (X, Y))):
        with pytest.raises(ValueError, match="same rows with the same settings"):
            pickle.loads(pickle.dumps(growing)).set_params(n_particles=9, **change).fit(*data)
    with pytest.raises(ValueError, match="n_particles must be at least 8, got 2"):
        growing.set_params(n_particles=2).fit(X, Y)
    assert growing.set_params(n_particles=4, warm_start=False).fit(X, Y).weights_.shape == (4,), "or it begins anew"


def test_pickles_are_plain_and_small():
    kept = pickle.dumps(ParticleRegressor(**BRIEF).fit(X, Y))
    assert len(kept) < 10_000
    there = f"import pickle, sys; print(pickle.loads(bytes.fromhex('{kept.hex()}')).predict([[100.0, 100.0]])[0])"
    ran = subprocess.run([sys.executable, "-c", there], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert_close(float(ran.stdout), pickle.loads(kept).predict([[100.0, 100.0]])[0], rtol=1e-4)


def test_a_table_goes_through_a_pipeline():
    frame = pd.DataFrame(X, columns=["length", "width"]).assign(kind=np.where(X[:, 1] > 100, "large", "small"))
    frame.loc[::7, "length"] = np.nan
    columns = ColumnTransformer(
        [("numbers", SimpleImputer(), ["length", "width"]), ("words", OneHotEncoder(sparse_output=False), ["kind"])]
    ).set_output(transform="pandas")
    pipeline = make_pipeline(columns, ParticleRegressor(**BRIEF))
    assert cross_val_score(pipeline, frame, Y, cv=2).shape == (2,)
    search = GridSearchCV(pipeline, {"particleregressor__first_steps": [100, 300]}, cv=2).fit(frame, Y)
    best = search.best_estimator_[-1]
    assert list(best.feature_names_in_)[:2] == ["numbers__length", "numbers__width"] and best.n_features_in_ == 4
    assert pipeline.fit(frame, Y).predict(frame, return_std=True)[1].shape == (60,)


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(hidden=(0,)), "hidden must be a whole number of at least 1, got 0"),
        (dict(activation="step"), "activation"),
        (dict(n_particles=0), "n_particles must be a whole number of at least 1, got 0"),
        (dict(likelihood="cauchy"), "likelihood"),
        (dict(first_steps=0), "first_steps must be a whole number"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused_in_fit(change, words):
    with pytest.raises(ValueError, match=words):
        ParticleRegressor(**BRIEF).set_params(**change).fit(X, Y)


def test_what_is_refused():
    with pytest.raises(TypeError, match="[Ss]parse"):
        ParticleRegressor(**BRIEF).fit(scipy.sparse.csr_matrix(X), Y)
    with pytest.raises(TypeError, match="sample_weight"):
        ParticleRegressor(**BRIEF).fit(X, Y, sample_weight=np.ones(60))
    with pytest.raises(ValueError, match=r"one class only, \['a'\]"):
        ParticleClassifier(**BRIEF).fit(X, ["a"] * 60)
    with pytest.raises(NotFittedError):
        ParticleRegressor().predict_quantiles(X)
    fitted = ParticleRegressor(**BRIEF).fit(X, Y)
    for levels in (0, 1.0, 95, [[0.5]]):
        with pytest.raises(ValueError, match="levels must lie strictly between 0 and 1"):
            fitted.predict_quantiles(X, levels)


def test_without_scikit_learn_the_error_names_the_extra():
    program = """
import sys
sys.modules["sklearn"] = None
import mmdfw.sklearn
try:
    mmdfw.sklearn.ParticleRegressor
except ModuleNotFoundError as problem:
    print(problem)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "mmdfw.sklearn.ParticleRegressor needs sklearn" in ran.stdout, ran.stderr
    assert "pip install 'mmdfw[tables]'" in ran.stdout
