"""What the docs promise, read from the notebooks: each page has its place, each figure its words, each name its use.

What has not been mended yet stands in `KNOWN_...`. These lists may only shrink: an entry that is not needed fails, too.
"""

import ast
import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import FunctionType

import mmdfw
import pytest, yaml
from fastcore.docments import docments

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted(
    p for p in (ROOT / "nbs").rglob("*.ipynb") if not re.search(r"/[._]", p.relative_to(ROOT).as_posix())
)
ORDER = ("core", "theory", "library", "experiments", "interface")  # tutorials and the pages at the top may import all
GIVEN = {  # what calls give back
    "Fit",
    "Compressed",
    "Draws",
    "Cloud",
    "GaussianApproximation",
    "GaussianPredictive",
    "BernoulliPredictive",
}
MODULES = sorted(
    ".".join(p.relative_to(ROOT / "mmdfw").with_suffix("").parts)
    for p in (ROOT / "mmdfw").rglob("*.py")
    if p.stem not in ("_modidx", "__init__")
)


def cells(path):
    "(cell, its source) for each cell of a notebook."
    return [(c, "".join(c["source"])) for c in json.loads(path.read_text(encoding="utf-8"))["cells"]]


def named(path) -> str:
    "A notebook as the lists below call it, such as theory/10_kernel."
    return path.relative_to(ROOT / "nbs").with_suffix("").as_posix()


def is_exported(source: str) -> bool:
    "Whether a cell goes into the package."
    return bool(re.match(r"(#\|.*\n)*#\|\s*exporti?\b", source))


def sidebar():
    items = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))["website"]["sidebar"]["contents"]
    return [page for item in items for page in ([item] if isinstance(item, str) else item["contents"])]


def test_every_notebook_is_in_the_sidebar():
    there = {p.relative_to(ROOT / "nbs").as_posix() for p in NOTEBOOKS}
    listed = sidebar()
    assert not there - set(listed), f"_quarto.yml does not name {sorted(there - set(listed))}"
    assert len(listed) == len(set(listed)) and all((ROOT / "nbs" / page).is_file() for page in listed)


STARTS = [p for p in NOTEBOOKS if p.parent.name == "tutorials" or p.stem == "10_getting_started"]


@pytest.mark.parametrize("path", STARTS, ids=named)
def test_every_tutorial_opens_in_colab(path):
    "By a link in the second cell, to this very notebook; there the next cell installs what the tutorial needs."
    second = cells(path)[1][1]
    where = f"https://colab.research.google.com/github/mmdfw-developers/mmdfw/blob/main/nbs/{named(path)}.ipynb"
    assert f"[Open in Colab]({where})" in second
    wanted = "'mmdfw[tutorials] @ git+https://github.com/mmdfw-developers/mmdfw'"  # matplotlib is no part of the core
    assert f"pip install {wanted}" in second
    assert '"google.colab" in sys.modules' in cells(path)[2][1] and wanted in cells(path)[2][1]


def test_the_sidebar_is_in_the_order_of_reading():
    items = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))["website"]["sidebar"]["contents"]
    headings = [item["section"].split(":")[0] for item in items if isinstance(item, dict)]
    order = ["Tutorials", "Guides", "Reference", "Theory", "Experiments", "Project"]
    assert list(dict.fromkeys(headings)) == order and items[:2] == ["index.ipynb", "guides/10_getting_started.ipynb"]


