"""Tables, splits and files: what is read is right, what is wrong is refused, nothing half-written is left behind."""

import gzip, hashlib, http.server, io, os, pickle, signal, subprocess, sys, threading, time, zipfile
from pathlib import Path
import jax.numpy as jnp, numpy as np, pandas as pd, pooch, pytest

import mmdfw.data._read, mmdfw.data._sources
from mmdfw._checks import assert_close
from mmdfw.data._fetch import fetch
from mmdfw.data._load import catalogue, load_table
from mmdfw.data._sources import SOURCES
from mmdfw.data._split import split
from mmdfw.data._table import as_table, check_binary

REAL = os.environ.get("MMDFW_DATA")
needs_files = pytest.mark.skipif(not REAL, reason="MMDFW_DATA does not name a folder with the published files")


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    "No test reads or writes the user's folders, nor asks a proxy."
    monkeypatch.setenv("MMDFW_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(pooch, "os_cache", lambda project: tmp_path / "cache" / project)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")


def zipped(members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def small(name, rows=40):
    "A set in its published layout with few rows: source, packed bytes, values."
    source = SOURCES[name]
    rng = np.random.default_rng(3)
    values = rng.normal(size=(rows, len(source.columns))).round(4)
    if name == "covertype":
        values = np.column_stack([rng.integers(0, 7000, (rows, 54)), rng.integers(1, 8, rows)])
    header = ",".join(f'"{c}"' for c in source.columns) + "\n" if source.header else ""
    sep = "   " if name == "naval" else ","
    text = (header + "".join(sep.join(f"{v:.7g}" for v in row) + "\n" for row in values)).encode()
    packed = dict(
        naval=lambda: zipped({"UCI CBM Dataset/data.txt": text}),
        protein=lambda: text,
        year=lambda: zipped({"YearPredictionMSD.txt": text}),
        covertype=lambda: gzip.compress(text),
    )[name]()
    return source._replace(rows=rows, sha256=hashlib.sha256(text).hexdigest() if source.sha256 else ""), packed, values


def put(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def files(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir())


# Published layouts --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(SOURCES))
@pytest.mark.parametrize("place", ["data/{name}/{file}", "data/{file}", "cache/mmdfw/{name}/{file}"])
def test_published_layout(name, place, tmp_path):
    source, packed, values = small(name)
    put(tmp_path / place.format(name=name, file=source.file), packed)
    table = load_table(source)
    at = source.columns.index(source.target)
    assert (
        table.x.shape == (40, source.num_inputs) == (40, len(table.columns))
        and table.y.dtype == np.float64
        and table.note == ""
    )
    assert table.x.dtype == (np.float32 if name == "covertype" else np.float64) and table.x.flags.c_contiguous
    assert_close(table.x, np.delete(values, at, 1), rtol=1e-14)
    assert_close(table.y, values[:, at] == 2 if name == "covertype" else values[:, at], rtol=1e-14)


@pytest.mark.parametrize("name", list(SOURCES))
def test_missing_file_names_places_and_command(name, tmp_path):
    with pytest.raises(FileNotFoundError) as problem:
        load_table(name)
    for folder in (tmp_path / "data", tmp_path / "cache" / "mmdfw"):
        assert str(folder / name / SOURCES[name].file) in str(problem.value)
    assert f"mmdfw data fetch {name}" in str(problem.value)


def test_without_a_chosen_folder_only_the_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("MMDFW_DATA")
    assert mmdfw.data._sources.data_folders() == [tmp_path / "cache" / "mmdfw"]


@pytest.mark.parametrize("name", ["naval", "year", "covertype"])
def test_damaged_archives_are_refused_whole(name, tmp_path):
    "Any cut is refused; a changed byte is refused, unless nothing of the content depends on it."
    source, packed, _ = small(name)
    path = put(tmp_path / "data" / source.file, packed)
    rng = np.random.default_rng(0)
    good = load_table(source)
    for length in [0, 1, 3, 10, *rng.integers(20, len(packed), 20), len(packed) - 1]:
        path.write_bytes(packed[:length])
        with pytest.raises(ValueError, match=f"is not a whole copy of {name}.*mmdfw data fetch {name}") as problem:
            load_table(source)
        assert str(path) in str(problem.value)
    refused = 0
    for at in rng.integers(0, len(packed), 150):
        path.write_bytes(packed[:at] + bytes([packed[at] ^ (1 << rng.integers(8))]) + packed[at + 1 :])
        try:
            assert_close(load_table(source).x, good.x, rtol=0)
        except ValueError as problem:
            assert str(path) in str(problem)
            refused += 1
    assert refused > 100


def test_archives_write_nothing(tmp_path):
    source, packed, _ = small("naval")
    text = zipfile.ZipFile(io.BytesIO(packed)).read("UCI CBM Dataset/data.txt")
    put(tmp_path / "data" / source.file, zipped({"../../evil.txt": b"x", "/etc/evil": b"x", "../data.txt": text}))
    before = files(tmp_path)
    load_table(source)
    assert files(tmp_path) == before


def test_a_small_archive_with_a_huge_content(tmp_path, monkeypatch):
    monkeypatch.setattr(mmdfw.data._read, "LIMIT", 10_000)
    source, packed, _ = small("covertype")
    put(tmp_path / "data" / source.file, gzip.compress(b"0," * 10**6))
    with pytest.raises(ValueError, match="exceeds 10,000 bytes"):
        load_table(source)
    put(tmp_path / "data" / "UCI CBM Dataset.zip", zipped({"data.txt": b"0 " * 10**6}))
    with pytest.raises(ValueError, match="exceeds 10,000 bytes"):
        load_table("naval")


def test_two_candidates_in_a_zip(tmp_path):
    put(tmp_path / "data" / "UCI CBM Dataset.zip", zipped({"a/data.txt": b"1", "b/data.txt": b"2"}))
    with pytest.raises(ValueError, match="should hold one data.txt"):
        load_table("naval")


def test_subset_is_reported_and_the_whole_preferred(tmp_path):
    source, packed, _ = small("year")
    text = zipfile.ZipFile(io.BytesIO(packed)).read("YearPredictionMSD.txt")
    part = source._replace(rows=40, subsets=(("part.txt.gz", 20),))
    put(tmp_path / "data" / "year" / "part.txt.gz", gzip.compress(b"".join(text.splitlines(True)[:20])))
    assert load_table(part).note == "subset: 20 of 40 rows" and len(load_table(part).y) == 20
    with pytest.raises(ValueError, match="it has 20 rows, and should have 21"):
        load_table(part._replace(subsets=(("part.txt.gz", 21),)))
    put(tmp_path / "data" / "year" / source.file, packed)
    assert load_table(part).note == "" and len(load_table(part).y) == 40


# Fetching -----------------------------------------------------------------------------------------


@pytest.fixture
def server():
    "On loopback; `answers[path]` is (bytes, how many are sent, seconds of silence after that)."

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            asked.append(self.path)
            answer = answers.get(self.path)
            content, sent, silence = (answer.pop(0) if isinstance(answer, list) else answer) or (b"", None, 0)
            self.send_response(200 if answer is not None else 404)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[:sent])
            self.wfile.flush()
            time.sleep(silence)

    answers, asked = {}, []
    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.daemon_threads, running.block_on_close = True, False
    threading.Thread(target=running.serve_forever, daemon=True).start()
    running.answers = answers
    running.asked = asked
    running.url = f"http://127.0.0.1:{running.server_port}"
    yield running
    running.shutdown()
    running.server_close()


@pytest.mark.parametrize("name", list(SOURCES))
def test_fetch_then_load(name, server, tmp_path):
    source, packed, _ = small(name)
    source = source._replace(urls=(server.url + "/file",))
    server.answers["/file"] = (packed, None, 0)
    path = fetch(source)
    assert (
        path == tmp_path / "data" / name / source.file
        and path.read_bytes() == packed
        and files(tmp_path) == [f"data/{name}/{source.file}"]
    )
    assert len(load_table(source).y) == 40
    assert fetch(source) == path and len(server.asked) == 1, "a good copy is not fetched again"


@pytest.mark.parametrize("fault", ["gone", "dropped", "short", "other", "page"])
@pytest.mark.parametrize("name", ["naval", "protein", "year"])
def test_a_failed_fetch_leaves_nothing(fault, name, server, tmp_path):
    source, packed, _ = small(name, 2000)
    source = source._replace(urls=(server.url + "/file",))
    half = len(packed) // 2
    faults = dict(
        dropped=(packed, half, 0),
        short=(packed[:half], None, 0),
        other=(small(name, 30)[1], None, 0),
        page=(b"<html>", None, 0),
    )
    if fault in faults:
        server.answers["/file"] = faults[fault]
    with pytest.raises(OSError, match=f"could not fetch {name}; nothing was written"):
        fetch(source, tmp_path / "goods", retries=0)
    assert files(tmp_path) == [] and list((tmp_path / "goods" / name).iterdir()) == []
    server.answers["/file"] = (packed, None, 0)
    assert fetch(source, tmp_path / "goods", retries=0).read_bytes() == packed


def test_a_dropped_connection_is_tried_again(server):
    source, packed, _ = small("protein", 2000)
    server.answers["/file"] = [(packed, 5000, 0), (packed, None, 0)]
    assert fetch(source._replace(urls=(server.url + "/file",)), retries=1).read_bytes() == packed


def test_a_second_address(server):
    source, packed, _ = small("naval")
    server.answers["/new"] = (
        zipped({"UCI CBM Dataset.zip": packed}),
        None,
        0,
    )  # packed again, as UCI's newer links are
    fetch(source._replace(urls=(server.url + "/old", server.url + "/new")), retries=0)
    assert server.asked == ["/old", "/new"] and load_table(source).x.shape == (40, 17)


def test_a_broken_copy_gives_way_to_a_good_one_only(server, tmp_path):
    source, packed, _ = small("naval")
    source = source._replace(urls=(server.url + "/file",))
    path = put(tmp_path / "data" / "naval" / "UCI CBM Dataset.zip", b"broken")
    with pytest.raises(OSError, match="404"):
        fetch(source, retries=0)
    assert path.read_bytes() == b"broken"
    server.answers["/file"] = (packed, None, 0)
    assert fetch(source) == path and path.read_bytes() == packed


def test_progress_is_told(server):
    class Bar:
        total, seen = 0, 0

        def update(self, n):
            self.seen += n

        def reset(self):
            self.seen = 0

        def close(self):
            self.closed = True

    source, packed, _ = small("protein", 500)
    server.answers["/file"] = (packed, None, 0)
    bar = Bar()
    fetch(source._replace(urls=(server.url + "/file",)), progress=bar)
    assert bar.total == bar.seen == len(packed) and bar.closed


def test_killed_half_way(server, tmp_path):
    "Nothing can clean up after SIGKILL; still no file stands where `load` looks, and the next fetch succeeds."
    source, packed, _ = small("protein", 2000)
    server.answers["/file"] = [(packed, 5000, 20), (packed, None, 0)]
    code = (
        "from mmdfw.data._fetch import SOURCES, fetch\n"
        f"source = SOURCES['protein']._replace(urls=({server.url + '/file'!r},))\n"
        f"fetch(source, {str(tmp_path / 'data')!r})"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            if server.asked:
                break
            time.sleep(0.1)
        time.sleep(0.5)
        child.send_signal(signal.SIGKILL)
    finally:
        child.kill()
        child.wait()
    assert server.asked and not (tmp_path / "data" / "protein" / "CASP.csv").exists()
    source = source._replace(urls=(server.url + "/file",))
    with pytest.raises(FileNotFoundError):
        load_table(source)
    assert fetch(source).read_bytes() == packed and len(load_table(source).y) == 2000


@pytest.mark.parametrize(
    "name, message", [("diabetes", "ships with scikit-learn"), ("iris", "must be one of"), ("", "must be one of")]
)
def test_fetch_refuses_other_names(name, message):
    with pytest.raises(ValueError, match=message):
        fetch(name)


def test_catalogue(tmp_path):
    entries = {entry.name: entry for entry in catalogue()}
    assert list(entries) == ["naval", "protein", "year", "covertype", "diabetes", "breast_cancer"]
    assert [entries[n].rows for n in SOURCES] == [11_934, 45_730, 515_345, 581_012] and [
        entries[n].columns for n in SOURCES
    ] == [17, 9, 90, 54]
    assert all(entries[n].where == f"not here: mmdfw data fetch {n}" for n in SOURCES)
    for name in ("diabetes", "breast_cancer"):
        assert load_table(name).x.shape == (entries[name].rows, entries[name].columns)
    put(tmp_path / "data" / "CASP.csv", b"")
    put(tmp_path / "data" / "year" / "YearPredictionMSD.subset8162.txt.gz", b"")
    entries = {entry.name: entry for entry in catalogue()}
    assert (
        entries["protein"].where == str(tmp_path / "data" / "CASP.csv")
        and entries["year"].note == "subset: 8,162 of 515,345 rows"
    )


# Splits and scales --------------------------------------------------------------------------------


def test_split_is_a_seeded_partition():
    table = as_table(np.arange(101.0)[:, None], np.arange(101.0))
    parts = [split(table, seed) for seed in (0, 0, 1)]
    for part in parts:
        rows = np.concatenate([part.scale.original_y(part.y), part.scale.original_y(part.y_test)])
        assert_close(np.sort(rows), np.arange(101.0), atol=1e-12)
        assert len(part.y_test) == 10 and abs(part.y.mean()) < 1e-12 and abs(part.y.std() - 1) < 1e-12
    assert np.array_equal(parts[0].y_test, parts[1].y_test) and not np.array_equal(parts[0].y_test, parts[2].y_test)


def test_scales_come_from_training_rows_only():
    x, y = np.random.default_rng(0).normal(size=(20, 3)), np.arange(20.0)
    rows = dict(train=range(15), test=range(15, 20))
    changed = np.where(np.arange(20)[:, None] < 15, x, 1e6)
    one, two = split(as_table(x, y), **rows), split(as_table(changed, y), **rows)
    for a, b in zip(one.scale, two.scale):
        assert_close(a, b, rtol=0)
    assert_close(one.x, (x[:15] - x[:15].mean(0)) / x[:15].std(0), rtol=1e-12)


@pytest.mark.parametrize("value", [0.0, 288.0, 0.998, 1e-300, -1e30, 0.1])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_constant_columns(value, dtype):
    x = np.full((11_934, 2), value, dtype)
    x[:, 1] = np.random.default_rng(0).normal(size=11_934)
    part = split(as_table(x, np.full(11_934, 0.3)))
    assert (
        part.x.dtype == dtype
        and np.all(part.x[:, 0] == 0)
        and np.all(part.x_test[:, 0] == 0)
        and part.scale.x_scale[0] == 1
    )
    assert np.all(part.y == 0) and part.scale.y_scale == 1 and part.scale.original_y(0.0) == 0.3


def test_scaler_with_jax_and_single_precision():
    x = np.random.default_rng(0).normal(3000, 700, (500, 4))
    part = split(as_table(x, x @ np.ones(4)))
    single = split(as_table(x.astype(np.float32), x @ np.ones(4)))
    assert single.x.dtype == np.float32
    assert_close(single.x, part.x, rtol=1e-3, atol=1e-5)
    assert part.scale.standard_x(jnp.asarray(x[:3], jnp.float32)).dtype == jnp.float32
    assert part.scale.original_y(jnp.zeros(2, jnp.float32)).dtype == jnp.float32
    assert_close(part.scale.standard_x(x[0]), part.scale.standard_x(x[:1])[0], rtol=0)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(test_fraction=0.0), "between 0 and 1"),
        (dict(test_fraction=1.0), "between 0 and 1"),
        (dict(test_fraction=np.nan), "between 0 and 1"),
        (dict(test_fraction=0.01), "part of the split is empty"),
        (dict(test_fraction=0.99), "part of the split is empty"),
        (dict(seed=-1), "seed"),
        (dict(seed=0.5), "seed"),
        (dict(train=[1]), "both"),
        (dict(test=[1]), "both"),
        (dict(train=[], test=[1]), "train is empty"),
        (dict(train=[1], test=[]), "test is empty"),
        (dict(train=[0, 10], test=[1]), r"0 ... 9, got \[10\]"),
        (dict(train=[0, -1], test=[1]), r"got \[-1\]"),
        (dict(train=[0, 1], test=[1, 2]), "share 1 rows"),
        (dict(train=[0, 0], test=[1]), "more than once"),
        (dict(train=[0.5], test=[1]), "row numbers"),
        (dict(train=[[0]], test=[1]), "row numbers"),
        (dict(train=np.ones(10, bool), test=[1]), "row numbers"),
        (dict(scale_y=False), "0 or 1"),
    ],
)
def test_split_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        split(as_table(np.arange(20.0).reshape(10, 2), np.arange(10)), **options)


