"""What SECURITY.md promises: nothing unpickled, no network, nothing outside, and a reason for all that is installed."""

import ast, configparser, io, os, re, subprocess, sys, zipfile
from pathlib import Path
import numpy as np, pytest

import mmdfw
from mmdfw._files import MOST_UNPACKED, arrays_in
from mmdfw.data import Source, fetch
from mmdfw.data._read import LIMIT, load_file, unpack
from mmdfw.data._sources import SOURCES

ROOT = Path(__file__).parent.parent
PACKAGE = Path(mmdfw.__file__).parent
FORBIDDEN = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "yaml", "code", "codeop"}
CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "pd.read_pickle", "np.fromfile"}


def called(node):
    "What a call calls, as text: `f`, `module.f`; nothing for what is not a call."
    function = getattr(node, "func", None)
    of = getattr(getattr(function, "value", None), "id", "")
    return f"{of}.{function.attr}" if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def trees():
    return [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in sorted(PACKAGE.rglob("*.py"))]


def test_nothing_unpickles_and_no_data_are_run():
    found, loads = [], 0
    for path, tree in trees():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            wrong = [name for name in names if name.partition(".")[0] in FORBIDDEN]
            call = called(node)
            if call in CALLS or call.rpartition(".")[2] in ("extractall", "extract", "unpack_archive"):
                wrong.append(call)
            if call in ("np.load", "numpy.load", "jnp.load"):
                loads += 1
                said = {word.arg: ast.unparse(word.value) for word in node.keywords}
                wrong += [] if said.get("allow_pickle") == "False" else [ast.unparse(node)]
            wrong += ["shell="] if call and any(word.arg == "shell" for word in node.keywords) else []
            found += [f"{path.relative_to(PACKAGE)}:{node.lineno} {each}" for each in wrong]
    assert not found and loads >= 2, found


def test_addresses_in_the_package_are_https():
    found = [
        (path.name, url) for path in PACKAGE.rglob("*.py") for url in re.findall(r"http://[^\s\"']+", path.read_text())
    ]
    assert not found


def test_sets_come_by_https_with_a_checksum():
    assert all(url.startswith("https://") for source in SOURCES.values() for url in source.urls)
    without = [name for name, source in SOURCES.items() if not re.fullmatch("[0-9a-f]{64}", source.sha256)]
    told = (ROOT / "SECURITY.md").read_text()
    assert without == ["year"] and "`year`, no checksum is known" in told


@pytest.mark.parametrize("url", ["http://archive.ics.uci.edu/x.csv", "ftp://example.org/x.csv", "file:///etc/hostname"])
def test_other_addresses_are_refused_before_anything_is_sent(url, tmp_path):
    source = Source("mine", (url,), "x.csv", 1, ("a", "b"), "b", sha256="0" * 64)
    with pytest.raises(OSError, match="fetched by https alone"):
        fetch(source, tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


OFFLINE = """
import importlib, pkgutil, socket, sys

tried = []
def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        tried.append((event, arguments[-1]))
        raise OSError("no network here")
sys.addaudithook(refuse)

import mmdfw
for module in pkgutil.walk_packages(mmdfw.__path__, "mmdfw."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ImportError as problem:  # an extra that is not installed
            assert "mmdfw" not in str(problem.name), problem
import jax, jax.numpy as jnp
mmdfw.fit(jax.random.key(0), lambda x: -0.5 * x @ x, jnp.zeros(2), num_particles=3, refine=False, progress=False)
mmdfw.data.catalogue()
assert not tried, tried
try:
    socket.create_connection(("192.0.2.1", 80), timeout=1)
except OSError:
    assert tried, "the hook sees nothing"
"""


def test_no_network_at_import_or_in_a_fit():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", OFFLINE], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]


def packed(names, size, member_size=None):
    "A zip in memory whose members are zeros."
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.writestr(name, bytes(size))
    return buffer.getvalue()


def test_archives_are_never_unpacked_to_disk(tmp_path, monkeypatch):
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    names = ["../../outside.txt", "/tmp/mmdfw_outside.txt", "C:\\outside.txt", "data.txt"]
    assert unpack(packed(names, 10), "data.txt") == bytes(10)
    climbing = inside / "set.npz"
    with zipfile.ZipFile(climbing, "w") as archive:
        for name in ("../../x.npy", "x.npy", "y.npy"):
            array = io.BytesIO()
            np.save(array, np.ones((3, 1)) if "x" in name else np.ones(3))
            archive.writestr(name, array.getvalue())
    assert len(load_file(climbing).y) == 3
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [climbing]
    assert not os.path.exists("/tmp/mmdfw_outside.txt")


def claiming(path, size):
    "A small archive whose directory says that its member holds so many bytes."
    path.write_bytes(packed(["x.npy"], 1000))
    content = bytearray(path.read_bytes())
    at = content.index(b"PK\1\2") + 24  # the central directory's uncompressed size
    content[at : at + 4] = size.to_bytes(4, "little")
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("read", [arrays_in, load_file, mmdfw.load])
def test_what_an_archive_says_it_holds_is_checked_before_it_is_read(read, tmp_path):
    bomb = claiming(tmp_path / "bomb.npz", MOST_UNPACKED + 1)
    with pytest.raises(ValueError, match="would unpack to 1,073,741,825"):
        read(bomb)


def test_a_stream_is_not_read_beyond_the_limit(monkeypatch):
    import gzip
    from mmdfw.data import _read

    monkeypatch.setattr(_read, "LIMIT", 10_000)
    for data in (gzip.compress(bytes(20_000)), packed(["data.txt"], 20_000)):
        with pytest.raises(ValueError, match="exceeds 10,000 bytes"):
            unpack(data, "data.txt")
    assert LIMIT == 2**30


def test_everything_that_is_installed_has_its_line_of_reason():
    config = configparser.ConfigParser(delimiters=["="])
    config.read(ROOT / "settings.ini", encoding="utf-8")
    wanted = [re.match(r"[\w-]+", line)[0] for line in config["DEFAULT"]["requirements"].split()]
    bill = re.findall(
        r"^\| ([\w-]+) \| (.+) \|$", (ROOT / "SECURITY.md").read_text().partition("## What is installed")[2], re.M
    )
    assert [name for name, _ in bill if name != "package"] == wanted
    assert all(len(reason) > 10 for name, reason in bill if name != "package")
    extras = {
        re.match(r"[\w-]+", line)[0]
        for name in ("plots", "tables", "numpyro", "pymc", "arviz")
        for line in config["DEFAULT"][f"{name}_requirements"].split()
        if not line.startswith("#")
    }
    assert all(extra.lower() in (ROOT / "SECURITY.md").read_text().lower() for extra in extras), extras