def test_the_citation_is_of_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == mmdfw.__version__ and cited["preferred-citation"]["url"].endswith("1805.07912")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_first_cell_is_title_and_subtitle_only(path):
    "nbdev makes front matter of the first cell, and drops whatever else is in it."
    lines = [line for line in cells(path)[0][1].splitlines() if line.strip()]
    assert len(lines) == 2 and lines[0].startswith("# ") and lines[1].startswith("> "), (
        "text below the subtitle belongs into a cell of its own"
    )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_every_figure_has_alternative_text(path):
    """A line `#| fig-alt: "..."` at the head of the cell, read by Quarto, by the Sphinx build and by the README.

    Hidden cells are not shown and need none."""
    without = [
        c["id"]
        for c, source in cells(path)
        if c["cell_type"] == "code"
        and not re.match(r"#\|\s*hide\b", source)
        and any("image/png" in output.get("data", {}) for output in c["outputs"])
        and not re.match(r'(#\|.*\n)*#\| fig-alt: "[^"]{15,}"\n', source)
    ]
    assert not without, f"cells {without} of {path.name} show a figure without fig-alt"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_cells_that_import_do_nothing_else(path):
    """Where a notebook exports, building the docs executes every cell that imports.

    A computation there would run again, or fail for want of the cells above."""
    sources = [source for c, source in cells(path) if c["cell_type"] == "code"]
    exporting = any(map(is_exported, sources))
    for source in sources if exporting else ():
        body = ast.parse(source).body if not is_exported(source) and not re.match(r"[%!]", source) else []
        imports = [isinstance(node, (ast.Import, ast.ImportFrom)) for node in body]
        inside = any(
            isinstance(node, (ast.Import, ast.ImportFrom)) for statement in body for node in ast.walk(statement)
        )
        assert not inside or all(imports), f"imports belong into a cell of their own:\n{source}"


# The order of the notebooks


def module_of(path):
    "The module that a notebook exports to, or None."
    for c, source in cells(path):
        if c["cell_type"] == "code" and (found := re.search(r"^#\|\s*default_exp (\S+)", source, re.M)):
            return f"mmdfw.{found[1]}".removesuffix(".__init__")
    return None


def code(path):
    "(cell, source, syntax tree) for each code cell of a notebook that is not empty; cells with magics are left out."
    for c, source in cells(path):
        if c["cell_type"] == "code" and not re.search(r"^[%!]", source, re.M):
            tree = ast.parse(source)
            if tree.body:
                yield c, source, tree


def imported(tree, modules) -> set:
    "Those of `modules` that a piece of code imports."
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else node.module for name in inside}
    return found & modules.keys()


def place(path) -> tuple:
    "Where a notebook stands in the order of dependence."
    return ORDER.index(path.parent.name), path.name


def backward() -> set:
    "(notebook, later notebook that it imports from), in lessons and exported cells alike."
    modules = {name: path for path in NOTEBOOKS if (name := module_of(path))}
    return {
        (named(path), named(modules[name]))
        for path in NOTEBOOKS
        if path.parent.name in ORDER
        for _, _, tree in code(path)
        for name in imported(tree, modules)
        if modules[name].parent.name not in ORDER or place(modules[name]) > place(path)
    }


KNOWN_BACKWARD = set()


def test_notebooks_import_only_from_those_before_them():
    "The numbers are the order in which the notebooks can be read: neither lessons nor exported code look ahead."
    found = backward()
    assert not found - KNOWN_BACKWARD, f"these look ahead: {sorted(found - KNOWN_BACKWARD)}"
    assert not KNOWN_BACKWARD - found, f"mended, so take it out of KNOWN_BACKWARD: {sorted(KNOWN_BACKWARD - found)}"


def test_imports_are_found_in_every_form():
    modules = {"mmdfw", "mmdfw.kernels", "mmdfw.kernels._kernel", "mmdfw.plots"}
    forms = {
        "import mmdfw": {"mmdfw"},
        "from mmdfw import fit, plots": {"mmdfw", "mmdfw.plots"},
        "from mmdfw.kernels._kernel import RBF, IMQ": {"mmdfw.kernels._kernel"},
        "def f():\n    import mmdfw.kernels as k": {"mmdfw.kernels"},
        "import numpy": set(),
    }
    assert {text: imported(ast.parse(text), dict.fromkeys(modules)) for text in forms} == forms
    assert place(ROOT / "nbs/theory/61_lazy.ipynb") < place(ROOT / "nbs/library/70_model.ipynb")


