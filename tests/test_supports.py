"""Bounded parameters: every Jacobian against the determinant by autodiff, there and back, batches, refusals."""

import jax, jax.numpy as jnp, numpy as np, pytest

import mmdfw
from mmdfw._checks import assert_close
from mmdfw._draws import as_source, in_coordinates
from mmdfw._target import as_target
from mmdfw.supports import Above, Below, Cholesky, Correlation, Interval, Ordered, Real, Simplex, transform

BELOW_DIAGONAL = lambda n, k: lambda x: x[np.tril_indices(n, k)]
CASES = {  # support, free coordinates, entries that say everything
    "real": (Real(), 3, jnp.ravel),
    "above": (Above(-2.0), 3, jnp.ravel),
    "below": (Below(5.0), 3, jnp.ravel),
    "interval": (Interval(-1.0, 4.0), 3, jnp.ravel),
    "simplex": (Simplex(), 4, lambda x: x[:-1]),
    "ordered": (Ordered(), 4, jnp.ravel),
    "cholesky": (Cholesky(), 6, BELOW_DIAGONAL(3, 0)),
    "correlation": (Correlation(), 6, BELOW_DIAGONAL(4, -1)),
}


@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("name", CASES)
def test_jacobian_and_the_way_back(name, scale, x64):
    support, size, part = CASES[name]
    u = scale * jnp.asarray(np.random.default_rng(size).normal(size=size))
    x, log_det = support.outward(u)
    assert np.all(support.holds(x))
    assert_close(support.inward(x), u, rtol=1e-6, atol=1e-6)
    jacobian = jax.jacobian(lambda u: part(support.outward(u)[0]))(u)
    assert_close(jnp.sum(log_det), np.linalg.slogdet(np.asarray(jacobian))[1], rtol=1e-8, atol=1e-10)


def test_leading_axes_are_a_batch():
    start = {"shares": jnp.full((3, 4), 0.25), "scale": jnp.ones((2, 2))}
    target = transform(lambda p: jnp.sum(p["shares"] ** 2), start, {"shares": "simplex", "scale": "positive"})
    assert target.dimension == 3 * 3 + 4
    u = jnp.asarray(np.random.default_rng(0).normal(size=13), jnp.float32)
    outside, log_det = target.function.both(target.layout.unravel(u))
    assert_close(outside["shares"].sum(-1), np.ones((3, 4))[:, 0], rtol=1e-5)
    by_row = [Simplex().outward(row)[1] for row in u[4:].reshape(3, 3)]
    assert_close(log_det, sum(by_row) + jnp.sum(u[:4]), rtol=1e-4)


def test_supports_of_any_form_and_what_is_left_out():
    start = {"a": jnp.ones(2), "b": (jnp.ones(()), jnp.zeros(()))}
    one = transform(lambda p: jnp.sum(p["a"]) + p["b"][1], start, {"b": ("positive", None)})
    assert [type(each) for each in one.function.supports] == [Real, Above, Real]
    assert all(
        isinstance(each, Above) for each in transform(lambda x: -jnp.sum(x), jnp.ones(3), "positive").function.supports
    )


@pytest.mark.parametrize(
    "position, supports, words",
    [
        (jnp.array([-1.0]), "positive", r"position must lie inside its support, Above\(low=0.0\); got \[-1.\]"),
        (jnp.array([0.5, 0.6]), "simplex", "position must lie inside its support, Simplex"),
        (jnp.array([2.0, 1.0]), "ordered", "inside its support, Ordered"),
        (jnp.array(1.0), "ordered", "Ordered needs 1 axes or more"),
        ({"a": jnp.ones(1)}, {"b": "positive"}, r"supports names \['b'\], the position has \['a'\]"),
        (jnp.ones(1), "positiv", "one of .*'positive'.*got 'positiv'"),
        (jnp.ones(1), 3, "got 3"),
        (jnp.ones(1, int), "positive", "dtype int32"),
    ],
)
def test_what_is_refused(position, supports, words):
    with pytest.raises(ValueError, match=words):
        transform(lambda p: -jnp.sum(jax.tree.leaves(p)[0]), position, supports)


def test_draws_go_into_the_coordinates_of_the_target():
    "A draw outside the support is refused by its row."
    target = transform(lambda p: -p["rate"], {"rate": jnp.ones(())}, {"rate": "positive"})
    rates = np.random.default_rng(0).exponential(size=(4, 50)).astype(np.float32)
    inside = in_coordinates(as_source({"rate": rates}, None), target)
    assert_close(inside.points[:, 0], np.log(rates).ravel(), rtol=1e-5)
    assert inside.num_chains == 4 and inside.rhat.shape == (1,)
    rates[2, 3] = -1.0
    with pytest.raises(ValueError, match=r"rows \[103\]"):
        in_coordinates(as_source({"rate": rates}, None), target)


def test_positions_are_taken_in_the_users_own_space():
    target = transform(lambda p: -p["rate"], {"rate": jnp.ones(())}, {"rate": "positive"})
    assert_close(as_target(target, {"rate": jnp.array(2.0)}).start, [np.log(2.0)], rtol=1e-6)
    with pytest.raises(ValueError, match="position has the form"):
        as_target(target, {"ratio": jnp.array(2.0)})
    assert "transform" in mmdfw.__all__ and mmdfw.transform is transform
