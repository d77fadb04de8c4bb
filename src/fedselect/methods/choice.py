"""Each client chooses the model it reports, on its own validation data.

A client can choose the local model, the merged model, the merged model fine-tuned (if the method fine-tunes), or a mixture of
local and merged. It replaces the model that the method reports only by one with a better headline metric; ties go to the lower
loss.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedselect.core.tree import State, Tree
from fedselect.methods.method import Method, altered
from fedselect.tasks.metrics import LOSS, Metric
from fedselect.training.work import Work

SHARES = (0.25, 0.5, 0.75)
CHOICES = ("local", "merged", "fine-tuned", *(f"{share:.0%} local" for share in SHARES))


class Choice(NamedTuple):
    """The merged models, the chosen models, and which they are: (C,), indices into CHOICES."""

    merged: Tree
    best: Tree
    which: Tensor


def candidates(method: Method, work: Work, state: State, down: State) -> dict[str, Tree]:
    """The models that clients can choose from, by name in CHOICES."""
    local, merged = method.local(state), method.personal(work, state, down)
    found = {"local": local, "merged": merged}
    if (plain := _untuned(method)) is not None:
        found = {"local": local, "merged": plain.personal(work, state, down), "fine-tuned": merged}
    mixed = {f"{share:.0%} local": _mixed(found["merged"], local, share) for share in SHARES}
    return {**found, **mixed}


def _untuned(method: Method) -> Method | None:
    """The method without fine-tuning; None if it does not fine-tune."""
    tuned = getattr(method, "finetune", None)
    return altered(method, {"finetune": type(tuned)()}) if tuned and isinstance(tuned, int | tuple) else None


def _mixed(merged: Tree, local: Tree, share: float) -> Tree:
    return {n: torch.lerp(v, local[n], share) if v.is_floating_point() else v for n, v in merged.items()}


def choose(method: Method, work: Work, state: State, down: State, headline: Metric) -> Choice:
    """Each client's choice among its models; a client without validation data keeps the model that the method reports."""
    found = candidates(method, work, state, down)
    merged = found.get("fine-tuned", found["merged"])
    reported = "local" if method.view == "local" else "fine-tuned" if "fine-tuned" in found else "merged"
    names = [reported, *(name for name in found if name != reported)]
    loss = work.task.metric(LOSS)
    assert loss is not None
    scores = [work.held_out(found[name], (headline, loss)) for name in names]
    values, losses = (torch.stack([score[m.name] for score in scores]) for m in (headline, loss))
    picks = pick(values if headline.more_is_better else -values, losses)
    which = torch.tensor([CHOICES.index(name) for name in names], device=picks.device)[picks]
    return Choice(merged, {n: _picked([found[name][n] for name in names], picks) for n in merged}, which)


def pick(values: Tensor, losses: Tensor) -> Tensor:
    """Per client (column), the model (row) with the highest value, ties by lowest loss; the first model unless beaten."""
    values, losses = values.nan_to_num(-torch.inf), losses.nan_to_num(torch.inf)
    best = values.max(0).values
    lowest = losses.masked_fill(values < best, torch.inf).argmin(0)
    return torch.where(best > values[0], lowest, 0)


def _picked(values: Sequence[Tensor], picks: Tensor) -> Tensor:
    out = values[0]
    for i, value in enumerate(values[1:], 1):
        out = torch.where((picks == i).view(-1, *[1] * (out.ndim - 1)), value, out)
    return out
