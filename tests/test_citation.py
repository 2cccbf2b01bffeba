"""What a reader is told to cite is this version, under its licence."""

import re
from pathlib import Path

import headlab

ROOT = Path(__file__).parents[1]
CITATION = (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def field(name):
    [value] = re.findall(rf"^{name}: (.*)$", CITATION, re.MULTILINE)
    return value.strip('"')


def test_the_citation_names_this_version_licence_and_title():
    assert field("version") == headlab.__version__
    assert f'license = "{field("license")}"' in (ROOT / "pyproject.toml").read_text()
    entry = re.search(r"@software\{(.*?)\n\}", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    assert f"version = {{{headlab.__version__}}}" in entry
    assert f"title   = {{{field('title')}}}" in entry