@pytest.mark.parametrize("labels", [[1, 2], [0, 1, 2], [-1, 1], [0.5, 1.0], [np.nan, 1.0], [[0, 1]], ["a", "b"]])
def test_labels_that_are_not_binary(labels):
    with pytest.raises(ValueError):
        check_binary(labels)


@pytest.mark.parametrize("labels", [[0, 1], [1.0, 0.0, 0.0], [True, False], [0, 0]])
def test_labels_that_are(labels):
    assert_close(check_binary(labels), np.asarray(labels), rtol=0)


# Your own -----------------------------------------------------------------------------------------

FRAME = pd.DataFrame({"a": [1, 2, 3], "b": [0.5, 1.5, 2.5], "c": [True, False, True]})


@pytest.mark.parametrize(
    "made",
    [
        lambda: as_table(FRAME, target="b"),
        lambda: as_table(FRAME[["a", "c"]], FRAME["b"]),
        lambda: as_table(FRAME.astype({"a": "Int64"}), target="b"),
        lambda: as_table(FRAME, target=1),
    ],
)
def test_frames(made):
    table = made()
    assert table.columns == ("a", "c") and table.target == "b" and table.x.dtype == table.y.dtype == np.float64
    assert_close(table.x, np.array([[1, 1], [2, 0], [3, 1.0]]), rtol=0)
    assert_close(table.y, np.array([0.5, 1.5, 2.5]), rtol=0)


