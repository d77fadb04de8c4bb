"""The pages of the methods: one for each, linked from the index, with exactly the options that the code has."""

import re
from pathlib import Path

import pytest

from fedselect.core.options import options
from fedselect.methods import METHODS
from fedselect.training.settings import Training

DOCS = Path(__file__).parents[2] / "docs"
INDEX = DOCS / "methods.md"
SHARED_PAGES = {"layers": "fedselect"}  # an ablation lives on fedselect's page
PARTS = [
    "Maths", "Shared and personal", "Bytes a round", "Options", "Where implementations differ, and what we chose", "Reference",
]  # fmt: skip


def page(method: str) -> Path:
    return DOCS / "methods" / (SHARED_PAGES.get(method, method).replace("+", "-") + ".md")


def documented(path: Path) -> set[tuple[str, str]]:
    """(name, default) of every row in the page's tables of options."""
    return {(name, default) for name, default, _ in option_rows(path)}


def option_rows(path: Path) -> list[tuple[str, str, str]]:
    """Name, default and meaning of every row in the page's tables of options."""
    found, inside = [], False
    for line in path.read_text(encoding="utf-8").splitlines():
        cells = [c.strip().replace(r"\|", "|") for c in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not cells:
            inside = False
        elif cells == ["name", "default", "meaning"]:
            inside = True
        elif inside and set(cells[0]) != {"-"}:
            assert len(cells) == 3, line
            assert cells[2], f"{path.name}: no meaning is given: {line}"
            found.append((cells[0].strip("`"), cells[1], cells[2]))
    return found


def existing(factory) -> set[tuple[str, str]]:
    return {(o.name, o.describe().partition("=")[2]) for o in options(factory).values()}


PAGES = sorted({page(m) for m in METHODS})


@pytest.mark.parametrize("method", METHODS)
def test_a_method_has_a_page_with_all_its_options_and_their_defaults(method):
    path = page(method)
    assert path.exists(), f"write docs/methods/{path.name} for {method}"
    missing = existing(METHODS[method]) - documented(path)
    assert not missing, f"docs/methods/{path.name} lacks these rows (name, default) in its options: {sorted(missing)}"


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_a_page_documents_no_option_that_does_not_exist(path):
    known = set().union(*(existing(f) for m, f in METHODS.items() if page(m) == path))
    assert documented(path) <= known, sorted(documented(path) - known)


def plain(meaning: str) -> str:
    """A meaning as a terminal shows it: without code marks, and without the sign that stands for it in the maths."""
    return re.sub(r"^(?:[A-Za-zα-ω]'?|[Eγa]_\w): ", "", meaning).replace("`", "")


@pytest.mark.parametrize("method", [*METHODS, "training"])
def test_every_option_has_its_line_in_the_docstring_and_the_page_begins_with_it(method):
    factory, path = (Training, INDEX) if method == "training" else (METHODS[method], page(method))
    rows = {(name, plain(meaning)) for name, _, meaning in option_rows(path)}
    for option in options(factory).values():
        assert option.meaning, f"say what {option.name} of {method} does, in its docstring: '{option.name}: ...'"
        told = [meaning for name, meaning in rows if name == option.name]
        assert any(meaning.startswith(option.meaning) for meaning in told), (option.name, option.meaning, told)


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_a_page_names_its_method_and_has_all_parts_in_order(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    own = next(m for m in METHODS if page(m) == path and m not in SHARED_PAGES)
    assert re.fullmatch(rf"# .+ \(`{re.escape(own)}`\)", lines[0])
    assert [line[3:] for line in lines if line.startswith("## ")] == PARTS


def test_the_index_lists_every_method_and_links_its_page():
    text = INDEX.read_text(encoding="utf-8")
    for method in METHODS:
        assert re.search(rf"^\| \[`{re.escape(method)}`\]\(methods/{page(method).name}(#[\w-]+)?\) \|", text, re.M), method


def test_the_index_documents_the_options_common_to_all():
    assert documented(INDEX) == existing(Training)


def test_every_page_belongs_to_a_method():
    assert sorted((DOCS / "methods").glob("*.md")) == PAGES


@pytest.mark.parametrize("path", [INDEX, *PAGES], ids=lambda p: p.stem)
def test_links_lead_somewhere(path):
    for link, anchor in re.findall(r"\]\(([^)#:]+)(?:#([^)]*))?\)", path.read_text(encoding="utf-8")):
        target = path.parent / link
        assert target.exists(), link
        headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.M)
        assert not anchor or anchor in {h.lower().replace(" ", "-") for h in headings}, (link, anchor)
