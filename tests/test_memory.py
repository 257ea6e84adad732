"""Nothing grows without bound over many calls, and peak memory is what the page on guidance says."""

import gc, weakref
import jax, jax.numpy as jnp, numpy as np

import mmdfw
from mmdfw import _target


def fresh(i):
    "A log density of its own, in operations and in shapes, with data that nobody else holds."
    data = jnp.asarray(np.random.default_rng(i).normal(size=(3 + i, 2)), jnp.float32)
    return (lambda x: -0.5 * jnp.mean(jnp.sum((x - data) ** 2, 1)) * (1 + i / 8)), data


def programs():
    return len(jax.devices()[0].client.live_executables())


def test_fits_of_fresh_functions_leave_nothing_behind(monkeypatch):
    "Every one compiles anew; what was compiled for those that are gone is released each time that five have gone."
    monkeypatch.setattr(_target, "FORMS", 4)
    gone, counts, forms = [], [], []
    for i in range(13):
        function, data = fresh(i)
        gone += [weakref.ref(function), weakref.ref(data)]
        mmdfw.fit(jax.random.key(0), function, jnp.zeros(2), num_particles=3, refine=False, progress=False)
        del function, data
        gc.collect()
        counts.append(programs())
        forms.append(len(_target._living))
    assert all(each() is None for each in gone)
    assert max(counts[7:]) <= max(counts[:7]) and max(forms) <= 4 + 2, (counts, forms)
    assert sum(array.nbytes for array in jax.live_arrays()) < 2**20


def test_a_released_target_can_be_used_again():
    kept = _target.as_target(lambda x: -0.5 * x @ x, jnp.zeros(2))
    points = np.ones((3, 2), np.float32)
    before = _target.log_densities(kept, points)
    _target.release_programs()
    assert _target._jitted_logs._cache_size() == 0
    assert np.array_equal(_target.log_densities(kept, points), before)