@pytest.mark.parametrize(
    "column",
    [
        ["x", "y", "z"],
        ["1", "2", "?"],
        pd.to_datetime(["2020", "2021", "2022"]),
        pd.Categorical(["u", "v", "u"]),
        [1j, 2j, 3j],
        [object(), 1, 2],
        [{}, 1, 2],
        pd.to_timedelta([1, 2, 3]),
    ],
)
def test_columns_that_are_not_numeric(column):
    with pytest.raises(ValueError, match="column 'd' is not numeric"):
        as_table(FRAME.assign(d=column), target="b")


def test_the_wrong_entry_is_shown():
    with pytest.raises(ValueError, match=r"it holds '\?'"):
        as_table(FRAME.assign(d=["1", "2", "?"]), target="b")


@pytest.mark.parametrize(
    "made, message",
    [
        (
            lambda: as_table(FRAME.assign(a=pd.array([1, None, 3], "Int64")), target="b"),
            r"first: \[1\]\), columns \['a'\]",
        ),
        (lambda: as_table(FRAME.assign(b=[1, np.inf, 3]), target="b"), r"first: \[1\]\), columns \['b'\]"),
        (lambda: as_table(FRAME, target="z"), "no column 'z'"),
        (lambda: as_table(FRAME), "needs a target"),
        (lambda: as_table(FRAME, target=3), "no column 3"),
        (lambda: as_table(FRAME, FRAME["b"], target="b"), "not both"),
        (lambda: as_table(FRAME[:0], target="b"), "at least one row"),
        (lambda: as_table(FRAME[["b"]], target="b"), "one input column"),
        (lambda: as_table(pd.concat([FRAME, FRAME], axis=1), target="b"), "several columns called"),
        (lambda: as_table(np.zeros(3), np.zeros(3)), "2 axes"),
        (lambda: as_table(np.zeros((3, 2)), np.zeros((3, 1))), "ravel"),
        (lambda: as_table(np.zeros((3, 2)), np.zeros(2)), "3 rows and y has 2"),
        (lambda: as_table(np.zeros((3, 2), complex), np.zeros(3)), "real numbers"),
    ],
)
def test_as_table_refuses(made, message):
    with pytest.raises(ValueError, match=message):
        made()


