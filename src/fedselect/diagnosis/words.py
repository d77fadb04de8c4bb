"""From persistence to words: how each client differs, and sentences that say so.

The rules come from runs in which the difference was known (docs/diagnose.md). They look at weights, which have many entries and
little noise, and of vectors at the head's bias alone: it is where the balance of classes shows.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fedselect.methods.groups import members

Kind = Literal["classes", "meaning", "inputs", "either", "none", "unknown"]
CLASSES = 0.3  # of the head's weights and of its bias: both reach it where classes come in other numbers
QUIET = 0.1  # of weights: most clients that are alike stay below it
MORE = 1.5  # times as persistent as another part of the model: it stands out

SAID: dict[Kind, str] = {
    "classes": "other classes than the rest, or in other numbers (head and its bias)",
    "meaning": "labels mean something else (head more than first layers)",
    "inputs": "inputs look different (first layers more than head)",
    "either": "labels or inputs mean something else (all layers: this model does not tell which)",
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


def kind(p: Profile) -> Kind:
    """How one client differs."""
    first = p.head if p.first is None else p.first
    if p.bias is not None and min(p.head, p.bias) >= CLASSES:
        return "classes"
    if max(p.head, first) < QUIET:
        return "none"
    if first >= MORE * p.head:
        return "inputs"
    return "meaning" if p.head >= MORE * first else "either"


def kinds(profiles: Sequence[Profile | None]) -> list[Kind]:
    """How each client differs; None: not tested."""
    return ["unknown" if p is None else kind(p) for p in profiles]


def sentences(found: Sequence[Kind], names: Sequence[str]) -> list[str]:
    """A sentence for each kind that there is, with the clients it is true of."""
    out = []
    for each, said in SAID.items():
        who = [name for name, k in zip(names, found, strict=True) if k == each]
        if who:
            out.append(f"{'Everybody' if len(who) == len(names) else listed(who)}: {said}.")
    return out


def together(groups: Sequence[int | None], names: Sequence[str]) -> list[str]:
    """Who shares a head with whom."""
    found = members(groups)
    if len(found) == 1 and None not in groups:
        return ["All clients share one head."]
    if len(found) == len(groups):
        return ["Every client has a head of its own."]
    out = [f"{listed([names[i] for i in group])} share a head." for group in found if len(group) > 1]
    alone = [names[group[0]] for group in found if len(group) == 1]
    if alone:
        out.append(f"{listed(alone)} {'has a head of its own' if len(alone) == 1 else 'each have a head of their own'}.")
    rest = [name for name, group in zip(names, groups, strict=True) if group is None]
    if rest:
        out.append(f"{listed(rest)} {'is' if len(rest) == 1 else 'are'} not tested yet.")
    return out


def short(names: Sequence[str]) -> list[str]:
    """Names of clients; a number where a name begins with it, as in "4 camera"."""
    return [str(i) if name.split(" ")[0] == str(i) else name for i, name in enumerate(names)]


def listed(names: Sequence[str]) -> str:
    """Clients 0, 2 and 5."""
    return f"{'Client' if len(names) == 1 else 'Clients'} {joined(names)}"


def joined(names: Sequence[str]) -> str:
    """0, 2 and 5."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
