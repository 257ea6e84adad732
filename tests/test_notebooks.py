"""What the docs promise, read from the notebooks themselves: every page has its place, every figure its words, every name its example."""
import ast
import importlib
import inspect
import json
import re
from pathlib import Path

import pytest, yaml
from fastcore.docments import docments

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted(p for p in (ROOT / "nbs").rglob("*.ipynb") if not re.search(r"/[._]", p.relative_to(ROOT).as_posix()))
MODULES = sorted(p.stem for p in (ROOT / "mmdfw").glob("*.py") if p.stem not in ("_modidx", "__init__"))

# Arguments that mean the same everywhere, so that a comment would only repeat the name.
KNOWN = {"self", "cls", "key", "ax", "progress", "args", "kwargs"}


def cells(path): return [(c, "".join(c["source"])) for c in json.loads(path.read_text(encoding="utf-8"))["cells"]]


def sidebar():
    items = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))["website"]["sidebar"]["contents"]
    return [page for item in items for page in ([item] if isinstance(item, str) else item["contents"])]


def test_every_notebook_is_in_the_sidebar():
    there = {p.relative_to(ROOT / "nbs").as_posix() for p in NOTEBOOKS}
    named = sidebar()
    assert not there - set(named), f"_quarto.yml does not name {sorted(there - set(named))}"
    assert len(named) == len(set(named)) and all((ROOT / "nbs" / page).is_file() for page in named)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_first_cell_is_title_and_subtitle_only(path):
    "nbdev makes front matter of the first cell, and drops whatever else is in it."
    lines = [line for line in cells(path)[0][1].splitlines() if line.strip()]
    assert len(lines) == 2 and lines[0].startswith("# ") and lines[1].startswith("> "), "text below the subtitle belongs into a cell of its own"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_every_figure_has_alternative_text(path):
    "A line `#| fig-alt: \"...\"` at the head of the cell, read by Quarto, by the Sphinx build and by the README; hidden cells are not shown."
    without = [c["id"] for c, source in cells(path) if c["cell_type"] == "code" and not re.match(r"#\|\s*hide\b", source)
               and any("image/png" in output.get("data", {}) for output in c["outputs"]) and not re.match(r'(#\|.*\n)*#\| fig-alt: "[^"]{15,}"\n', source)]
    assert not without, f"cells {without} of {path.name} show a figure without fig-alt"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_cells_that_import_do_nothing_else(path):
    "Where a notebook exports, building the docs executes every cell that imports: a computation there would run again, or fail for want of those above."
    sources = [source for c, source in cells(path) if c["cell_type"] == "code"]
    exported = [source for source in sources if re.match(r"(#\|.*\n)*#\|\s*export\b", source)]
    for source in sources if exported else ():
        body = ast.parse(source).body if source not in exported and not re.match(r"[%!]", source) else []
        imports = [isinstance(node, (ast.Import, ast.ImportFrom)) for node in body]
        inside = any(isinstance(node, (ast.Import, ast.ImportFrom)) for statement in body for node in ast.walk(statement))
        assert not inside or all(imports), f"imports belong into a cell of their own:\n{source}"


def public():
    for module in MODULES:
        loaded = importlib.import_module(f"mmdfw.{module}")
        for name in getattr(loaded, "__all__", []): yield module, name, getattr(loaded, name)


def documented(thing) -> str:
    "The docstring that somebody wrote; dataclasses and NamedTuples make one up."
    doc = vars(thing).get("__doc__") if inspect.isclass(thing) else getattr(thing, "__doc__", None)
    return "" if not doc or re.match(rf"{thing.__name__}\(", doc) else doc


def methods(thing):
    for name, member in vars(thing).items():
        plain = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member.fget if isinstance(member, property) else member
        if not name.startswith("_") and inspect.isfunction(plain): yield f"{thing.__name__}.{name}", plain


def unexplained(thing):
    "Arguments with neither a comment nor an annotation."
    notes = docments(thing, full=True)
    return [name for name, note in notes.items() if name not in KNOWN | {"return"} and not note.docment and note.anno is inspect.Parameter.empty]


def test_every_public_name_is_documented():
    "A docstring for every function, class and public method; for every argument and field of a function or class a comment or a type."
    bad = []
    for module, name, thing in public():
        if not (inspect.isclass(thing) or inspect.isfunction(thing)): continue
        if not documented(thing): bad.append(f"{module}.{name}: no docstring")
        bad += [f"{module}.{name}: {argument}" for argument in unexplained(thing)]
        if inspect.isclass(thing): bad += [f"{module}.{label}: no docstring" for label, method in methods(thing) if not method.__doc__]
        elif inspect.signature(thing).return_annotation is inspect.Signature.empty: bad.append(f"{module}.{name}: what it returns")
    assert not bad, f"{len(bad)} undocumented:\n" + "\n".join(bad)


def words():
    "Every word of the cells that a reader sees: text, examples and tests, not the exported code."
    found = set()
    for path in NOTEBOOKS:
        for _, source in cells(path):
            if not re.match(r"(#\|.*\n)*#\|\s*(export|exporti)\b", source): found |= set(re.findall(r"\w+", source))
    return found


def test_every_public_name_is_shown_somewhere():
    "In the text, an example or a test of some notebook."
    seen = words()
    missing = [f"{module}.{name}" for module, name, _ in public() if name not in seen]
    assert not missing, f"{len(missing)} public names appear in no cell but the one that exports them:\n" + "\n".join(missing)
