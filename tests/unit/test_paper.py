"""The paper as data: its published numbers agree with each other, and the protocol with the numbers."""

import re
from pathlib import Path

import pytest

from fedselect.core.options import options
from fedselect.methods import METHODS
from fedselect.paper import protocol
from fedselect.paper.numbers import PUBLISHED, SETS
from fedselect.paper.protocol import COLUMNS, OWN, TARGETS, Setting, read_column, read_tuning, targets
from fedselect.runs import presets

FOLDER = Path(protocol.__file__).parent / "protocol"
SIGNS = {"α": "limit", "p": "rate", "γ": "lr", "γ_v": "personal_lr"}
TABLES = [t for t in TARGETS if not t.startswith("fig-")]


def column(table, name):
    """A printed column, by row."""
    at = PUBLISHED[table].columns.index(name)
    return {row: values[at] for row, values in PUBLISHED[table].rows.items()}


# ---- the numbers; the paper prints many of them twice


def test_every_row_has_a_number_in_every_column():
    for table in PUBLISHED.values():
        assert {len(values) for values in table.rows.values()} == {len(table.columns)}


@pytest.mark.parametrize("name", SETS)
def test_table_1_shows_the_best_limit_of_table_2_and_it_leads(name):
    first = column("table1", name)
    assert first["FedSelect"] == max(column("table2", name).values()) == max(first.values())


@pytest.mark.parametrize("name", SETS)
def test_table_3_repeats_table_2(name):
    rows = column("table2", name)
    assert {r: v for r, v in column("table3", name).items() if r in rows} == {
        r: rows[r] for r in ("FedSelect (α=0.30)", "FedSelect (α=0.50)")
    }


@pytest.mark.parametrize("name", ["cifar10", "cifar10c"])
def test_the_table_of_limits_repeats_table_2(name):
    limits = column("alpha", name)
    assert {f"FedSelect ({a})": limits[a] for a in ("α=0.05", "α=0.30", "α=0.50", "α=0.80")} == column("table2", name)


def test_the_grid_repeats_table_2_where_p_is_5_percent():
    grid = PUBLISHED["p-alpha"]
    assert grid.rows["p=0.05"] == tuple(column("table2", "cifar10").values())


def test_a_hundred_images_repeat_table_1_and_twenty_are_those_of_the_text():
    alike = column("data-size", "N=100")
    assert alike == {r: v for r, v in column("table1", "cifar10").items() if r in alike}
    few = column("data-size", "N=20")
    assert (few["FedBABU"], few["FedPer"]) == (33.1, 55.7)  # quoted in section 5.2


def test_a_cell_is_found_by_row_data_and_setting():
    assert PUBLISHED["table1"].value("Ditto", "officehome") == 77.99
    assert PUBLISHED["p-alpha"].value("p=0.20", "cifar10", "α=0.80") == 82.15
    assert PUBLISHED["p-alpha"].value("p=0.20", "digits", "α=0.80") is None
    assert PUBLISHED["table1"].value("Ditto", "pacs") is None


# ---- the protocol


def test_every_file_is_listed_and_every_listed_one_is_there():
    assert {p.stem for p in (FOLDER / "targets").iterdir()} == {*TARGETS, *OWN}
    assert {p.stem for p in (FOLDER / "columns").iterdir()} == set(COLUMNS)


@pytest.mark.parametrize("name", TABLES)
def test_rows_and_columns_are_the_papers(name):
    (target,) = targets(name)
    published = PUBLISHED[name]
    assert [r.name for r in target.rows] == list(published.rows)
    if published.on is None:
        assert target.on == published.columns
    else:
        assert target.on == (published.on,)
        assert tuple(s.name for s in target.settings) == published.columns


@pytest.mark.parametrize("name", [*TARGETS, *OWN])
def test_a_rows_name_says_its_options(name):
    (target,) = targets(name)
    for said in (*target.rows, *target.settings):
        given = said.method if isinstance(said, Setting) else said.options
        for sign, value in re.findall(r"(\w+)=([\d.]+)", said.name or ""):
            if sign == "N":  # what is left to train on, where some is held out
                held = read_column(target.on[0]).tuning if target.score == "val" else {}
                data = {"val": 0, **held, **said.data}
                assert data["train"] - data["val"] == int(value), said.name
            else:
                assert given[SIGNS[sign]] == float(value), said.name
    assert target.against in (None, *(r.name for r in target.rows))


@pytest.mark.parametrize("name", SETS)
def test_a_column_has_the_papers_rates_and_the_best_limit(name):
    own = read_column(name)
    for row in targets("table1")[0].rows:
        said = presets.preset("paper", row.method, name)["method"]
        assert {k: v for k, v in own.of(row.method).items() if k != "limit"} == {
            k: v for k, v in said.items() if k in own.of(row.method) and k != "limit"
        }
    best = max(column("table2", name).items(), key=lambda item: item[1])[0]
    assert own.methods["fedselect"]["limit"] == float(best.split("α=")[1].strip(")"))


def test_layers_share_fedselects_values():
    assert read_column("cifar10").of("layers", "fedselect") == {"epochs": 3, "lr": 0.001, "personal_lr": 0.1}


def test_tuning_gives_every_method_the_papers_grid_and_those_with_two_options_the_same_budget():
    tuning = read_tuning()
    assert sorted(tuning.common["lr"]) == [0.001, 0.01, 0.1]
    for method, grid in tuning.methods.items():
        (own,) = grid
        assert own in options(METHODS[method])
        assert sorted(grid[own]) == ([0.25, 0.5, 0.75] if method == "ditto" else [0.001, 0.01, 0.1])
    tuned = {r.tuned_as for t in (*TARGETS, *OWN) for r in targets(t)[0].rows}
    assert tuned - set(tuning.methods) == {"local", "fedavg"}  # they have one rate and nothing else
