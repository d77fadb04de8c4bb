"""From persistence to words: how each client differs, as sentences.

The rules come from runs with a known difference (docs/diagnose.md). They use weights, which have many entries and thus little
noise. The only vector they use is the bias of the head, where the balance of classes shows.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fedselect.methods.groups import members

Kind = Literal["classes", "meaning", "inputs", "either", "none", "unknown"]
CLASSES = 0.3  # persistence that both weights and bias of the head reach if the balance of classes differs
QUIET = 0.1  # persistence of weights below which most clients without a difference stay
MORE = 1.5  # ratio of persistence at which one part of the model stands out

SAID: dict[Kind, str] = {
    "classes": "different classes or class frequencies (persistent in the head and its bias)",
    "meaning": "labels have a different meaning (more persistent in the head than in the first layers)",
    "inputs": "inputs look different (more persistent in the first layers than in the head)",
    "either": "labels or inputs differ (persistent in all layers, so this model cannot tell which)",
    "none": "no difference that a shared model cannot handle",
    "unknown": "not tested yet",
}
"""The description of each kind, in order of output."""


@dataclass(frozen=True)
class Profile:
    """The numbers of one client that the rules use."""

    first: float | None  # mean over the weights in the first half of the body; None without a body
    head: float  # mean over the weights of the head
    bias: float | None  # bias of the head, if it has one


def roles(sizes: Mapping[str, int], head: Sequence[str]) -> dict[str, str]:
    """The role of each tensor, given its number of axes: "body weights", "head vector", ..."""
    return {n: f"{'head' if n in head else 'body'} {'weights' if axes > 1 else 'vector'}" for n, axes in sizes.items()}


def profile(persistence: Mapping[str, float], roles: Mapping[str, str]) -> Profile:
    """The profile of a client, from persistence by tensor in the model's order."""

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
    """One sentence per kind that occurs, with its clients."""
    out = []
    for each, said in SAID.items():
        who = [name for name, k in zip(names, found, strict=True) if k == each]
        if who:
            out.append(f"{'All clients' if len(who) == len(names) else listed(who)}: {said}.")
    return out


def together(groups: Sequence[int | None], names: Sequence[str]) -> list[str]:
    """Sentences about which clients share a head."""
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
    """Client names, shortened to their number if they start with it, as "4 camera" does."""
    return [str(i) if name.split(" ")[0] == str(i) else name for i, name in enumerate(names)]


def listed(names: Sequence[str]) -> str:
    """Clients 0, 2 and 5."""
    return f"{'Client' if len(names) == 1 else 'Clients'} {joined(names)}"


def joined(names: Sequence[str]) -> str:
    """0, 2 and 5."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
