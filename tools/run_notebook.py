"""Execute one notebook in place, as nbdev_test does: in its own folder, without its `#| eval: false` cells.

A notebook that fails is left as it was.
"""

import os
import re
import sys
from pathlib import Path

from execnb.nbio import read_nb, write_nb
from execnb.shell import CaptureShell


def skipped(cell):
    return cell.cell_type != "code" or re.search(r"^#\|\s*eval:\s*false", cell.source, re.M | re.I)


path = Path(sys.argv[1]).resolve()
nb = read_nb(path)
for cell in nb.cells:  # the shell keeps the old output of a cell that now has none
    if not skipped(cell):
        cell.outputs = []
os.chdir(path.parent)
shell = CaptureShell(path)
try:
    shell.run_all(nb, exc_stop=True, preproc=skipped)
except BaseException:
    sys.exit(shell.prettytb(path))
write_nb(nb, path)
