"""Nothing grows without bound over many calls, and peak memory is what the page on guidance says."""

import gc, tracemalloc, weakref
import jax, jax.numpy as jnp, numpy as np, optax, pytest

import mmdfw
from mmdfw import _target
from mmdfw._loop import Components, _advance, _begin, empty_state, problem_of
from mmdfw._target import Score, layout_of
from mmdfw.embeddings._embedding import ParticleEmbedding, _look_at_itself
from mmdfw.kernels import default_kernel
from mmdfw.oracles import BatchOracle
from mmdfw.samplers._svgd import jitted_svgd, target_like


def fresh(i):
    "A log density of its own, in operations and in shapes, with data that nobody else holds."
    data = jax.device_put(np.random.default_rng(i).normal(size=(3 + i, 2)).astype(np.float32))  # compiles nothing
    return (lambda x: -0.5 * jnp.mean(jnp.sum((x - data) ** 2, 1)) * (1 + i / 8)), data


def programs():
    return len(jax.devices()[0].client.live_executables())


@pytest.mark.filterwarnings("ignore:this result is")
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


# Peak memory: the table on the page of guidance

BLOCK, NUMBER = 2**22, 4  # pairs; bytes


def taken(program, *arguments):
    "Numbers that a compiled program takes besides its arguments."
    found = program.lower(*arguments).compile().memory_analysis()
    return (found.temp_size_in_bytes + found.output_size_in_bytes) / NUMBER


def held(most, found, slack=20):
    "The formula is a bound, and not an idle one."
    assert most / slack <= found <= most, f"{found:,.0f} numbers where the page has {most:,.0f}"


@pytest.mark.parametrize("m, d", [(1000, 5), (16_384, 50)])
def test_the_look_of_a_reference_set_at_itself(m, d):
    kernel = default_kernel(np.random.default_rng(0).normal(size=(400, d)).astype(np.float32))
    points, weights = jax.ShapeDtypeStruct((m, d), jnp.float32), jax.ShapeDtypeStruct((m,), jnp.float32)
    held(3 * min(m * m, BLOCK) + m * (4 * d + 10), taken(_look_at_itself, kernel, points, weights, None))


@pytest.mark.parametrize("n, d, chunk", [(1500, 20, None), (1500, 20, 100)])
def test_svgd(n, d, chunk):
    target = target_like(lambda x: -0.5 * x @ x, layout_of(jnp.zeros(d)), None)
    start = jax.ShapeDtypeStruct((n, d), jnp.float32)
    found = taken(jitted_svgd, target, start, 10, optax.adam(0.1), "median", None, chunk)
    held(2 * n * min(n, chunk or n) + 12 * n * d + 200_000, found)


def test_fit_model():
    flock, rows, hidden, capacity = 10, 500, 200, 128
    x = np.random.default_rng(0).normal(size=(2000, 20)).astype(np.float32)
    target = _target.as_target(mmdfw.mlp(20, (hidden,)), x, x[:, 0], batch_size=rows)
    kernel, d = mmdfw.RBF(1.0), target.dimension
    oracle = BatchOracle(target, particles_per_step=flock)
    parts = Components(kernel, ParticleEmbedding(kernel, Score(target), "alone"), oracle, mmdfw.ConstantStep())
    key, state = jax.random.key(0), jax.eval_shape(lambda: empty_state(parts, capacity, jnp.zeros(d)))
    problem = problem_of(parts, state)
    search = jax.eval_shape(_begin, oracle, key, problem)
    most = 4 * flock * rows * hidden + capacity * d + 8 * flock * d
    held(most, taken(_advance, oracle, key, search, problem, 100.0, None))


def peak_of(call):
    "Bytes that NumPy and Python take at most during a call."
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.filterwarnings("ignore:this result is")
def test_compress_on_the_host():
    "The draws and their copies; 2,000 draws come without a compiler."
    m, d = 2000, 100
    draws = np.random.default_rng(0).normal(size=(m, d)).astype(np.float32)
    quiet = dict(num_particles=5, refine=False, progress=False)
    mmdfw.compress(jax.random.key(0), draws[:300], **quiet)  # what is imported and compiled once is not counted
    most = 3 * min(m * m, BLOCK) + m * (4 * d + 10) + 6 * m * d
    assert peak_of(lambda: mmdfw.compress(jax.random.key(0), draws, **quiet)) <= NUMBER * most
