"""The docs site, built and opened in a real browser.

Built with Sphinx, since Quarto is seldom there; `make browser` installs Chromium. Where either is missing the tests are
skipped, and say why.
"""

import base64
import functools
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from urllib.parse import unquote, urldefrag

import mmdfw
import pytest

pytest.importorskip("sphinx", reason="needs Sphinx: make docs installs it")

ROOT = Path(__file__).parent.parent
FOLDERS = [
    mmdfw,
    *(import_module(found.name) for found in iter_modules(mmdfw.__path__, "mmdfw.") if "._" not in found.name),
]
PUBLIC = {
    folder.__name__: folder.__all__ for folder in FOLDERS if folder.__name__ not in ("mmdfw.cli", "mmdfw.experiments")
}
PAGES_OF_FOLDERS = set(PUBLIC)  # each has a page, called like it
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None
)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    "The folder of the built site. A warning of Sphinx, such as a link to nowhere, fails the build."
    out = tmp_path_factory.mktemp("site") / "docs"
    ran = subprocess.run(
        [sys.executable, ROOT / "tools" / "make_site.py", out, "sphinx"], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return out


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def visits(site):
    "Every page, opened once at desk and at phone width: what it said, showed and linked to."
    if BROWSER is None:
        pytest.skip("no Chromium: make browser installs it")
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: make docs installs it")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/"
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=BROWSER, args=FLAGS)
        page = browser.new_page(viewport=DESK)
        page.set_default_timeout(300_000)  # milliseconds; a busy machine is no reason to fail
        pages = sorted(
            set(p.relative_to(site).as_posix() for p in site.rglob("*.html") if "_static" not in p.parts)
            - {"genindex.html", "search.html"}
        )
        widths = [(DESK, PHONE), (PHONE, DESK)]  # each page begins as the last one ended: laying out is what takes time
        found = {name: visit(page, address, name, *widths[i % 2]) for i, name in enumerate(pages)}
        found["search"] = search(page, address)
        browser.close()
    server.shutdown()
    return found


DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
LOOK = """() => {
  const all = selector => [...document.querySelectorAll(selector)];
  const math = e => /\\$[^$]+\\$/.test(e.textContent) && !e.querySelector('code');
  const mark = e => /\\]\\([^)]*\\.(ipynb|md)|\\|\\s*[-—]+\\s*\\|/.test(e.textContent);
  const mute = i => !i.alt || i.alt.length < 10 || /\\.(png|svg)$/.test(i.alt);
  return {
    links: all('a[href]').map(a => a.href),
    named: all('main p a code, main li a code, main td a code').map(c => [c.textContent, c.closest('a').href]),
    plain: all('main code').filter(c => !c.closest('a')).map(c => c.textContent),
    headings: all('main h1, main h2, main h3').map(h => h.textContent),
    anchors: all('[id]').map(e => e.id),
    formulas: all('.math').length,
    drawn: all('.math mjx-container').length,
    wrong: all('mjx-merror, [data-mjx-error]').map(e => e.closest('.math').textContent),
    dollars: all('main p, main td').filter(math).map(e => e.textContent),
    raw: all('main p').filter(mark).map(e => e.textContent.slice(0, 80)),
    silent: all('main img').filter(mute).map(i => i.src),
    broken: all('main img').filter(i => i.complete && !i.naturalWidth).map(i => i.src),
  };
}"""
SCROLLS = """() => {
  const wider = (e, width) => width > e.clientWidth + 1 && e.clientWidth > 0;
  const all = (what) => [...document.querySelectorAll('main ' + what)];
  const drawn = e => e.querySelector('mjx-math, svg')?.getBoundingClientRect().width ?? 0;
  return [...all('pre').filter(e => wider(e, e.scrollWidth)),
          ...all('mjx-container[display="true"]').filter(e => wider(e, drawn(e)))].map(e => e.textContent.slice(0, 60));
}"""
WIDER = "() => Math.max(document.documentElement.scrollWidth, document.body.scrollWidth) - window.innerWidth"


def visit(page, address, name, first, second):
    "What one page has to show, at one width and then at the other."
    errors = []
    said = lambda message: errors.append(f"{message.text} {message.location}") if message.type == "error" else None
    asked = lambda request: (
        None if request.url.startswith((address, "data:", "blob:")) else errors.append(f"asks for {request.url}")
    )
    listen = {"console": said, "pageerror": lambda error: errors.append(str(error)), "request": asked}
    for event, hear in listen.items():
        page.on(event, hear)
    page.goto(address + name)
    if page.locator(".math").count():
        page.wait_for_function("window.MathJax && MathJax.startup && MathJax.startup.promise")
    page.evaluate("() => window.MathJax && MathJax.startup ? MathJax.startup.promise.then(() => 1) : 1")
    wider = {first["width"]: page.evaluate(WIDER)}
    scrolls = page.evaluate(SCROLLS) if first == DESK else None
    seen = page.evaluate(LOOK)
    page.set_viewport_size(second)
    wider[second["width"]] = page.evaluate(WIDER)
    scrolls = page.evaluate(SCROLLS) if scrolls is None else scrolls
    for event, hear in listen.items():
        page.remove_listener(event, hear)
    return seen | {"errors": errors, "address": address, "overflow": wider[PHONE["width"]], "scrolls": scrolls}


