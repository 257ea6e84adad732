"""Build the docs site into _docs; `make docs` runs this.

Beside the pages it writes llms.txt, a list of them, and llms-full.txt, what they say, for machines that read.

Quarto does it where it is installed. Elsewhere Sphinx does, from the same pages (made of the notebooks by pages.py, in
_proc) and the same _quarto.yml: title, order and sections. What is here turns the one's dialect into the other's.
"""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml
from pages import renamed, write_pages

ROOT = Path(__file__).resolve().parent.parent
PAGES = (".ipynb", ".md")


def sections(config: dict) -> list:
    "(heading or None, pages) as the sidebar of _quarto.yml has them; every page must be there."
    found = [(None, [])]
    for item in config["website"]["sidebar"]["contents"]:
        if isinstance(item, dict) and "section" in item:
            found.append((item["section"], item["contents"]))
        elif found[-1][0] is None:
            found[-1][1].append(item)
        else:
            found.append((None, [item]))
    pages = [page for _, pages in found for page in pages]
    missing = [page for page in pages if not (ROOT / "nbs" / page).is_file()]
    if missing:
        sys.exit(
            f"_quarto.yml names {', '.join(missing)}, which nbs/ does not have: write it, or take it out of _quarto.yml"
        )
    twice = [page for page in pages if [renamed(other) for other in pages].count(renamed(page)) > 1]
    if twice:
        sys.exit(f"{' and '.join(twice)} would be one page: without its number each needs a name of its own")
    return found


def site_links(text: str) -> str:
    "Links to numbered notebooks as links to the pages here."
    return re.sub(r"\]\((?![a-z]+:|[#/])([^)#\s]+\.ipynb)", lambda m: "](" + renamed(m[1]), text)


def options(source: str) -> tuple:
    "Quarto's options at the head of a cell, and the code below them."
    lines = source.splitlines(True)
    head = [line for line in lines if line.startswith("#|")]
    return yaml.safe_load("".join(line[2:].strip() + "\n" for line in head)) or {}, "".join(
        line for line in lines if line not in head
    )


def wide(cell: dict) -> bool:
    "Whether a figure has more pixels in a row than a page: small screens scroll it, since shrunk it could not be read."
    pictures = ("".join(output.get("data", {}).get("image/png", "")) for output in cell["outputs"])
    return any(int.from_bytes(base64.b64decode(picture[:64])[16:20], "big") > 1000 for picture in pictures if picture)


def cells(notebook: dict):
    "The notebook's cells in MyST-NB's dialect."
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "raw" and source.startswith("---"):
            front = yaml.safe_load(source.strip().strip("-"))
            subtitle = f"\n\n*{front['description']}*" if "description" in front else ""
            yield dict(cell, cell_type="markdown", source=f"# {front['title']}" + subtitle)
        elif cell["cell_type"] == "code":
            chosen, code = options(source)
            image = (
                {"image": {"alt": chosen["fig-alt"]} | ({"classes": "wide"} if wide(cell) else {})}
                if "fig-alt" in chosen
                else {}
            )
            tags = ["remove-input"] if chosen.get("echo") is False else []
            tags += ["hide-input"] if chosen.get("code-fold") else []
            yield dict(cell, source=code, metadata={"tags": tags, "mystnb": image})
        else:
            yield dict(cell, source=source)


def with_links(cell: dict) -> dict:
    "The cell with its links, and those in what it printed as Markdown, leading to pages of the site."
    if cell["cell_type"] == "markdown":
        return dict(cell, source=site_links(cell["source"]))
    outputs = []
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "text/markdown" in data:
            output = dict(output, data=data | {"text/markdown": site_links("".join(data["text/markdown"]))})
        outputs.append(output)
    return dict(cell, outputs=outputs)


def toctree(found: list) -> str:
    "The order of the pages, for Sphinx."
    tree = lambda caption, pages: (
        "```{toctree}\n:hidden:\n"
        + (f":caption: {caption}\n" if caption else "")
        + "\n"
        + "\n".join(map(renamed, pages))
        + "\n```"
    )
    return "\n\n".join(tree(caption, [page for page in pages if page != "index.ipynb"]) for caption, pages in found)


def write_sources(processed: Path, out: Path, found: list):
    "Every page that _quarto.yml names, and every picture beside them, as Sphinx wants them."
    shutil.rmtree(out, ignore_errors=True)
    pages = [page for _, pages in found for page in pages]
    for file in sorted(p for p in processed.rglob("*") if p.is_file()):
        page = file.relative_to(processed).as_posix()
        to = out / ("_static/" + page if file.suffix == ".css" else renamed(page))
        if page not in pages and file.suffix in PAGES + (".yml",):
            continue
        to.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".md":
            to.write_text(site_links(file.read_text(encoding="utf-8")), encoding="utf-8")
        elif file.suffix != ".ipynb":
            shutil.copy2(file, to)
        else:
            notebook = json.loads(file.read_text(encoding="utf-8"))
            made = [with_links(cell) for cell in cells(notebook)]
            if page == "index.ipynb":
                made.append(dict(cell_type="markdown", metadata={}, source=toctree(found)))
            made = [{k: v for k, v in cell.items() if k != "id"} for cell in made]
            to.write_text(json.dumps(dict(notebook, cells=made, nbformat_minor=4)), encoding="utf-8")


