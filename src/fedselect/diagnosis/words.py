"""From persistence to words: how each client differs, and sentences that say so.

The rules come from runs in which the difference was known (docs/diagnose.md). They look at weights, which have many entries and
little noise, and of vectors at the head's bias alone: it is where the balance of classes shows.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["classes", "meaning", "head", "inputs", "either", "less", "none", "unknown"]
QUIET = 0.05  # below it a head's weights are noise; it is also FedPersist's threshold
QUIET_BODY = 0.1  # the same of the body's first layers, which have fewer entries
QUIET_BIAS = 0.3  # the same of the head's bias: a handful of entries, and no two samples have quite the same classes
CLEAR, HALF = 0.8, 0.5  # stands out in any model; stands out where the first layers do not
LESS = 0.8  # of the usual disagreement: it may be that of the others

SAID: dict[Kind, str] = {
    "classes": "other classes than the rest, or in other numbers (head, its bias most)",
    "meaning": "labels mean something else (head weights, not biases)",
    "head": "labels mean something else, or classes come in other numbers (head)",
    "inputs": "inputs look different (first layers)",
    "either": "labels or inputs mean something else (all layers: this model does not tell which)",
    "less": "a weaker difference than most, perhaps because the others pull the shared model away",
    "none": "nothing that sharing does not handle",
    "unknown": "not tested yet",
}
"""What is said of each kind, in the order in which it is said."""


@dataclass(frozen=True)
class Profile:
    """What the rules look at of one client."""

    first: float | None  # mean over the weights in the first half of the body; None where all is head
    head: float  # weights of the head
    bias: float | None  # of the head, where it has one


def roles(sizes: Mapping[str, int], head: Sequence[str]) -> dict[str, str]:
    """Of each tensor, given its number of axes, where it is and what: "body weights", "head vector"."""
    return {n: f"{'head' if n in head else 'body'} {'weights' if axes > 1 else 'vector'}" for n, axes in sizes.items()}


def profile(persistence: Mapping[str, float], roles: Mapping[str, str]) -> Profile:
    """Persistence by tensor, in the model's order, as what the rules look at."""

    def of(role: str) -> list[float]:
        return [persistence[n] for n, r in roles.items() if r == role]

    body, bias = of("body weights"), of("head vector")
    return Profile(
        first=statistics.fmean(body[: (len(body) + 1) // 2]) if body else None,
        head=statistics.fmean(of("head weights") or bias),
        bias=statistics.fmean(bias) if bias else None,
    )


def kind(p: Profile, usual: float) -> Kind:
    """How one client differs; `usual`: the median of the head's weights over clients.

    Where heads disagree, the shared body is pulled about for everybody. So first layers speak of inputs only if they stand
    out from the heads of all.
    """
    first, bias = p.head if p.first is None else p.first, p.bias or 0.0
    if bias >= max(CLEAR, 2 * p.head) or min(p.head, 2 * bias) >= CLEAR:  # as training begins; and as it goes on
        return "classes"
    if min(p.head, bias) >= HALF and p.head >= 1.5 * first:
        return "classes"
    if p.head < QUIET and first < QUIET_BODY:
        return "none"
    if p.first is not None and first >= 2 * max(p.head, usual):
        return "inputs"
    if p.head < LESS * usual:
        return "less"
    if first < max(QUIET_BODY, p.head / 2):
        return "meaning" if bias < max(QUIET_BIAS, p.head / 2) else "head"
    return "either"


def kinds(profiles: Sequence[Profile | None]) -> list[Kind]:
    """How each client differs; None: not tested."""
    usual = statistics.median(p.head for p in profiles if p is not None) if any(profiles) else 0.0
    return ["unknown" if p is None else kind(p, usual) for p in profiles]


def sentences(found: Sequence[Kind], names: Sequence[str]) -> list[str]:
    """A sentence for each kind that there is, with the clients it is true of."""
    out = []
    for each, said in SAID.items():
        who = [name for name, k in zip(names, found, strict=True) if k == each]
        if who:
            out.append(f"{'Everybody' if len(who) == len(names) else listed(who)}: {said}.")
    return out


def short(names: Sequence[str]) -> list[str]:
    """Names of clients; a number where a name begins with it, as in "4 camera"."""
    return [str(i) if name.split(" ")[0] == str(i) else name for i, name in enumerate(names)]


def listed(names: Sequence[str]) -> str:
    """Clients 0, 2 and 5."""
    if len(names) == 1:
        return f"Client {names[0]}"
    return f"Clients {', '.join(names[:-1])} and {names[-1]}"