@pytest.mark.parametrize(
    "text, message",
    [
        (b"", "empty"),
        (b"\n\n", "empty"),
        (b"a,b\n", "at least one row"),
        (b"1,2\n3,4\n", "must name the columns"),
        (b"a,a\n1,2\n", "more than once"),
        (b",b\n0,1\n", "no name"),
        (b"a,b\n1,2\ninf,3\n", "missing or infinite"),
        (b"a,b\n1,2\n3,4,5\n", "cannot be read"),
        (b"a,b\n1,2,3\n4,5,6\n", "cannot be read"),
        (b"a,b\nNA,2\n", "of use: left out: a, since it is empty"),
        (b"a,b\nred,2\n", "of use: left out: a, since it is always 'red'"),
        (b"a,b\n1,2\n2,3\n1.234.5,3\n", "not numeric, it holds '1.234.5'; write numbers with a decimal point"),
        (b"a,b\n1,red\n2,green\n3,blue\n", "holds 3 words .blue, green, red.; for more classes"),
        (b"a,b\n1,\n2,\n", "at least one row"),
        (b"a,c\n1,2\n", r"its columns are \['a', 'c'\]"),
        (b"\xff\xfe\x00,b\n1,2\n", "has no column 'b'"),  # UTF-16 by its first bytes, but words that nobody wrote
        (b"\x1f\x8bjunk", "cannot be read"),
    ],
)
def test_csv_refuses(text, message, tmp_path):
    path = put(tmp_path / "mine.csv", text)
    with pytest.raises(ValueError, match=message) as problem:
        load_table(path, target="b")
    assert "mine.csv" in str(problem.value)


