"""What the docs promise, read from the notebooks themselves: every page has its place, every figure its words, every name its example."""

import ast
import importlib
import inspect
import json
import re
from pathlib import Path
from types import FunctionType

import pytest, yaml
from fastcore.docments import docments

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted(
    p for p in (ROOT / "nbs").rglob("*.ipynb") if not re.search(r"/[._]", p.relative_to(ROOT).as_posix())
)
GIVEN = {
    "Fit",
    "ModelFit",
    "Compressed",
    "Draws",
    "Cloud",
    "GaussianApproximation",
    "GaussianPredictive",
    "BernoulliPredictive",
}  # what calls give back
MODULES = sorted(
    ".".join(p.relative_to(ROOT / "mmdfw").with_suffix("").parts)
    for p in (ROOT / "mmdfw").rglob("*.py")
    if p.stem not in ("_modidx", "__init__")
)


def cells(path):
    return [(c, "".join(c["source"])) for c in json.loads(path.read_text(encoding="utf-8"))["cells"]]


def sidebar():
    items = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))["website"]["sidebar"]["contents"]
    return [page for item in items for page in ([item] if isinstance(item, str) else item["contents"])]


def test_every_notebook_is_in_the_sidebar():
    there = {p.relative_to(ROOT / "nbs").as_posix() for p in NOTEBOOKS}
    named = sidebar()
    assert not there - set(named), f"_quarto.yml does not name {sorted(there - set(named))}"
    assert len(named) == len(set(named)) and all((ROOT / "nbs" / page).is_file() for page in named)


def test_the_citation_is_of_this_version():
    import mmdfw

    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == mmdfw.__version__ and cited["preferred-citation"]["url"].endswith("1805.07912")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_first_cell_is_title_and_subtitle_only(path):
    "nbdev makes front matter of the first cell, and drops whatever else is in it."
    lines = [line for line in cells(path)[0][1].splitlines() if line.strip()]
    assert len(lines) == 2 and lines[0].startswith("# ") and lines[1].startswith("> "), (
        "text below the subtitle belongs into a cell of its own"
    )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_every_figure_has_alternative_text(path):
    'A line `#| fig-alt: "..."` at the head of the cell, read by Quarto, by the Sphinx build and by the README; hidden cells are not shown.'
    without = [
        c["id"]
        for c, source in cells(path)
        if c["cell_type"] == "code"
        and not re.match(r"#\|\s*hide\b", source)
        and any("image/png" in output.get("data", {}) for output in c["outputs"])
        and not re.match(r'(#\|.*\n)*#\| fig-alt: "[^"]{15,}"\n', source)
    ]
    assert not without, f"cells {without} of {path.name} show a figure without fig-alt"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_cells_that_import_do_nothing_else(path):
    "Where a notebook exports, building the docs executes every cell that imports: a computation there would run again, or fail for want of those above."
    sources = [source for c, source in cells(path) if c["cell_type"] == "code"]
    exported = [source for source in sources if re.match(r"(#\|.*\n)*#\|\s*export\b", source)]
    for source in sources if exported else ():
        body = ast.parse(source).body if source not in exported and not re.match(r"[%!]", source) else []
        imports = [isinstance(node, (ast.Import, ast.ImportFrom)) for node in body]
        inside = any(
            isinstance(node, (ast.Import, ast.ImportFrom)) for statement in body for node in ast.walk(statement)
        )
        assert not inside or all(imports), f"imports belong into a cell of their own:\n{source}"


def public():
    for module in MODULES:
        loaded = importlib.import_module(f"mmdfw.{module}")
        for name in getattr(loaded, "__all__", []):
            yield module, name, getattr(loaded, name)


def usual() -> set:
    "Arguments that mean the same everywhere: the glossary of the notation page has them, so that no comment need repeat it."
    table = next(source for _, source in cells(ROOT / "nbs" / "notation.ipynb") if "## Arguments" in source)
    return set(re.findall(r"`(\w+)`", "\n".join(line for line in table.splitlines() if line.startswith("|"))))


def described(thing) -> bool:
    "Whether somebody wrote its docstring; dataclasses and NamedTuples make one up."
    doc = vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__
    return bool(doc) and not doc.startswith(thing.__name__ + "(")


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
    "Whether it gives something back and says not what. Plots take and return their axes."
    returned = [
        node.value
        for node in ast.walk(ast.parse(inspect.getsource(thing)).body[0])
        if isinstance(node, ast.Return) and node.value is not None
    ]
    return inspect.signature(thing).return_annotation is inspect.Signature.empty and any(
        getattr(value, "id", None) != "ax" for value in returned
    )


def test_every_public_name_is_documented():
    """Of every name in the `__all__` of a module: a docstring; for each argument or field a comment, a type, or a place in the glossary;
    and the type of what a function returns. Of the classes that users are given every public method has a docstring, too."""
    bad, known = [], usual()
    for module, name, thing in public():
        if inspect.isclass(thing) or inspect.isfunction(thing):
            if not described(thing):
                bad.append(f"{module}.{name}: no docstring")
            bad += [f"{module}.{name}: {argument}" for argument in unexplained(thing, known)]
        if name in GIVEN:
            bad += [
                f"{module}.{name}.{label}: no docstring"
                for label, method in vars(thing).items()
                if label[0] != "_" and isinstance(method, (property, FunctionType)) and not method.__doc__
            ]
        if inspect.isfunction(thing) and silent(thing):
            bad.append(f"{module}.{name}: what it returns")
    assert not bad, f"{len(bad)} undocumented:\n" + "\n".join(bad)


def exported_uses() -> dict:
    "For each exported definition the names that its code uses."
    uses = {}
    for module in MODULES:
        for node in ast.parse(
            (ROOT / "mmdfw" / f"{module.replace(chr(46), chr(47))}.py").read_text(encoding="utf-8")
        ).body:
            names = (
                [node.name]
                if hasattr(node, "name")
                else [n.id for t in getattr(node, "targets", ()) for n in ast.walk(t) if isinstance(n, ast.Name)]
            )
            inside = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} | {
                n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)
            }
            for name in names:
                uses.setdefault(name, set()).update(inside - {name})
    return uses


def shown() -> set:
    "Every word of the cells that are not exported: text, examples and tests."
    found = set()
    for path in NOTEBOOKS:
        for _, source in cells(path):
            if not re.match(r"(#\|.*\n)*#\|\s*(export|exporti)\b", source):
                found |= set(re.findall(r"\w+", source))
    return found


def test_every_public_name_is_shown_somewhere():
    "What `import mmdfw` gives stands in a cell that is not exported; every other public name does, or is used by one that does."
    import mmdfw

    seen, uses = shown(), exported_uses()
    assert not (missing := [name for name in mmdfw.__all__ if name not in seen]), missing
    reached, ahead = set(), [name for name in uses if name in seen]
    while ahead:
        name = ahead.pop()
        if name not in reached:
            reached.add(name)
            ahead += [other for other in uses[name] if other in uses]
    missing = [f"{module}.{name}" for module, name, _ in public() if name not in reached]
    assert not missing, f"{len(missing)} public names that no example shows or uses:\n" + "\n".join(missing)


def wordless(a, b: int, c=1):
    return a


def test_what_lacks_words_is_noticed():
    assert unexplained(wordless, {"c"}) == ["a"] and silent(wordless) and not described(wordless)
    assert "wordless" not in shown() | set(exported_uses())
