"""Options: a signature is a list of options; flags and files are checked against it."""

from dataclasses import replace
from itertools import combinations
from typing import Literal

import pytest
from torch import Tensor

import fedselect as fs
from fedselect.core.errors import nearest, unknown
from fedselect.core.options import Option, build, call, find, named, options, resolve, summary
from fedselect.data import DATA
from fedselect.methods import METHODS
from fedselect.models import MODELS
from fedselect.runs.config import Config
from fedselect.training.settings import Training


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        (int, "3", 3),
        (int, 3, 3),
        (int, "-3", -3),
        (float, "0.5", 0.5),
        (float, "1e-3", 0.001),
        (float, 1, 1.0),
        (float | Tensor, "0.25", 0.25),
        (float | Tensor | None, "none", None),
        (float | None, None, None),
        (float | None, "2", 2.0),
        (int | None, "none", None),
        (bool, "yes", True),
        (bool, "True", True),
        (bool, "no", False),
        (bool, False, False),
        (str, "abc", "abc"),
        (str | None, "none", None),
        (int | str, "auto", "auto"),
        (int | str, "4", 4),
        (Literal["most", "least"], "least", "least"),
    ],
)
def test_a_value_is_read_as_its_kind(kind, given, expected):
    got = Option("x", None, kind).parse(given)
    assert got == expected
    assert type(got) is type(expected)


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        (int, "3.5", "x must be a whole number, not '3.5'"),
        (int, True, "x must be a whole number, not True"),
        (int, "", "x must be a whole number"),
        (int, None, "x needs a value"),
        (int, "none", "x must be a whole number, not 'none'"),
        (float, "half", "x must be a number, not 'half'"),
        (float, [1.0], r"x must be a number, not \[1.0\]"),
        (float | Tensor | None, "half", "x must be a number, not 'half'"),
        (bool, "maybe", "x must be yes or no, not 'maybe'"),
        (int | float, "many", "x must be a whole number or a number, not 'many'"),
        (Literal["most", "least"], "some", "x is most or least, not 'some'"),
    ],
)
def test_what_is_not_of_its_kind_is_refused(kind, given, said):
    with pytest.raises(fs.InputError, match=said):
        Option("x", None, kind).parse(given)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (Option("rate", 0.05, float), "rate=0.05"),
        (Option("strict", True, bool), "strict=yes"),
        (Option("clip", None, float | None), "clip=none"),
        (Option("by", "most", Literal["most", "least"]), "by=most (most|least)"),
    ],
)
def test_an_option_describes_itself(option, said):
    assert option.describe() == said


def thing(data, size: int = 3, seed: int = 0):
    """Makes a thing.

    At length.
    """
    return data, size, seed


TABLE = {"thing": thing}


def test_data_and_seed_are_not_options():
    assert list(options(thing)) == ["size"]


def test_the_summary_is_the_docstrings_first_line():
    assert summary(thing) == "Makes a thing."


def test_defaults_are_filled_in_and_given_values_parsed():
    assert resolve("thing", "thing", TABLE, {}) == {"size": 3}
    assert resolve("thing", "thing", TABLE, {"size": "5"}) == {"size": 5}
    assert build("thing", "thing", TABLE, {"size": "5", "seed": 7}, data="d") == ("d", 5, 7)


def test_unknown_names_get_the_nearest():
    with pytest.raises(fs.InputError, match="there is no thing 'thin'; did you mean 'thing'"):
        find("thing", "thin", TABLE)
    with pytest.raises(fs.InputError, match="there is no option of thing thing: 'sise'; did you mean 'size'"):
        resolve("thing", "thing", TABLE, {"sise": 1})


def test_a_name_near_nothing_gets_the_whole_list():
    assert str(unknown("fruit", "zzz", ["pear", "apple"])) == "there is no fruit 'zzz'; known: apple, pear."


@pytest.mark.parametrize(
    ("given", "table", "found"),
    [
        ("FedAvg", METHODS, "fedavg"),
        ("FedAvgFT", METHODS, "fedavg+ft"),
        ("LG_FedAvg", METHODS, "lg-fedavg"),
        ("CIFAR-10-C", DATA, "cifar10c"),
        ("ResNet18", MODELS, "resnet18"),
        ("fedavgg", METHODS, "fedavgg"),
        ("A", {"a": 1, "a-": 2}, "A"),  # it could be either
    ],
)
def test_a_name_in_another_case_or_with_other_signs_is_found(given, table, found):
    assert named(given, table) == found


def test_what_is_meant_by_an_option_is_read_from_the_docstring():
    def make(size: int = 3, other: int = 4, plain: int = 5):
        """A thing.

        Of which much: could be said.

        size: how large it is, and
            how wide
        other: none: as size
        """

    assert [o.meaning for o in options(make).values()] == ["how large it is, and how wide", "none: as size", ""]


def test_a_run_has_one_identity_however_its_names_are_written():
    plain, other = (
        Config.from_dict(
            {"method": {"name": m}, "data": {"name": d}, "model": {"name": n}, "training": {"optimizer": o}}, "test"
        )
        for m, d, n, o in (("fedavg+ft", "digits", "small_cnn", "adam"), ("FedAvg+FT", "Digits", "Small-CNN", "Adam"))
    )
    assert plain == other


def test_only_names_nearly_as_near_as_the_nearest_are_offered():
    assert nearest("seed", ["seeds", "shared", "schedule"]) == ["seeds"]
    assert nearest("cifar", ["cifar10", "cifar100", "digits"]) == ["cifar10", "cifar100"]


