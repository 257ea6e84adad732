"""Programs as users compile them: `make test` asks XLA to optimise little, these tests ask for all of it."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest
from mmdfw._checks import assert_close
from mmdfw.kernels._kernel import RBF, squared_distances
from mmdfw.kernels._stein_kernel import Stein

OPTIMISED = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
}
if tuple(map(int, jaxlib.__version__.split(".")[:2])) < (0, 11):  # later ones do not know it
    OPTIMISED["xla_cpu_use_fusion_emitters"] = True


@pytest.mark.parametrize("d", [3, 5, 6, 7])
@pytest.mark.parametrize("n", [2, 4])
def test_few_points_against_many(n, d):
    "XLA 0.10 on the CPU fused sums with products and spoilt columns beyond 16,384."
    with jax.enable_x64(True):
        many = np.random.default_rng(d).normal(size=(20_000, d))
        direct = ((many[:n, None] - many) ** 2).sum(-1)
        few, many = jnp.asarray(many[:n]), jnp.asarray(many)
        assert_close(jax.jit(squared_distances, compiler_options=OPTIMISED)(few, many), direct, rtol=1e-9, atol=1e-9)
        kernel = Stein(RBF(1.3), lambda x: -x)
        assert_close(
            jax.jit(kernel.matrix, compiler_options=OPTIMISED)(few, many),
            kernel.matrix(few, many),
            rtol=1e-9,
            atol=1e-9,
        )


FIT = """
import sys; sys.path.insert(0, "tests")
import json, jax, jax.numpy as jnp
from conftest import gaussian
from mmdfw._fit import fit
settings = dict(num_particles=20, max_refinement_steps=100, progress=False)
found = fit(jax.random.key(0), gaussian, jnp.zeros(2), **settings)
print(json.dumps([found.expectation(lambda x: x)[0].tolist(), float(found.weights.sum())]))
"""


def test_a_fit_is_the_same_with_and_without_optimisation(gaussian_fit, request):
    keep = {
        name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")
    }
    out = subprocess.run(
        [sys.executable, "-c", FIT], env=keep, cwd=request.config.rootpath, capture_output=True, text=True, timeout=300
    )
    assert out.returncode == 0, out.stderr
    mean, total = json.loads(out.stdout)
    # the target's standard deviations are 1 and 0.5, and 20 particles are within 1e-2 of its mean
    assert_close(np.asarray(mean), np.asarray(gaussian_fit.expectation(lambda x: x)[0]), atol=5e-3)
    assert_close(total, float(gaussian_fit.weights.sum()), rtol=1e-3)


COLD = """
import json, jax, jax.numpy as jnp, mmdfw
from mmdfw._mixture import eleven_gaussians
target, zeros = eleven_gaussians(), jnp.zeros(2)
keys = [jax.random.key(i) for i in range(3)]
compiled = [[]]
note = lambda name, took, **more: compiled[-1].append(more.get("fun_name")) if "backend_compile" in name else None
jax.monitoring.register_event_duration_secs_listener(note)
tempered = lambda x: 0.5 * target.logdensity(x)  # another function of the same shape
for key, logdensity in zip(keys, (target.logdensity, tempered, tempered)):
    mmdfw.fit(key, logdensity, zeros, progress=False)
    compiled.append([])
mmdfw.fit(keys[0], tempered, zeros, kernel=mmdfw.RBF(0.5), progress=False)  # by programs throughout
print(json.dumps(compiled))
"""


def test_a_first_fit_compiles_few_programs_and_a_second_only_those_that_hold_its_target():
    out = subprocess.run([sys.executable, "-W", "ignore", "-c", COLD], capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stderr
    first, second, again, own_kernel = json.loads(out.stdout)
    assert 0 < len(first) <= 5, first
    assert 0 < len(second) <= 3, second
    assert not again, "the same function again compiles nothing"
    assert 0 < len(own_kernel) <= 12, own_kernel