def test_a_module_is_called_like_its_notebook():
    "Number and underscore aside; the names at the top are the package itself."
    called = {named(path): name for path in NOTEBOOKS if (name := module_of(path)) and name != "mmdfw"}
    other = {
        notebook: name
        for notebook, name in called.items()
        if re.sub(r"^\d+_", "", notebook.split("/")[-1]) != name.split(".")[-1].strip("_")
    }
    assert not other


# Pace


def defined(tree) -> set:
    "The names that an exported cell defines; imports define none, nor do those that wait: `blackjax = later(...)`."
    names = set()
    for node in tree.body:
        if hasattr(node, "name"):
            names.add(node.name)
        elif isinstance(node, ast.Assign) and getattr(getattr(node.value, "func", None), "id", None) == "later":
            continue
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    return names - {"_all_"}


def used(tree) -> set:
    "Every name and attribute that a cell mentions."
    names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    return names | {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}


def idle_and_long(code_cells) -> tuple:
    "How many exported cells are used by neither of the next two code cells, and how many rows of them exceed three."
    given = [defined(tree) if is_exported(source) else set() for _, source, tree in code_cells]
    taken = [used(tree) for _, _, tree in code_cells]
    idle = sum(bool(names) and not names & set().union(*taken[i + 1 : i + 3]) for i, names in enumerate(given))
    return idle, len(re.findall("x{4,}", "".join("x" if names else "." for names in given)))


def test_what_is_exported_is_used_at_once():
    "An exported cell is used by one of the next two code cells, and no more than three follow one another."
    found = {named(path): idle_and_long(list(code(path))) for path in NOTEBOOKS}
    bad = {name: numbers for name, numbers in found.items() if any(numbers)}
    assert not bad, f"(exported cells not used at once, rows of more than three): {bad}"


def test_idle_cells_are_noticed():
    texts = ["#| export\ndef a(): ...", "a()", "#| exporti\nb = 1", "1", "2", "b", "#| exporti\nc = later('c')"]
    rows = ["#| export\ndef a(): ...", "#| export\ndef b(): a()", "#| export\ndef c(): b()", "#| export\nd = c()", "d"]
    assert idle_and_long([(None, text, ast.parse(text)) for text in texts]) == (1, 0)
    assert idle_and_long([(None, text, ast.parse(text)) for text in rows]) == (0, 1)


def long_lines(folder) -> list:
    "(file, text) of lines of more than 120 characters, whatever ruff.toml excuses."
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--line-length=120", "--select=E501"]
    ran = subprocess.run([*command, "--output-format=json", folder], cwd=ROOT, capture_output=True, text=True)
    found = [(Path(one["filename"]), one["location"]["row"]) for one in json.loads(ran.stdout)]
    return [(file.name, file.read_text(encoding="utf-8").splitlines()[row - 1]) for file, row in found]


def test_long_lines_are_nbdevs_own():
    "ruff checks notebooks, tests and tools; in the package only what nbdev itself writes may be longer."
    excused = tomllib.loads((ROOT / "ruff.toml").read_text(encoding="utf-8"))["lint"]["per-file-ignores"]
    assert [name for name, rules in excused.items() if "E501" in rules] == ["mmdfw/**"]
    names = re.compile(r"(__all__ = \[| {11})('\w+',? ?)+\]?$")
    assert [line for file, line in long_lines("mmdfw") if file != "_modidx.py" and not names.match(line)] == []


# Documentation


def folders():
    "The modules whose `__all__` is the public interface: mmdfw, its folders, and those whose name has no underscore."
    yield mmdfw
    for found in pkgutil.iter_modules(mmdfw.__path__, "mmdfw."):
        if found.name.split(".")[-1][0] != "_" and found.name not in ("mmdfw.experiments", "mmdfw.cli"):
            yield importlib.import_module(found.name)