def copy(source: Path, to: Path):
    "A file or a folder."
    to.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, to)
    else:
        shutil.copy2(source, to)


def with_quarto(processed: Path, out: Path) -> int:
    "Build with Quarto; its failure is ours."
    code = subprocess.run(["quarto", "render", "--no-cache"], cwd=processed).returncode
    if code == 0:
        shutil.rmtree(out, ignore_errors=True)
        shutil.move(processed / "_docs", out)
    return code


def with_sphinx(config: dict, found: list, processed: Path, out: Path) -> int:
    "Build with Sphinx; a link to nowhere is an error."
    from sphinx.application import Sphinx
    from sphinx.util.docutils import docutils_namespace

    settings = ConfigParser()
    settings.read(ROOT / "settings.ini", encoding="utf-8")
    settings = settings["DEFAULT"]
    chosen = dict(
        project=config["website"]["title"],
        html_title=config["website"]["title"],
        author=settings["author"],
        version=settings["version"],
        release=settings["version"],
        extensions=["myst_nb"],
        mathjax_path="mathjax/tex-chtml.js",
        # formulas as wide for every reader, whatever letters the machine has
        mathjax3_config={"chtml": {"matchFontHeight": False}},
        html_theme="sphinx_book_theme",
        html_static_path=["_static"],
        html_css_files=["styles.css"],
        html_favicon=config["website"]["favicon"],
        html_context={"default_mode": "light"},
        html_theme_options={
            "use_source_button": False,
            "use_download_button": False,
            "show_toc_level": 2,
            "navbar_persistent": [],
        },
        nb_execution_mode="off",
        nb_merge_streams=True,
        nb_code_prompt_show="How it is done",
        nb_code_prompt_hide="How it is done",
        nb_render_markdown_format="myst",
        myst_heading_anchors=4,
        myst_heading_slug_func="pages.slug",
        myst_enable_extensions=["dollarmath", "amsmath"],
        myst_dmath_double_inline=True,
        suppress_warnings=["myst.header"],
        html_copy_source=False,
        html_show_sourcelink=False,
    )
    with TemporaryDirectory() as work, docutils_namespace():
        sources, built = Path(work, "sources"), Path(work, "html")
        write_sources(processed, sources, found)
        mathjax = Path(find_spec("sphinx-mathjax-offline").origin).parent / "static" / "mathjax"
        for needed in ("tex-chtml.js", "input/tex", "output/chtml"):
            copy(mathjax / needed, sources / "_static" / "mathjax" / needed)
        folders = (sources, None, built, Path(work, "doctrees"), "html")
        rules = dict(confoverrides=chosen, warningiserror=True, freshenv=True, parallel=2, status=None)
        app = Sphinx(*folders, **rules)
        app.build()
        shutil.rmtree(out, ignore_errors=True)
        shutil.move(built, out)
    return app.statuscode


def read_page(file: Path) -> tuple:  # -> title, description, text
    "A processed page as plain Markdown: text and code, without what the code printed."
    if file.suffix == ".md":
        text = file.read_text(encoding="utf-8")
        return text.split("\n", 1)[0].lstrip("# "), "", text.split("\n", 1)[1].strip()
    first, *rest = json.loads(file.read_text(encoding="utf-8"))["cells"]
    front, parts = yaml.safe_load("".join(first["source"]).strip().strip("-")), []
    for cell in rest:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            chosen, code = options(source)
            source = f"```python\n{code.strip()}\n```" if chosen.get("echo") is not False and code.strip() else ""
        parts.append("" if source.startswith('<div class="thumbnails">') else source)
    return front["title"], front.get("description", ""), "\n\n".join(filter(None, parts))


def write_llms(config: dict, found: list, processed: Path, out: Path):
    "llms.txt and llms-full.txt, by the convention of llmstxt.org."
    site, home = config["website"], config["website"]["site-url"].rstrip("/")
    index = [f"# {site['title']}", f"> {site['description']}"]
    full = list(index)
    for heading, pages in found:
        lines = []
        for page in pages:
            title, description, text = read_page(processed / page)
            address = f"{home}/{renamed(page).rsplit('.', 1)[0]}.html"
            lines.append(f"- [{title}]({address})" + (f": {description}" if description else ""))
            full.append(f"# {title}\n\n" + (f"> {description}\n\n" if description else "") + f"{address}\n\n{text}")
        index += [f"## {heading or 'Start'}", "\n".join(lines)]
    out.mkdir(parents=True, exist_ok=True)
    for name, parts in (("llms.txt", index), ("llms-full.txt", full)):
        (out / name).write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def main(out: str = "_docs", builder: str = "quarto" if shutil.which("quarto") else "sphinx") -> int:
    "Build into `out` with Quarto or Sphinx."
    os.chdir(ROOT)
    config = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))
    found = sections(config)
    processed = ROOT / "_proc"
    write_pages(ROOT, processed, config["website"]["repo-url"])
    to = Path(out).resolve()
    with TemporaryDirectory() as made:
        write_llms(config, found, processed, Path(made))  # first, since Quarto's pages are moved away
        code = with_quarto(processed, to) if builder == "quarto" else with_sphinx(config, found, processed, to)
        if code == 0:
            shutil.copytree(made, to, dirs_exist_ok=True)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
