"""The documentation: links and anchors lead somewhere, every page is in the navigation, examples in docstrings run."""

import dataclasses
import doctest
import re
from pathlib import Path

import pytest

import fedselect as fs
from fedselect.runs.config import Config

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *(ROOT / "examples").rglob("README.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
MADE = re.compile(r"^reference/[\w-]+\.md$")  # pages that the site makes from the program
TAKEN = {"index.md", "CONTRIBUTING.md", "CHANGELOG.md"}


def anchors(page: Path) -> set[str]:
    """The anchors of a page as GitHub and the site name them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    found: set[str] = set(re.findall(r'<a id="([\w-]+)">', text))
    for heading in re.findall(r"^#+ (.+)$", text, re.M):
        plain = re.sub(r"\]\([^)]*\)", "]", heading)
        name = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found.add(name)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_and_anchors_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if DOCS in target.parents and MADE.match(str(target.relative_to(DOCS))):
            continue
        assert target.exists(), f"{link} in {page.relative_to(ROOT)}"
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), f"{link} in {page.relative_to(ROOT)}"


def test_every_page_is_in_the_navigation_once():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    named = re.findall(r": ([\w/.+-]+\.md)$", nav, re.M)
    assert len(named) == len(set(named))
    there = {str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md")} | {
        str(p.relative_to(ROOT)) for p in PAGES if "examples" in p.parts
    }
    assert {n for n in named if not MADE.match(n)} - TAKEN == there


def test_the_configuration_page_lists_every_field():
    page = (DOCS / "configuration.md").read_text(encoding="utf-8").split("## Options of every run")[1]
    listed = re.findall(r"^\| `(\w+)` \|", page.split("## Environment")[0], re.M)
    assert listed == [f.name for f in dataclasses.fields(Config)]


def test_the_examples_in_docstrings_run():
    finder, found = doctest.DocTestFinder(recurse=False), 0
    for name in fs.__all__:
        for test in finder.find(getattr(fs, name), name, globs={}) if callable(getattr(fs, name)) else ():
            found += len(test.examples)
            assert doctest.DocTestRunner(verbose=False).run(test).failed == 0, f"fs.{name}"
    assert found > 20