def public():
    "(name of the folder, name, thing) for all that users may call."
    for folder in folders():
        for name in folder.__all__:
            yield folder.__name__, name, getattr(folder, name)


def private():
    "(module, name, thing) for every function and class of the package that is not public."
    known = {id(thing) for _, _, thing in public()}
    for module in MODULES:
        loaded = importlib.import_module(f"mmdfw.{module}")
        for name, thing in vars(loaded).items():
            ours = getattr(thing, "__module__", None) == loaded.__name__
            if name == "_" or not ours or id(thing) in known:
                continue
            if inspect.isclass(thing) or inspect.isfunction(thing):
                yield module, name, thing


def usual() -> set:
    "Arguments that mean the same everywhere: the notation page has them, so that no comment need repeat it."
    table = next(source for _, source in cells(ROOT / "nbs" / "notation.ipynb") if "## Arguments" in source)
    return set(re.findall(r"`(\w+)`", "\n".join(line for line in table.splitlines() if line.startswith("|"))))


def described(thing) -> bool:
    "Whether somebody wrote its docstring; dataclasses and NamedTuples make one up."
    doc = vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__
    return bool(doc) and not doc.startswith(thing.__name__ + "(")


LEANS = re.compile(
    r"(the same|same|either|as above|by name|likewise|ditto|see|and|or|of (one|the|a|an|each)|what `\w+` compiles)\b",
    re.I,
)


def stands(doc: str) -> bool:
    "Whether a docstring is a sentence that can be read without what stands above it."
    return len(doc.split()) >= 4 and not LEANS.match(doc)


def unexplained(thing, known) -> list:
    "Arguments or fields with neither a comment, nor an annotation, nor a place in the glossary."
    if inspect.isclass(thing) and issubclass(thing, tuple):
        return []  # a NamedTuple, whose fields must have types
    notes = docments(thing, full=True)
    return [
        name
        for name, note in notes.items()
        if name not in known | {"self", "return", "args", "kwargs"}
        and not note.docment
        and note.anno is inspect.Parameter.empty
    ]


def silent(thing) -> bool:
    "Whether it gives something back without saying what. Plots take and return their axes."
    returned = [
        node.value
        for node in ast.walk(ast.parse(inspect.getsource(thing)).body[0])
        if isinstance(node, ast.Return) and node.value is not None
    ]
    return inspect.signature(thing).return_annotation is inspect.Signature.empty and any(
        getattr(value, "id", None) != "ax" for value in returned
    )


def test_every_public_name_is_documented():
    """A docstring; for each argument or field a comment, a type, or a place in the glossary; what a function returns.

    Of the classes that users are given every public method has a docstring, too."""
    bad = []
    known = usual()
    for folder, name, thing in public():
        if inspect.isclass(thing) or inspect.isfunction(thing):
            if not described(thing):
                bad.append(f"{folder}.{name}: no docstring")
            bad += [f"{folder}.{name}: {argument}" for argument in unexplained(thing, known)]
        if name in GIVEN:
            bad += [
                f"{folder}.{name}.{label}: no docstring"
                for label, method in vars(thing).items()
                if label[0] != "_" and isinstance(method, (property, FunctionType)) and not method.__doc__
            ]
        if inspect.isfunction(thing) and silent(thing):
            bad.append(f"{folder}.{name}: what it returns")
    assert not bad, f"{len(bad)} undocumented:\n" + "\n".join(bad)


def test_every_private_name_has_a_docstring():
    bad = [f"{module}.{name}" for module, name, thing in private() if not described(thing)]
    assert not bad, f"{len(bad)} without a docstring:\n" + "\n".join(bad)


KNOWN_LEANING = set()


