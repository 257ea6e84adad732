"""What wheel and sdist hold: all of the package and its py.typed, and nothing of tests, notebooks or tools."""

import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
folder = Path(sys.argv[1])
(wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
in_wheel = {name for name in zipfile.ZipFile(wheel).namelist() if not name.split("/")[0].endswith(".dist-info")}
with tarfile.open(sdist) as archive:
    in_sdist = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "mmdfw").rglob("*.py")} | {"mmdfw/py.typed"}

assert in_wheel == package, f"the wheel differs from the package by {sorted(in_wheel ^ package)}"
needed = package | {"LICENSE", "README.md", "settings.ini", "setup.py", "pyproject.toml", "CHANGELOG.md"}
assert needed <= in_sdist, f"the sdist lacks {sorted(needed - in_sdist)}"
strange = {name for name in in_sdist if name.partition("/")[0] in ("tests", "nbs", "tools", "results")}
assert not strange, f"the sdist holds {sorted(strange)[:5]}"
metadata = next(name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("METADATA"))
text = zipfile.ZipFile(wheel).read(metadata).decode()
for line in (
    "Project-URL: Documentation",
    "Requires-Python: >=3.11",
    "Classifier: Typing :: Typed",
    "Provides-Extra: plots",
):
    assert line in text, f"the metadata lack {line!r}"
assert "](nbs/" not in text and "](README_files" not in text, "the description has links that lead nowhere on an index"
print(f"{wheel.name} and {sdist.name} hold what they should: {len(package)} files of the package.")