def search(page, address):
    "Titles of the pages that the search finds."
    page.goto(address + "search.html?q=line_search")
    page.wait_for_selector("#search-results li a")
    return page.locator("#search-results li a").all_inner_texts()


def complaints(visits, of):
    return {name: found for name, seen in visits.items() if name != "search" and (found := of(seen))}


def test_every_page_of_the_sidebar_is_built(site):
    import yaml

    items = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))["website"]["sidebar"]["contents"]
    pages = [page for item in items for page in ([item] if isinstance(item, str) else item["contents"])]
    html = [re.sub(r"(^|/)\d+[a-z]*_", r"\1", page).rsplit(".", 1)[0] + ".html" for page in pages]
    assert [name for name in html if not (site / name).is_file()] == []


def test_api_is_documented_and_leads_to_its_source(site):
    text = (site / "theory" / "step.html").read_text(encoding="utf-8")
    assert 'id="mmdfw.linesearch"' in text
    assert re.search(r'class="source" href="[^"]*/mmdfw/steps/_step\.py#L\d+"', text)


def test_names_in_the_text_lead_to_public_names_alone(visits):
    "Nor to a page that happens to define the same word, as the command line once did with `count`."
    page = visits["theory/step.html"]
    assert "count" in page["plain"] and all("count" not in dict(seen["named"]) for seen in list(visits.values())[:-1])
    assert dict(visits["notation.html"]["named"])["RBF"].endswith("theory/kernel.html#mmdfw-rbf")
    anchor = lambda path: re.sub(r"[._]", "-", path.lower())  # as Sphinx makes it
    public = {anchor(f"{folder}.{name}") for folder, names in PUBLIC.items() for name in names}
    links = [link for seen in list(visits.values())[:-1] for _, link in seen["named"]]
    led = {urldefrag(link)[1] for link in links if link.startswith(page["address"]) and "#mmdfw-" in link}
    assert len(led) > 50 and led <= public


def test_a_page_leads_with_what_one_calls_and_documents_nothing_else(visits):
    page = visits["theory/step.html"]
    assert page["headings"][0].startswith("Step rules") and "mmdfw.LineSearch" in dict(page["named"])
    documented = {
        h.rstrip("#¶") for seen in list(visits.values())[:-1] for h in seen["headings"] if h.startswith("mmdfw.")
    }
    public = {f"{folder}.{name}" for folder, names in PUBLIC.items() for name in names}
    assert "mmdfw.LineSearch" in documented and not documented - public - PAGES_OF_FOLDERS


def test_no_page_complains_or_asks_for_the_internet(visits):
    assert complaints(visits, lambda seen: seen["errors"]) == {}


def test_links_and_anchors_lead_somewhere(site, visits):
    def dead(seen):
        for link in {link for link in seen["links"] if link.startswith(seen["address"])}:
            target, anchor = urldefrag(link.removeprefix(seen["address"]))
            target = target.split("?")[0] or "index.html"
            if (
                not (site / target).is_file()
                or anchor
                and target in visits
                and unquote(anchor) not in visits[target]["anchors"]
            ):
                yield link

    assert complaints(visits, lambda seen: sorted(dead(seen))) == {}


def test_math_is_drawn(visits):
    assert complaints(visits, lambda seen: seen["wrong"] + seen["dollars"]) == {}
    assert (
        complaints(visits, lambda seen: seen["formulas"] != seen["drawn"] and (seen["formulas"], seen["drawn"])) == {}
    )
    assert visits["theory/kernel.html"]["formulas"] > 20


def test_no_link_or_table_is_left_as_markdown(visits):
    assert complaints(visits, lambda seen: seen["raw"]) == {}


def test_figures_are_there_and_have_words(visits):
    assert complaints(visits, lambda seen: seen["silent"] + seen["broken"]) == {}


def test_pages_fit_a_phone(visits):
    assert complaints(visits, lambda seen: seen["overflow"] > 0 and f"{seen['overflow']} pixels too wide") == {}


def test_formulas_and_signatures_fit_a_desk(visits):
    assert complaints(visits, lambda seen: seen["scrolls"]) == {}


def test_search_finds_a_name(visits):
    assert any("step" in title.lower() for title in visits["search"]), visits["search"]