def test_nearest_ignores_case():
    assert nearest("FEDSELECT", METHODS)[0] == "fedselect"
    assert nearest("fedselct", ["FedSelect"]) == ["FedSelect"]


TABLES = {
    "data": DATA,
    "model": MODELS,
    "training": {"training": Training},
    "method": METHODS,
    "aggregate": fs.AGGREGATORS,
    "task": fs.TASKS,
}


def names(table):
    return {o for factory in TABLES[table].values() for o in options(factory)}


ASKED = {("training", "method"): {"warmup"}}
"""Names that two tables have: `place` asks whose is meant (tests/unit/test_optim.py)."""


@pytest.mark.parametrize(("a", "b"), list(combinations(TABLES, 2)))
def test_a_flag_belongs_to_one_table(a, b):
    assert names(a) & names(b) == ASKED.get((a, b), set())


def test_no_option_is_hidden_by_a_field_of_the_run():
    fields = {*Config.__dataclass_fields__, "out", "config", "quiet", "overwrite", "report", "methods", "seeds", "name"}
    assert fields & set().union(*map(names, TABLES)) == {"view"}  # local and merged are a method's; best is the run's


@pytest.mark.parametrize(("table", "name"), [(t, n) for t, entries in TABLES.items() for n in entries])
def test_every_entry_says_what_it_is_and_takes_its_own_defaults_as_text(table, name):
    factory = TABLES[table][name]
    assert summary(factory).endswith(".")
    for option in options(factory).values():
        text = "none" if option.default is None else str(option.default)
        assert option.parse(text) == option.default


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("bad", [{"epochs": -1}, {"lr": 0.0}, {"lr": float("nan")}], ids=str)
def test_every_method_refuses_what_cannot_train(name, bad):
    with pytest.raises(fs.InputError, match=next(iter(bad))):
        METHODS[name](**bad)


@pytest.mark.parametrize(
    ("ignored", "said"),
    [
        ({"finetune": 3}, "finetune trains the merged model, which view=local does not report; use view=merged"),
        ({"finetune_lr": 0.01}, "FedSelect without finetune does not use finetune_lr; set finetune too"),
        ({"freeze": "head"}, "FedSelect with freeze=head trains the head only when it fine-tunes"),
        ({"freeze": "head", "finetune": 1, "view": "merged", "by": "least"}, "would select the head, which does not move"),
        ({"by": "random", "relative": "tensor"}, "by=random ignores movement"),
        ({"by": "random", "since": "update"}, "by=random ignores movement"),
    ],
    ids=str,
)
def test_what_would_be_ignored_is_refused(ignored, said):
    with pytest.raises(fs.InputError, match=said):
        call(fs.FedSelect, **ignored)


@pytest.mark.parametrize("name", ["ditto", "fedpac", "scaffold"])
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"finetune": -1}, "finetune must not be negative, not -1"),
        ({"finetune": 1, "finetune_lr": 0.0}, "finetune_lr must be positive"),
        ({"finetune_lr": 0.01}, "without finetune does not use finetune_lr; set finetune too"),
    ],
    ids=str,
)
def test_fine_tuning_that_cannot_be_is_refused(name, wrong, said):
    with pytest.raises(fs.InputError, match=said):
        METHODS[name](**wrong)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"alpha": 0.0}, "alpha must be at least 0.05, not 0.0, or the personal model would never train"),
        ({"alpha": 1.5}, "alpha is a share"),
        ({"alpha_lr": -1.0}, "alpha_lr must not be negative"),
    ],
    ids=str,
)
def test_a_mixture_that_cannot_be_learned_is_refused(wrong, said):
    with pytest.raises(fs.InputError, match=said):
        fs.APFL(**wrong)


def test_fine_tuning_is_of_the_model_that_is_reported():
    with pytest.raises(fs.InputError, match="finetune trains the merged model, which view=local does not report"):
        fs.FedPAC(finetune=1)
    assert [fs.Ditto(finetune=n).view for n in (0, 1)] == ["local", "merged"]
    assert replace(fs.Ditto(finetune=1), finetune=0) == fs.Ditto()
    assert "view" not in options(fs.Ditto)


def test_an_option_without_an_annotation_takes_what_its_default_is():
    def made(lr=0.1, epochs=3, view="local", share=False, wish=None):
        return lr, epochs, view, share, wish

    table = {"made": made}
    assert build("method", "made", table, {}) == (0.1, 3, "local", False, None)
    given = {"lr": "1e-2", "epochs": "4", "view": "merged", "share": "yes", "wish": "all"}
    assert build("method", "made", table, given) == (0.01, 4, "merged", True, "all")
    with pytest.raises(fs.InputError, match="lr must be a number, not 'much'"):
        build("method", "made", table, {"lr": "much"})


def test_a_path_without_a_default_is_asked_for_where_data_is_read_and_not_before():
    """Over a network the server knows the options of clients' data, and each client where its own is."""

    def own(path: str, length: int = 4) -> tuple[str, int]:
        return path, length

    table = {"own": own}
    assert resolve("data", "own", table, {"length": 5}) == {"path": None, "length": 5}
    assert resolve("data", "own", table, {"path": "none"})["path"] is None  # as a plan writes it
    assert build("data", "own", table, {"path": "here"}) == ("here", 4)
    with pytest.raises(fs.InputError, match="give the path of the data: --data own:PATH"):
        build("data", "own", table, {})
