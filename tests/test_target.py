"""One target for all: fresh functions over other data of the same form share compiled code, and errors are our own."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mmdfw
from mmdfw import _result, _target
from mmdfw._target import as_target, traced


def table(seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(40, 2))
    return x, (rng.uniform(size=40) < 1 / (1 + np.exp(-x[:, 0]))).astype(float)


def log_posterior(seed):
    "A new function for each table, with a rule of JAX's own for its derivative, and the table inside."
    x, y = table(seed)
    return lambda w: jnp.sum(y * (x @ w) - jax.nn.softplus(x @ w)) - 0.5 * w @ w


def test_twenty_data_sets_compile_the_target_once():
    programs = (
        _target._jitted_logs,
        _target._jitted_both,
    )
    asked = dict(num_particles=3, max_refinement_steps=5, progress=False)  # its steps do not ask the target
    run = lambda seed: mmdfw.fit(jax.random.key(seed), log_posterior(seed), jnp.zeros(2), **asked)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = [run(0)]
        before = [program._cache_size() for program in programs]
        results += [run(seed) for seed in range(1, 20)]
    assert [program._cache_size() for program in programs] == before
    assert len({float(result.positions[0, 0]) for result in results}) == 20
    for seed in (0, 13):
        direct = jax.vmap(log_posterior(seed))(results[seed].positions)
        assert np.allclose(jax.vmap(results[seed].target)(results[seed].positions), direct, rtol=1e-5)


def test_models_on_other_rows_share_code():
    targets = [as_target(mmdfw.Logistic(2), *table(seed)) for seed in range(3)]
    before = _target._jitted_logs._cache_size()
    values = [_target.log_densities(target, jnp.full((2, 4), 0.5)) for target in targets]
    assert _target._jitted_logs._cache_size() == before + 1 and len({float(v[0]) for v in values}) > 1


def test_value_slope_and_curvature_are_those_of_the_function():
    w = jnp.array([0.3, -0.7])
    for f in (
        log_posterior(4),
        jax.jit(log_posterior(4)),
        lambda w: jax.lax.cond(w[0] > 0, lambda: -(w @ w), lambda: w[0]) + jax.scipy.special.logsumexp(w),
        lambda w: jax.lax.scan(lambda c, r: (c - (r @ w) ** 2, None), 0.0, jnp.asarray(table(1)[0]))[0],
        lambda w: -jnp.sum(jnp.linalg.solve(jnp.eye(2) + jnp.outer(w, w), w) ** 2),
        lambda w: -jnp.sum(jax.nn.relu(w)) - jnp.max(jnp.abs(w)),
    ):
        program = traced(f, w, differentiable=True)
        assert np.allclose(jax.jit(program)(w), f(w), rtol=1e-5)
        assert np.allclose(jax.grad(program)(w), jax.grad(f)(w), rtol=1e-4, atol=1e-6)
        assert np.allclose(jax.hessian(program)(w), jax.hessian(f)(w), rtol=1e-3, atol=1e-4)
        many = jnp.stack([w, 2 * w, -w])
        assert np.allclose(jax.vmap(program)(many), jax.vmap(f)(many), rtol=1e-5)


def test_programs_that_differ_are_not_taken_for_each_other():
    w = jnp.ones(2)
    hidden = [jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0])]

    def behind_a_rule(data):
        @jax.custom_jvp
        def f(w):
            return jnp.sum(w)

        f.defjvp(lambda primals, tangents: (f(*primals), data @ tangents[0]))
        return f

    one, other = (traced(behind_a_rule(data), w, differentiable=True) for data in hidden)
    evaluate = jax.jit(jax.grad(lambda w, program: program(w)))
    assert np.allclose(evaluate(w, one), hidden[0]) and np.allclose(evaluate(w, other), hidden[1])
    scales = [traced(lambda w, c=c: c * jnp.sum(w), w, differentiable=True) for c in (1.0, 2.0)]
    assert [float(evaluate(w, program)[0]) for program in scales] == [1.0, 2.0]


def numpy_density(x):
    return -0.5 * np.sum(np.square(np.asarray(x)))


@pytest.mark.parametrize("call", ("fit", "nuts", "svgd"))
def test_a_density_in_numpy_is_named(call):
    run = dict(
        fit=lambda f: mmdfw.fit(jax.random.key(0), f, jnp.zeros(2)),
        nuts=lambda f: mmdfw.nuts(jax.random.key(0), f, jnp.zeros(2)),
        svgd=lambda f: mmdfw.svgd(f, jnp.ones((3, 2))),
    )[call]
    for f in (numpy_density, lambda x: -abs(float(x[0])), lambda x: -x[0] if x[0] > 0 else x[0]):
        with pytest.raises(ValueError, match="must be written with jax.numpy"):
            run(f)


def test_a_name_that_the_position_lacks_is_named():
    "The keys that there are, from every call that takes a density; the user's own line stays in the traceback."
    wrong = lambda p: -(p["a"] ** 2) - jnp.sum(p["inner"]["slope"] ** 2)
    position = {"level": jnp.zeros(()), "inner": {"slope": jnp.zeros(2)}}
    calls = (
        lambda: mmdfw.fit(jax.random.key(0), wrong, position),
        lambda: mmdfw.nuts(jax.random.key(0), wrong, position),
        lambda: mmdfw.svgd(wrong, jax.tree.map(lambda leaf: jnp.stack([leaf, leaf + 1]), position)),
    )
    for call in calls:
        with pytest.raises(ValueError, match="KeyError: 'a'; the position has the keys inner.slope, level") as told:
            call()
        assert isinstance(told.value.__cause__, KeyError)


@pytest.mark.parametrize("key", (0, None, 1.5, np.random.default_rng(0), jnp.zeros(2)), ids=repr)
def test_what_is_not_a_key_is_named(key):
    f = lambda x: -x @ x
    for run in (
        lambda: mmdfw.fit(key, f, jnp.zeros(2)),
        lambda: mmdfw.nuts(key, f, jnp.zeros(2)),
        lambda: mmdfw.compress(key, jnp.ones((5, 2)), 2),
    ):
        with pytest.raises(ValueError, match="key must be a random key, got"):
            run()


def test_a_target_brings_its_start():
    target = as_target(log_posterior(0), jnp.zeros(2))
    by_target = mmdfw.fit(jax.random.key(0), target, num_particles=2, refine=False)
    by_parts = mmdfw.fit(jax.random.key(0), log_posterior(0), jnp.zeros(2), num_particles=2, refine=False)
    assert np.array_equal(by_target.positions, by_parts.positions)


def test_names_of_coordinates():
    target = as_target(lambda p: -(p["a"] @ p["a"]) - p["b"] ** 2, {"a": jnp.zeros(2), "b": jnp.zeros(())})
    assert target.names == ("a[0]", "a[1]", "b") and target.dimension == 3


def test_compressed_draws_come_back_from_their_file_alone(tmp_path):
    draws = {"a": jax.random.normal(jax.random.key(0), (200, 2)), "b": jax.random.normal(jax.random.key(1), (200,))}
    result = mmdfw.compress(jax.random.key(2), draws, 5, max_refinement_steps=10)
    again = mmdfw.load(result.save(tmp_path / "draws.npz"))
    assert jax.tree.all(jax.tree.map(np.array_equal, again.particles, result.particles))
    assert np.array_equal(again.add(3).positions, result.add(3).positions)
    assert np.allclose(again.expectation(lambda p: p["b"]).mean, result.expectation(lambda p: p["b"]).mean)
    assert isinstance(result, _result.Result) and repr(again) == repr(result)