FAKE = """#!/bin/sh
echo "$PWD: $*" >> "$QUARTO_LOG"
test -f _quarto.yml && mkdir _docs && cp index.ipynb _docs/index.html && exit $QUARTO_SAYS
"""


@pytest.mark.parametrize("says", [0, 7])
def test_quarto_is_asked_where_there_is_one(tmp_path, says):
    """With a `quarto` on the PATH that only takes notes: it is called once, on the processed notebooks.

    Its site becomes _docs, and its failure is ours."""
    import yaml

    pages = ["index.ipynb", "theory/40_step.ipynb", "changelog.md"]
    config = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))
    config["website"]["sidebar"]["contents"] = pages
    for name in (
        "tools/make_site.py",
        "tools/pages.py",
        "settings.ini",
        "README.md",
        "CHANGELOG.md",
        "mmdfw/__init__.py",
        "mmdfw/steps/_step.py",
        *(f"nbs/{page}" for page in pages),
        "nbs/map.svg",
        "nbs/styles.css",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    for name in ("_quarto.yml", "nbs/_quarto.yml"):
        (tmp_path / name).write_text(yaml.safe_dump(config), encoding="utf-8")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "quarto").write_text(FAKE)
    (tmp_path / "bin" / "quarto").chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "QUARTO_LOG": str(tmp_path / "log"),
        "QUARTO_SAYS": str(says),
    }
    ran = subprocess.run(
        [sys.executable, tmp_path / "tools" / "make_site.py"], env=environment, capture_output=True, text=True
    )
    assert ran.returncode == says, ran.stdout + ran.stderr
    assert (tmp_path / "log").read_text().splitlines() == [f"{(tmp_path / '_proc').resolve()}: render --no-cache"]
    assert (tmp_path / "_docs" / "index.html").is_file() == (says == 0)
    assert (tmp_path / "_docs" / "llms.txt").is_file() == (says == 0)
    processed = yaml.safe_load((tmp_path / "_proc" / "_quarto.yml").read_text(encoding="utf-8"))
    assert processed["project"]["output-dir"] == "_docs" and processed["website"]["sidebar"]["contents"] == pages
    assert "/mmdfw/steps/_step.py#L" in (tmp_path / "_proc" / "theory" / "40_step.ipynb").read_text(encoding="utf-8"), (
        "the API is written out, with links to the source"
    )
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == (ROOT / "README.md").read_text(encoding="utf-8"), (
        "nbdev writes no README"
    )


def test_machines_find_every_page_and_what_it_says(tmp_path):
    "llms.txt lists the sidebar, llms-full.txt has the text and the code of each page and the public names."
    import yaml

    sys.path.insert(0, str(ROOT / "tools"))
    try:
        from make_site import sections, write_llms
        from pages import write_pages
    finally:
        sys.path.pop(0)
    config = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))
    found = sections(config)
    write_pages(ROOT, tmp_path / "pages", config["website"]["repo-url"])
    write_llms(config, found, tmp_path / "pages", tmp_path / "site")
    index, full = ((tmp_path / "site" / name).read_text(encoding="utf-8") for name in ("llms.txt", "llms-full.txt"))
    assert index.startswith("# mmdfw\n\n> ") and index.count("\n- [") == sum(len(pages) for _, pages in found)
    started = "https://mmdfw-developers.github.io/mmdfw/guides/getting_started.html"
    assert f"- [Getting started in ten minutes]({started}): From a NumPyro model" in index and started in full
    assert "result = mmdfw.fit(jax.random.key(0), target" in full and "### mmdfw.compress" in full
    assert not re.search(r"^#\| (export|hide|echo)", full, re.M) and "iVBORw0KGgo" not in full  # no pictures


def test_wide_figures_are_known_by_their_pixels():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        from make_site import wide
    finally:
        sys.path.pop(0)
    header = lambda width: base64.b64encode(
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + width.to_bytes(4, "big") + bytes(40)
    ).decode()
    shown = lambda width: {"outputs": [{"data": {"text/plain": "x"}}, {"data": {"image/png": header(width)}}]}
    assert wide(shown(1600)) and not wide(shown(736)) and not wide({"outputs": []})


def test_a_page_that_is_not_there_is_named(tmp_path):
    "The build says which file _quarto.yml names in vain."
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        from make_site import sections
    finally:
        sys.path.pop(0)
    with pytest.raises(SystemExit, match="_quarto.yml names theory/99_nothing.ipynb, which nbs/ does not have"):
        sections(
            {
                "website": {
                    "sidebar": {
                        "contents": ["index.ipynb", {"section": "Theory", "contents": ["theory/99_nothing.ipynb"]}]
                    }
                }
            }
        )
