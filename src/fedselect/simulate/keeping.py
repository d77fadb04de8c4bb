"""Which round of a run is kept: the last one, the best on validation data, or for each client its own best.

A round is judged by the headline metric of the models that the method reports, on validation data held out of training.
Records say under "kept" which rounds are kept so far: one number, or one for each client. Test data is never used.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fedselect.core.errors import InputError
from fedselect.core.tree import State, Tree, clone, take
from fedselect.simulate.records import CHOSEN, SENT, Record, evaluated, mean_of, validated, whole
from fedselect.simulate.store import Store
from fedselect.tasks.metrics import Measure

Keep = Literal["last", "best", "own"]


class Kept:
    """The models of the kept rounds, and which rounds these are."""

    def __init__(self, how: str, clients: int, measure: Measure, device: torch.device) -> None:
        """how: best (one round for all clients) or own; measure: the metric that is compared."""
        self.how, self._measure = how, measure
        self.rounds: list[int | None] = [None] * clients  # None for a client that was never scored
        self.scores: list[float | None] = [None] * clients  # score of the kept round; with best, the mean over clients
        self.store = Store(clients, device)
        self._seen: list[tuple[Tensor, Tree]] = []

    def see(self, ids: Tensor, models: Tree) -> None:
        """Note the models of these clients after the round that is being evaluated."""
        self._seen.append((ids, models))

    def settle(self, round: int, scores: Sequence[float | None], complete: bool) -> Any:
        """After a round's evaluation, keep what is better than before, and return which rounds are kept now.

        complete: whether all clients have joined; before that no round can be the best for all.
        """
        if self.how == "best":
            mean = mean_of(list(scores)) if complete else None
            improved = [better(mean, self.scores[0], self._measure)] * len(scores)
            found = [mean] * len(scores)
        else:
            improved = [better(s, b, self._measure) for s, b in zip(scores, self.scores, strict=True)]
            found = list(scores)
        for i in (i for i, yes in enumerate(improved) if yes):
            self.rounds[i], self.scores[i] = round, found[i]
        for ids, models in self._seen:
            # a client that was never scored keeps its last model
            which = [row for row, i in enumerate(ids.tolist()) if improved[i] or self.rounds[i] is None]
            if which:
                whole = len(which) == len(ids)
                own = clone(models) if whole else take(models, torch.tensor(which, device=next(iter(models.values())).device))
                self.store.put(ids[which], {"model": own})
        self._seen.clear()
        return self.rounds[0] if self.how == "best" else list(self.rounds)

    def models(self, ids: Tensor, device: torch.device) -> Tree:
        return clone(self.store.take(ids, device)["model"])

    def dump(self) -> tuple[dict[str, Any], State]:
        """For a checkpoint: the kept rounds and their models."""
        there = self.store.joined.tolist()
        return {"rounds": list(self.rounds), "scores": list(self.scores), "there": there}, self.store.dump()

    def load(self, said: dict[str, Any], dumped: State) -> None:
        self.rounds, self.scores = list(said["rounds"]), list(said["scores"])
        self.store.load(dumped)
        self.store.joined = torch.tensor(said["there"])


def better(score: float | None, best: float | None, measure: Measure) -> bool:
    """Whether a score is the best so far; None is no score."""
    if score is None or best is None:
        return score is not None
    return score > best if measure.more_is_better else score < best


def replay(history: Sequence[Record], how: str, measure: Measure) -> Any:
    """The kept rounds according to the records: one number, or one per client; None if nothing was measured."""
    seen = [r for r in history if evaluated(r)]
    if not seen:
        return None
    name = validated(measure.name)
    kept = Kept(how, len(seen[0]["clients"][name]), measure, torch.device("cpu"))
    return [kept.settle(r["round"], r["clients"][name], complete=True) for r in seen][-1]


def keeps(keep: Keep | None, patience: int | None) -> Keep:
    """What to keep: what was asked for; by default the best round with patience, the last without."""
    if patience is not None and keep == "last":
        raise InputError("patience stops a run after its best round, so that round must be kept: use keep=best or own.")
    return keep or ("last" if patience is None else "best")


def stalled(history: Sequence[Record], patience: int | None) -> bool:
    """Whether the last `patience` evaluations found nothing better."""
    seen = [r["kept"] for r in history if r.get("kept") is not None]
    return patience is not None and len(seen) > patience and seen[-1] == seen[-1 - patience]


def in_tail(round: int, rounds: int) -> bool:
    """Whether a round is in the last quarter of the run."""
    return 4 * round > 3 * rounds


def is_end(record: Record, rounds: int) -> bool:
    """Whether this is the last round of a run with this many rounds."""
    return record["round"] >= rounds or bool(record.get("stopped"))


def final(history: Sequence[Record], headline: str) -> Record | None:
    """The result of a run: its last evaluated round or, if others are kept, what each client had in its kept round.

    "round" is the last one in any case, and "kept" says which ones count. None if nothing was evaluated.
    """
    last = next((r for r in reversed(history) if r[headline] is not None), None)
    if last is None:
        return None
    if last.get("kept") is None:
        return {**last, "clients": whole(last)}
    by = {r["round"]: r["clients"] for r in history}
    kept = last["kept"] if isinstance(last["kept"], list) else [last["kept"]] * len(last["clients"][headline])
    lists = {
        name: values if name in SENT else [by[r or last["round"]][name][i] for i, r in enumerate(kept)]
        for name, values in last["clients"].items()
    }
    means = {name: mean_of(values) for name, values in lists.items() if name not in (*SENT, CHOSEN)}
    return {**last, **means, "clients": lists}


def choices(ended: Record, validation: Sequence[int | None] = ()) -> list[dict[str, Any]] | None:
    """The model that each client reports: which view, of which round, chosen on how many samples; None without a choice.

    ended: the result of a run; validation: how many validation samples each client has, if known.
    """
    chosen = ended["clients"].get(CHOSEN)
    if chosen is None:
        return None
    kept = ended.get("kept")
    rounds = kept if isinstance(kept, list) else [kept] * len(chosen)
    on = validation or [None] * len(chosen)
    return [
        {"model": model, "round": r or ended["round"], **({} if n is None else {"validation": n})}
        for model, r, n in zip(chosen, rounds, on, strict=True)
    ]


def said(record: Record) -> str:
    """Which round the numbers of a run come from, in words."""
    kept = record.get("kept")
    if kept is None:
        return f"after round {record['round']}"
    if not isinstance(kept, list):
        return f"of round {kept}, the best of {record['round']} on validation data"
    there = [r for r in kept if r is not None]
    span = f"rounds {min(there)} to {max(there)}" if there else "the last round"
    return f"of each client's best round on validation data ({span} of {record['round']})"
