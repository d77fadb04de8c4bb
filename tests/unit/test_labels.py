"""What runs beside each other are called."""

import pytest

from fedselect.runs.labels import COLOURS, colours, labels, same


def config(method="fedselect", seed=0, rounds=5, data="digits", **options):
    return {"method": {"name": method, **options}, "data": {"name": data}, "rounds": rounds, "seed": seed}


@pytest.mark.parametrize(
    ("configs", "named"),
    [
        ([config(), config(seed=1), config("local")], ["fedselect", "fedselect", "local"]),
        ([config(limit=0.1), config(limit=0.3), config("local")], ["fedselect limit=0.1", "fedselect limit=0.3", "local"]),
        ([config(), config("local"), config(rounds=9)], ["fedselect", "local", "fedselect rounds=9"]),
        ([config(), config(data="cifar10")], ["fedselect data=digits", "fedselect data=cifar10"]),
        ([config(lr=0.1), config("local", lr=0.2)], ["fedselect", "local"]),
    ],
    ids=["seeds", "a sweep", "an odd one out", "two data sets", "options of different methods"],
)
def test_labels_name_what_tells_runs_apart(configs, named):
    assert labels(configs) == named


MEAN = {"name": "mean", "server_momentum": 0.0}


def test_aggregators_are_named_and_one_from_before_there_were_any_is_the_mean():
    older, plain = config(server_momentum=0.0), config() | {"aggregate": MEAN}
    ahead, median = (config() | {"aggregate": a} for a in ({**MEAN, "server_momentum": 0.5}, {"name": "median"}))
    assert same(older) == same(plain)
    assert same(median) == same(config() | {"aggregate": {"name": "median", "least_senders": 1}})  # which it gained later
    assert same(median) != same(config() | {"aggregate": {"name": "median", "least_senders": 3}})
    assert len({same(c) for c in (plain, ahead, median)}) == 3
    assert labels([older, plain, ahead, median]) == [
        "fedselect", "fedselect", "fedselect server_momentum=0.5", "fedselect aggregate=median",
    ]  # fmt: skip


def test_a_method_has_its_own_colour_and_a_second_setting_another():
    first, local, second = colours(["fedselect", "local", "fedselect"])
    assert (first, local) == (COLOURS["fedselect"], COLOURS["local"])
    assert second not in (first, local)
    assert len(colours(["fedselect"] * 40)) == 40


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("method", COLOURS)
def test_colours_can_be_read_as_text_on_both_papers(method):
    for colour, paper in zip(COLOURS[method], ("#fdfdfc", "#101317"), strict=True):
        light, dark = sorted((luminance(colour), luminance(paper)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5  # WCAG's contrast for text
