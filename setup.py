"""Everything is set in settings.ini; edit there, not here."""

import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

config = ConfigParser(delimiters=["="])
config.read("settings.ini", encoding="utf-8")
cfg = config["DEFAULT"]

lib = cfg["lib_path"]
readme = Path("README.md")
repository = f"https://github.com/{cfg['user']}/{cfg['repo']}"
site = f"https://{cfg['user']}.github.io/{cfg['repo']}"


def wanted(*names):
    "The requirements of some extras together."
    return [one for name in names for one in cfg[f"{name}_requirements"].split()]


def with_absolute_links(text):
    "README for the package index, where nothing lies beside it: pictures and pages by their address."
    text = re.sub(
        r"(!\[[^\]]*\]\()(?!https?:)", rf"\1https://raw.githubusercontent.com/{cfg['user']}/{cfg['repo']}/main/", text
    )
    return re.sub(r"(?<!!)(\[[^\]]*\]\()(?!https?:|#|mailto:)", rf"\1{repository}/blob/main/", text)


ADDED = ("plots", "tables", "numpyro", "arviz")  # what a user of everything but PyMC has

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=with_absolute_links(readme.read_text(encoding="utf-8")) if readme.exists() else "",
    long_description_content_type="text/markdown",
    author=cfg["author"],
    license={"apache2": "Apache-2.0"}[cfg["license"]],
    license_files=["LICENSE"],
    url=site,
    project_urls={
        "Documentation": site,
        "Source": repository,
        "Issues": f"{repository}/issues",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
    },
    keywords=cfg["keywords"].split(),
    classifiers=[
        "Development Status :: " + {"3": "3 - Alpha", "4": "4 - Beta"}[cfg["status"]],
        "Intended Audience :: " + cfg["audience"],
        "Natural Language :: " + cfg["language"],
        "Intended Audience :: Developers",
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        *(f"Programming Language :: Python :: {version}" for version in ("3.11", "3.12", "3.13")),
        "Topic :: Scientific/Engineering",
        "Topic :: Scientific/Engineering :: Mathematics",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    packages=find_packages(include=[lib, lib + ".*"]),
    include_package_data=False,
    package_data={lib: ["py.typed"]},
    python_requires=">=" + cfg["min_python"],
    install_requires=cfg["requirements"].split(),
    extras_require={
        **{name: wanted(name) for name in (*ADDED, "pymc", "cuda12", "docs")},
        "all": wanted(*ADDED),
        "tutorials": wanted(*ADDED),
        "test": [
            *wanted(*ADDED),
            *(one for one in wanted("dev") if one.startswith(("pytest", "hypothesis", "fastcore"))),
        ],
        "peers": wanted("numpyro", "peers"),
        "dev": wanted("dev", *ADDED),
    },
    entry_points={
        "console_scripts": cfg["console_scripts"].split(),
        "nbdev": [f"{lib}={lib}._modidx:d"],
    },
)
