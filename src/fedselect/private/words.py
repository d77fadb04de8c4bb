"""What a run promises, and what the noise does to it, in words, before anything trains."""

import math

from fedselect.private.guarantee import Guarantee
from fedselect.private.settings import Private

LOUD, HOPELESS = 5.0, 20.0
"""Noise so many times as long as the longest update costs much accuracy, or drowns it: docs/private.md has measurements."""
OUTSIDE = (
    "Not covered: test scores, which are of clients' own test data, shares of personal parameters, and the numbers of clients "
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
    """The same where nobody knows yet how many samples clients have."""
    own = "Each client chooses its noise by how many samples it has, and keeps the budget itself."
    delta = private.delta_for(1)
    return " ".join((_promised(private, delta, rounds), own, BY_THEMSELVES, OUTSIDE))


def _promised(private: Private, delta: float, rounds: int) -> str:
    if math.isinf(private.epsilon):
        return "Private: no promise (epsilon is inf); updates are clipped, and nothing is noised."
    whose = {
        "client": "all data of one client: what others learn is nearly the same with it and without it",
        "sample": "one training sample of a client: what others learn is nearly the same with it and without it",
    }[private.unit]
    seeded = " But noise comes from the seed, so this run is a test and NOT private." if private.seeded else ""
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
        f"Each {what} is clipped to length {private.clip:g}{moving}; noise is {worst.noise * worst.more:.3g} times that in "
        f"every entry of the sum ({many}). In the mean of a {per} the noise of all {guarantee.size:,} entries together is "
        f"{guarantee.ratio:.3g} times as long as the longest {what}."
    )


BY_THEMSELVES = "Every client adds noise itself, so neither the server nor other clients need to be trusted."


def _trust(guarantee: Guarantee) -> str:
    private = guarantee.private
    if private.unit == "sample":
        return BY_THEMSELVES
    if not guarantee.lots[0].whole:
        return (
            "The server sees every update before it adds noise and has to be trusted; other clients, and whoever gets the "
            "model, need not be."
        )
    return (
        "Every client adds its share of the noise itself, and --secret shows the server sums alone, so the server need not be "
        f"trusted, {_allies(private.colluding)}. This still holds if fewer than a third of a round's clients are lost. The "
        "server decides who takes part, so a client counts as if it were in every round, and that it takes part is not hidden."
    )


def _allies(colluding: int) -> str:
    """Who may tell the server their part of the noise."""
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
    said = "WARNING: such noise will cost the shared model much of its accuracy"
    if guarantee.ratio >= HOPELESS:
        said = "WARNING: such noise drowns what clients learn, and the shared model will hardly be better than an untrained one"
    return f"{said}; {mend}."
