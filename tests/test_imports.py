"""What is imported when: each program runs in a process of its own, which says what it has loaded.

Nothing is timed here. A package that is not loaded takes no time.
"""

import subprocess
import sys

import mmdfw
import pytest
from mmdfw._later import imports_of

LARGE = ("blackjax", "flax", "matplotlib", "pandas", "pooch", "sklearn")  # each takes a tenth of a second or more
FOLDERS = sorted(name for name, module in imports_of("mmdfw").items() if module == "mmdfw")
PACKAGES = [  # those among them that look their names up
    folder for name in FOLDERS if hasattr(folder := getattr(mmdfw, name), "__all__") and imports_of(folder.__name__)
]
MIXTURE = """
import jax, jax.numpy as jnp, mmdfw
means = jnp.array([[-1.0, 0.0], [1.0, 0.5]])
logdensity = lambda x: jax.nn.logsumexp(-0.5 * jnp.sum((x - means) ** 2, 1))
result = mmdfw.fit(jax.random.key(0), logdensity, jnp.zeros(2), num_particles=5)
"""


def run(program: str) -> list[str]:
    "The lines that a program prints."
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def loaded(program: str) -> set:
    "The packages that a program has loaded, by their first names."
    names = "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    return set(run(f"import sys\n{program}\n{names}")[-1].split())


def test_import_mmdfw_loads_nothing_large():
    found = loaded("import mmdfw; dir(mmdfw)")
    assert "mmdfw" in found and not found & {*LARGE, "jax", "numpy", "scipy", "optax", "tqdm"}


def test_folders_load_nothing_large():
    "Nor do the modules beside them: bounds, contracts and plots."
    found = loaded("import mmdfw\n" + "\n".join(f"mmdfw.{folder}" for folder in FOLDERS))
    assert "jax" in found and not found & set(LARGE)


def test_a_plain_fit_loads_nothing_large():
    """The importance cloud is trusted here, so nothing runs a chain.

    In a notebook without ipywidgets `tqdm.auto`, which chooses a progress bar, would print a warning when imported."""
    found = loaded(MIXTURE + "assert 'tqdm.auto' not in sys.modules and len(result) == 5")
    assert "jax" in found and not found & set(LARGE)


def test_what_is_needed_is_loaded():
    "A list of what is absent would also pass if it were misspelt."
    uses = """
import jax, jax.numpy as jnp, mmdfw
mmdfw.nuts(jax.random.key(0), lambda x: -0.5 * x @ x, jnp.zeros(2), num_draws=20, num_warmup=20, num_chains=2)
mmdfw.mlp(2), mmdfw.load_table("diabetes"), mmdfw.data.catalogue(), mmdfw.plots.plot_style()
"""
    assert loaded(uses) >= set(LARGE)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["data", "--help"], ["demo", "--particles", "-3"]])
def test_the_command_line_answers_without_jax(arguments):
    "`mmdfw fit --help` does need it: it says what the defaults of a fit are."
    program = f"from mmdfw.cli import main\ntry:\n    main({arguments})\nexcept SystemExit:\n    pass"
    found = loaded(program)
    assert "argparse" in found and not found & {*LARGE, "jax", "numpy", "scipy"}


def test_names_are_the_same_by_every_way():
    from mmdfw import fit, kernels
    from mmdfw import _fit as module
    from mmdfw.kernels import RBF

    assert fit is mmdfw.fit is module.fit and RBF is mmdfw.RBF is kernels.RBF is mmdfw.kernels._kernel.RBF
    assert callable(mmdfw.svgd) and mmdfw.svgd is mmdfw.samplers.svgd
    with pytest.raises(AttributeError, match="module 'mmdfw' has no attribute 'fitt'"):
        getattr(mmdfw, "fitt")  # noqa: B009
    with pytest.raises(ImportError, match="cannot import name 'fitt'"):
        from mmdfw import fitt  # noqa: F401


@pytest.mark.parametrize("package", [mmdfw, *PACKAGES], ids=lambda package: package.__name__)
def test_what_is_listed_is_there(package):
    "The list of names, the table of modules and the list for tab completion agree; folders stand in the table too."
    assert set(package.__all__) <= set(dir(package)) and all(hasattr(package, name) for name in package.__all__)
    table = imports_of(package.__name__)
    assert {name for name, module in table.items() if module != package.__name__} == set(package.__all__)


def test_help_inspect_and_pickle_see_no_difference():
    program = """
import inspect, pickle, pydoc, mmdfw
from mmdfw import *
assert set(mmdfw.__all__) <= globals().keys()
members = dict(inspect.getmembers(mmdfw))
assert set(mmdfw.__all__) <= members.keys() and "log density" in pydoc.render_doc(mmdfw)
assert inspect.getsource(mmdfw.fit).startswith("def fit(") and inspect.signature(mmdfw.fit).parameters
kernel = pickle.dumps(mmdfw.RBF(0.5))
assert pickle.loads(kernel).lengthscale == 0.5 and pickle.loads(pickle.dumps(mmdfw.fit)) is mmdfw.fit
print(kernel.hex())
"""
    kernel = run(program)[-1]
    assert run(f"import pickle; print(pickle.loads(bytes.fromhex('{kernel}')).lengthscale)") == ["0.5"]


def test_a_file_may_name_what_has_not_been_used(tmp_path):
    "Reading it imports the class that it names: here an oracle that no other module loads."
    path = tmp_path / "result.npz"
    oracle = "mmdfw.oracles.MonteCarloOracle([(-4.0, 4.0)] * 2)"
    fit = MIXTURE.replace("num_particles=5", f"num_particles=5, oracle={oracle}")
    run(fit + f"result.save({str(path)!r})")
    again = (
        MIXTURE.rpartition("\nresult")[0]
        + f"""
import sys
assert "mmdfw.oracles._search" not in sys.modules
again = mmdfw.load({str(path)!r}, logdensity, jnp.zeros(2))
print(type(again.parts.oracle).__name__)
"""
    )
    assert run(again) == ["MonteCarloOracle"]