def test_a_file_with_words_dates_and_gaps(tmp_path):
    text = b"id,sort,size,day,b\n" + b"".join(
        b"n%d,%s,%s,2024-01-%02d,%s\n"
        % (i, b"uv"[i % 2 : i % 2 + 1], b"%d" % i if i % 5 else b"", i + 1, b"no yes".split()[i % 3 == 0])
        for i in range(31)
    )
    table = load_table(put(tmp_path / "mine.csv", text), target="b")
    assert table.columns == ("sort is v", "size", "size is missing", "day") and table.labels == ("no", "yes")
    assert np.array_equal(table.x[:, 0], np.arange(31) % 2) and table.x[0, 1] == np.median(
        [i for i in range(31) if i % 5]
    )
    assert np.array_equal(table.x[:, 3] - table.x[0, 3], np.arange(31)) and np.array_equal(
        table.y, np.arange(31) % 3 == 0
    )
    for part in ("sort (2)", "in day", "size (7: ", "id, since its entries name the rows", "b is 1 for 'yes'"):
        assert part in table.prepared


@pytest.mark.parametrize(
    "content",
    [
        b"a,b\n1,2\n3,4\n",
        b'"a","b"\r\n1,2\r\n3,4\r\n',
        b"\xef\xbb\xbfa, b\n1, 2\n3, 4",
        b'\xef\xbb\xbf"a","b"\n1,2\n3,4\n',
        gzip.compress(b"a,b\n1,2\n3,4\n", mtime=0),
    ],
)
def test_csv_dialects(content, tmp_path):
    table = load_table(str(put(tmp_path / "mine.csv", content)), target="b")
    assert table.columns == ("a",) and np.array_equal(table.x, [[1], [3]]) and np.array_equal(table.y, [2, 4])


