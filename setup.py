"""Everything is set in settings.ini; edit there, not here."""

from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

config = ConfigParser(delimiters=["="])
config.read("settings.ini", encoding="utf-8")
cfg = config["DEFAULT"]

lib = cfg["lib_path"]
readme = Path("README.md")

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=readme.read_text(encoding="utf-8") if readme.exists() else "",
    long_description_content_type="text/markdown",
    author=cfg["author"],
    license={"apache2": "Apache-2.0"}[cfg["license"]],
    keywords=cfg["keywords"].split(),
    classifiers=[
        "Development Status :: " + {"3": "3 - Alpha", "4": "4 - Beta"}[cfg["status"]],
        "Intended Audience :: " + cfg["audience"],
        "Natural Language :: " + cfg["language"],
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering",
    ],
    packages=find_packages(include=[lib, lib + ".*"]),
    include_package_data=True,
    python_requires=">=" + cfg["min_python"],
    install_requires=cfg["requirements"].split(),
    extras_require={
        "dev": cfg["dev_requirements"].split() + cfg["tutorials_requirements"].split(),
        "tutorials": cfg["tutorials_requirements"].split(),
        "peers": cfg["peers_requirements"].split(),
        "cuda12": cfg["cuda12_requirements"].split(),
        "docs": cfg["docs_requirements"].split(),
    },
    entry_points={
        "console_scripts": cfg["console_scripts"].split(),
        "nbdev": [f"{lib}={lib}._modidx:d"],
    },
)
