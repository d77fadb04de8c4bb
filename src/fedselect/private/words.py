"""The privacy promise, and what the noise does to a run, in words, shown before training starts."""

import math

from fedselect.private.guarantee import Guarantee
from fedselect.private.settings import Private

LOUD, HOPELESS = 5.0, 20.0
"""Noise this many times as long as the longest update costs much accuracy, or drowns it: docs/private.md has measurements."""
OUTSIDE = (
    "Not covered: test scores (measured on clients' own test data), shares of personal parameters, and the numbers of clients "
    "and samples. "
    "Training losses are not recorded."
)


def statement(guarantee: Guarantee) -> str:
    """One paragraph: promise, noise, who has to be trusted, and what is not covered."""
    private = guarantee.private
    said = (
        _promised(private, guarantee.delta, guarantee.rounds),
        _noise(guarantee),
        _trust(guarantee),
        OUTSIDE,
        _warning(guarantee),
    )
    return " ".join(filter(None, said))


def of_each_client(private: Private, rounds: int) -> str:
    """The same before the clients' numbers of samples are known."""
    own = "Each client chooses its noise by the number of its samples, and keeps its own budget."
    delta = private.delta_for(1)
    return " ".join((_promised(private, delta, rounds), own, BY_THEMSELVES, OUTSIDE))


def _promised(private: Private, delta: float, rounds: int) -> str:
    if math.isinf(private.epsilon):
        return "Private: no promise (epsilon is inf); updates are clipped, but no noise is added."
    whose = {
        "client": "all data of one client: what others learn is nearly the same with it and without it",
        "sample": "one training sample of a client: what others learn is nearly the same with it and without it",
    }[private.unit]
    seeded = " But the noise comes from the seed, so this run is a test and NOT private." if private.seeded else ""
    return f"Private: epsilon {private.epsilon:g}, delta {delta:.2g} for the whole run of {rounds} rounds, for {whose}.{seeded}"


def _noise(guarantee: Guarantee) -> str:
    private, worst = guarantee.private, max(guarantee.lots, key=lambda lot: lot.noise / lot.many)
    if not worst.noise:
        return ""
    moving = ", at first; it follows the lengths of updates" if private.quantile is not None else ""
    what, per, many = (
        ("update", "round", f"{worst.many:g} clients a round{'' if worst.whole else ' on average'}")
        if private.unit == "client"
        else ("gradient", "step", f"{worst.many:g} samples a step on average")
    )
    return (
        f"Each {what} is clipped to length {private.clip:g}{moving}; the noise in every entry of the sum is "
        f"{worst.noise * worst.more:.3g} times that ({many}). In the mean of a {per} the noise of all {guarantee.size:,} "
        f"entries together is {guarantee.ratio:.3g} times as long as the longest {what}."
    )


BY_THEMSELVES = "Every client adds noise itself, so neither the server nor other clients need to be trusted."


def _trust(guarantee: Guarantee) -> str:
    private = guarantee.private
    if private.unit == "sample":
        return BY_THEMSELVES
    if not guarantee.lots[0].whole:
        hidden = "" if guarantee.lots[0].share == 1 else " They must not learn which clients train in which round."
        return (
            "The server sees every update before it adds noise and must be trusted; other clients, and whoever gets the "
            f"model, need not be.{hidden}"
        )
    return (
        "Every client adds its share of the noise itself, and --secret shows the server only sums, so the server need not be "
        f"trusted, {_allies(private.colluding)}. This still holds if fewer than a third of a round's clients are lost. The "
        "server chooses the cohort, so a client counts as if it were in every round, and that it takes part is not hidden."
    )


def _allies(colluding: int) -> str:
    """The colluding clients, in words."""
    if not colluding:
        return "unless another client tells it its noise"
    return (
        "even if another client tells it its noise" if colluding == 1 else f"even if {colluding} other clients tell it theirs"
    )


def _warning(guarantee: Guarantee) -> str:
    if guarantee.ratio < LOUD:
        return ""
    if guarantee.private.unit == "client":
        mend = "use many more clients, a smaller model, a larger epsilon, or protect samples instead (unit=sample)"
    else:
        mend = "use larger batches (--batch-size), a smaller model, fewer rounds or a larger epsilon"
    said = "WARNING: this noise will cost the shared model much of its accuracy"
    if guarantee.ratio >= HOPELESS:
        said = "WARNING: this noise drowns what clients learn; the shared model will hardly be better than an untrained one"
    return f"{said}; {mend}."