class Program:
    def __reduce__(self):
        return os.mkdir, (str(Program.mark),)


@pytest.mark.parametrize("file", ["a.npy", "a.npz", "raw.npy"])
def test_nothing_is_unpickled(file, tmp_path):
    Program.mark = tmp_path / "mark"
    path = tmp_path / file
    held = np.array([Program(), Program()], dtype=object)
    if file == "a.npy":
        np.save(path, held, allow_pickle=True)
    elif file == "a.npz":
        np.savez(path, x=held, y=np.zeros(2))
    else:
        path.write_bytes(pickle.dumps(Program()))
    with pytest.raises(ValueError, match="cannot be read: it holds pickled objects"):
        load_table(path, target=0)
    assert not Program.mark.exists()


def test_damaged_numpy_files(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)), z=np.zeros(3))
    with pytest.raises(ValueError, match="must hold arrays x and y"):
        load_table(tmp_path / "a.npz")
    np.savez(tmp_path / "a.npz", x=np.zeros((30, 2)), y=np.zeros(30))
    whole = (tmp_path / "a.npz").read_bytes()
    for length in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "a.npz").write_bytes(whole[:length])
        with pytest.raises(ValueError, match="cannot be read"):
            load_table(tmp_path / "a.npz")


def test_load_refuses_other_names(tmp_path):
    with pytest.raises(FileNotFoundError, match="no set and no file is called 'navel'.*naval"):
        load_table("navel")
    with pytest.raises(IsADirectoryError, match="is a folder"):
        load_table(tmp_path)
    with pytest.raises(ValueError, match="target of naval is fixed"):
        load_table("naval", target="turbine decay")


