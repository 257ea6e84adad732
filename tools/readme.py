"""How nbconvert turns nbs/index.ipynb into README.md; `make readme` passes this file as its configuration."""

import os
import re

from nbconvert.preprocessors import Preprocessor


class FrontPage(Preprocessor):
    "Drop the directives, give figures their alternative text, and make links right for the folder above."

    def preprocess_cell(self, cell, resources, index):
        if cell.cell_type == "code":
            if re.search(r"^#\|\s*echo:\s*false", cell.source, re.M):
                cell.metadata.transient = {"remove_source": True}
            alt = re.search(r'^#\|\s*fig-alt:\s*"(.*)"', cell.source, re.M)
            for output in cell.outputs:
                if alt and "image/png" in output.get("data", {}):
                    output.data = {"text/markdown": f"![{alt[1]}]({output.metadata.filenames['image/png']})"}
            cell.source = re.sub(r"^#\|.*\n?", "", cell.source, flags=re.M).strip()
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"\]\((?![a-z]+:|[#/])([^)\s]+)", self.relink, cell.source)
        return cell, resources

    def relink(self, match):
        real = os.path.realpath("nbs/" + match[1])  # through symbolic links
        return "](" + os.path.relpath(real).replace(os.sep, "/")

    def preprocess(self, nb, resources):
        nb.metadata.language_info = {"name": "python"}  # nbdev_clean takes it out; it colours the code
        return super().preprocess(nb, resources)


c = get_config()  # noqa: F821
c.MarkdownExporter.preprocessors = [FrontPage]
c.RegexRemovePreprocessor.patterns = [r"(#\|.*\n)*#\|\s*hide\s*(\n|\Z)", r"---\n"]  # hidden cells, front matter