def leaning() -> set:
    "Names, and methods as Class.method, whose docstring does not stand alone."
    found = set()
    for _, name, thing in [*public(), *private()]:
        if not (inspect.isclass(thing) or inspect.isfunction(thing)):
            continue
        docs = {name: thing.__doc__ if described(thing) else None}
        if inspect.isclass(thing):
            docs |= {
                f"{name}.{label}": method.__doc__
                for label, method in vars(thing).items()
                if label[0] != "_" and isinstance(method, (property, FunctionType))
            }
        found |= {label for label, doc in docs.items() if doc and not stands(doc)}
    return found


def test_every_docstring_stands_alone():
    "On a reference page nobody sees the function above."
    found = leaning()
    assert not found - KNOWN_LEANING, f"these lean on what stands above, or say little: {sorted(found - KNOWN_LEANING)}"
    assert not KNOWN_LEANING - found, f"mended, so take it out of KNOWN_LEANING: {sorted(KNOWN_LEANING - found)}"


def test_few_names_stand_at_the_top():
    assert len(mmdfw.__all__) <= 50, f"{len(mmdfw.__all__)} names: what few people need belongs in a folder"


def printed(path) -> str:
    "What the cells of a notebook have printed as Markdown, as it is stored."
    outputs = [output for c, _ in cells(path) for output in c.get("outputs", ())]
    return "\n".join("".join(output.get("data", {}).get("text/markdown", "")) for output in outputs)


def test_the_index_by_task_has_every_public_name():
    "And says of each what it is now; so do the pages of the folders, of their own names."
    index = printed(ROOT / "nbs" / "interface" / "40_tasks.ipynb")
    at_the_top = set(mmdfw.__all__)
    for folder, name, thing in public():
        line = f"| `{folder}.{name}` | "
        line += thing.__doc__.strip().split("\n")[0].replace("|", "\\|") if inspect.isroutine(thing) else ""
        assert line in index or folder != "mmdfw" and name in at_the_top, f"run make outputs on 40_tasks: {line}"
    for page in (ROOT / "nbs" / "interface").glob("1*.ipynb"):
        folder = importlib.import_module(module_of(page))
        missing = [name for name in folder.__all__ if f"| `{folder.__name__}.{name}` | " not in printed(page)]
        assert not missing, f"run make outputs on {page.stem}: {missing}"


def exported_uses() -> dict:
    "For each exported definition the names that its code uses."
    uses = {}
    for module in MODULES:
        path = ROOT / "mmdfw" / f"{module.replace('.', '/')}.py"
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            for name in defined(ast.Module([node], [])):
                uses.setdefault(name, set()).update(used(node) - {name})
    return uses


def shown() -> set:
    "Every word of the cells that are not exported: text, examples and tests."
    found = set()
    for path in NOTEBOOKS:
        for _, source in cells(path):
            if not is_exported(source):
                found |= set(re.findall(r"\w+", source))
    return found


def test_every_name_is_shown_somewhere():
    """A public function stands in a cell that is not exported; every other name does, or is used by one that does.

    Classes may be known by the calls that make them."""
    seen = shown()
    uses = exported_uses()
    packages = {loaded.__name__ for loaded in folders() if hasattr(loaded, "__path__")}
    functions = {name for folder, name, thing in public() if folder in packages and inspect.isfunction(thing)}
    assert not functions - seen, f"no example shows {sorted(functions - seen)}"
    reached, ahead = set(), [name for name in uses if name in seen]
    while ahead:
        name = ahead.pop()
        if name not in reached:
            reached.add(name)
            ahead += [other for other in uses[name] if other in uses]
    missing = [f"{module}.{name}" for module, name, _ in [*public(), *private()] if name not in reached]
    assert not missing, f"{len(missing)} names that no example shows or uses:\n" + "\n".join(missing)


def wordless(a, b: int, c=1):
    return a


def test_what_lacks_words_is_noticed():
    assert unexplained(wordless, {"c"}) == ["a"] and silent(wordless) and not described(wordless)
    assert "wordless" not in shown() | set(exported_uses())
    assert not stands("Either of them, with weights.") and not stands("Equally weighted particles.")
    assert stands("Eleven Gaussians in the plane.")