# The real files -----------------------------------------------------------------------------------


@pytest.fixture
def real(monkeypatch):
    monkeypatch.setenv("MMDFW_DATA", REAL)


def linear_rmse(table, seed=0):
    part = split(table, seed)
    x, x_test = (np.column_stack([values, np.ones(len(values))]) for values in (part.x, part.x_test))
    return part.scale.y_scale * np.sqrt(
        np.mean((x_test @ np.linalg.lstsq(x, part.y, rcond=None)[0] - part.y_test) ** 2)
    )


@needs_files
def test_real_naval(real):
    table = load_table("naval")
    assert table.x.shape == (11_934, 17) and table.target == "turbine decay" and table.columns[-1] == "compressor decay"
    assert table.y.min() == 0.975 and table.y.max() == 1.0
    assert np.flatnonzero(np.ptp(table.x, 0) == 0).tolist() == [8, 11] and np.array_equal(table.x[:, 5], table.x[:, 6])
    part = split(table)
    assert np.all(part.x[:, [8, 11]] == 0) and np.all(np.isfinite(part.x_test)) and len(part.y_test) == 1193
    assert abs(np.mean([linear_rmse(table, seed) for seed in range(5)]) / 1.85e-3 - 1) < 0.05


@needs_files
def test_real_protein(real):
    table = load_table("protein")
    assert table.x.shape == (45_730, 9) and table.target == "RMSD" and abs(table.y.std() - 6.118) < 1e-3
    assert abs(np.mean([linear_rmse(table, seed) for seed in range(3)]) / 5.21 - 1) < 0.02


@needs_files
def test_real_year(real):
    table = load_table("year")
    assert table.x.shape[1] == 90 and 1900 < table.y.min() and table.y.max() < 2012
    assert (len(table.y), table.note) in ((515_345, ""), (8_162, "subset: 8,162 of 515,345 rows"))
    if table.note:
        assert abs(np.mean([linear_rmse(table, seed) for seed in range(5)]) / 9.75 - 1) < 0.05


@needs_files
def test_real_covertype(real):
    table = load_table("covertype")
    assert table.x.shape == (581_012, 54) and table.x.dtype == np.float32 and table.y.sum() == 283_301
    assert (
        np.all(table.x == np.round(table.x))
        and table.x.max() < 2**24
        and np.all(table.x[:, 10:14].sum(1) == 1)
        and np.all(table.x[:, 14:].sum(1) == 1)
    )
    part = split(table, scale_y=False)
    assert part.x.dtype == np.float32 and len(part.y_test) == 58_101
    assert_close(part.x.mean(0, dtype=float), np.zeros(54), atol=1e-5)


@needs_files
@pytest.mark.parametrize("name", ["naval", "protein", "covertype"])
def test_real_content_has_the_published_checksum(name, server, tmp_path):
    source = SOURCES[name]
    whole = (Path(REAL) / name / source.file).read_bytes()
    served = source._replace(urls=(server.url + "/file",))
    server.answers["/file"] = [(whole, len(whole) // 2, 0), (whole[: len(whole) // 2], None, 0), (whole, None, 0)]
    for _ in range(2):
        with pytest.raises(OSError, match="nothing was written"):
            fetch(served, tmp_path, retries=0)
        assert files(tmp_path) == []
    assert fetch(served, tmp_path, retries=0).read_bytes() == whole
