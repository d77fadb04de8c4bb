"""What runs beside each other are called."""

from itertools import combinations

import numpy as np
import pytest

from fedselect.runs.labels import LOOKS, PALETTE, labels, looks, same


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


def test_a_method_has_its_own_look_and_every_label_another():
    first, local, second = looks(["fedselect", "local", "fedselect"])
    assert (first, local) == (LOOKS["fedselect"], LOOKS["local"])
    assert second[0] not in (first[0], local[0])
    for methods in (list(LOOKS), ["fedselect"] * 60, [*LOOKS, *LOOKS, "unknown"]):
        assert len(set(looks(methods))) == len(methods)
    assert len(looks(["fedselect"] * 200)) == 200


def linear(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return np.array([c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts])


TO_XYZ = np.array([[0.4125, 0.3576, 0.1804], [0.2127, 0.7152, 0.0722], [0.0193, 0.1192, 0.9503]])
SEEN_BY = {  # Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB
    "everybody": np.eye(3),
    "protanopia": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    "deuteranopia": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]),
    "tritanopia": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]]),
}


def lab(rgb):
    """CIELAB of linear RGB under D65, where a distance of about 2 can just be seen."""
    x, y, z = (np.cbrt(v) if v > 0.008856 else 7.787 * v + 16 / 116 for v in TO_XYZ @ rgb / [0.95047, 1, 1.08883])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("eyes", SEEN_BY)
@pytest.mark.parametrize("paper", [0, 1], ids=["light", "dark"])
def test_colours_are_told_apart_by_the_colour_blind(eyes, paper):
    seen = [lab(np.clip(SEEN_BY[eyes] @ linear(c[paper]), 0, 1)) for c in PALETTE]
    assert min(np.linalg.norm(a - b) for a, b in combinations(seen, 2)) > 15


@pytest.mark.parametrize("colour", PALETTE)
def test_colours_can_be_read_as_text_on_both_papers(colour):
    for own, paper in zip(colour, ("#fdfdfc", "#101317"), strict=True):
        light, dark = sorted((TO_XYZ[1] @ linear(c) for c in (own, paper)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5  # WCAG's contrast for text
