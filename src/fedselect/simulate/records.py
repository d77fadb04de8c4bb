"""What a round finds out about its clients: numbers for the record, and whether their models are still finite."""

from typing import Any

import torch
from torch import Tensor

from fedselect.core.errors import diverged
from fedselect.core.tree import Tree, block, rows
from fedselect.data import Federation

Record = dict[str, Any]
"""One round as it is written to metrics.jsonl: means, and under "clients" one list entry for each client."""
LISTS = ("accuracy", "accuracy_local", "accuracy_merged", "test_loss", "train_loss", "share", "bytes_up", "bytes_down")
MEANS = LISTS[:6]
NUMBERS = ("seconds", *MEANS, "bytes_up", "bytes_down")


def wrong(record: Any, round: int) -> str:
    """What keeps a line of metrics.jsonl from being the record of this round, in words; nothing where it is that."""
    if not isinstance(record, dict) or not isinstance(lists := record.get("clients"), dict):
        return "it is no record of a round"
    if record.get("round") != round:
        return f"it should be of round {round}"
    lost = [n for n in NUMBERS if n not in record or not isinstance(record[n], int | float | None)]
    lost += [n for n in LISTS if not isinstance(lists.get(n), list)]
    if lost:
        return f"it lacks {lost[0]!r}"
    return "" if len({len(lists[n]) for n in LISTS}) == 1 else "it has not as many clients in every list"


class Notes:
    """What a round measures of each client. Numbers are read when the round is over: reading one waits for the GPU."""

    def __init__(self, clients: int) -> None:
        self._lists: dict[str, list[Any]] = {k: [None] * clients for k in LISTS}
        self._found: list[tuple[str, Tensor, Tensor]] = []

    def add(self, what: str, ids: Tensor, values: Tensor) -> None:
        self._found.append((what, ids, values))

    def lists(self) -> dict[str, list[Any]]:
        for what, ids, values in self._found:
            for i, v in zip(ids.tolist(), values.tolist(), strict=True):
                self._lists[what][i] = None if v != v else round(v, 6) if isinstance(v, float) else v
        return self._lists


class Finite:
    """Whether trees are still finite, asked without waiting for the answer until `settle`."""

    def __init__(self, data: Federation) -> None:
        self.problem: str | None = None
        self._data = data
        self._watched: list[tuple[Tensor, Tree, Tensor]] = []

    def watch(self, ids: Tensor, *trees: Tree) -> None:
        for tree in {tuple(v.data_ptr() for v in t.values()): t for t in trees}.values():
            whole = block(tree)
            if whole is None:
                sums = torch.stack(torch._foreach_norm(list(tree.values()), 1))
            else:
                sums = torch.linalg.vector_norm(whole, 1)
            self._watched.append((ids, tree, sums.isfinite().all()))

    def settle(self, round: int) -> None:
        """Wait for the answers; `problem` is the first thing found wrong, in words."""
        for ids, tree, fine in self._watched:
            if not bool(fine) and self.problem is None:
                self.problem = self._find(ids, tree, round)
        self._watched.clear()

    def _find(self, ids: Tensor, tree: Tree, round: int) -> str | None:
        for name, v in tree.items():  # it may be that only their sum was too large a number
            lost = (~torch.isfinite(rows(v)).all(1)).nonzero().flatten().tolist()
            if lost:
                client = int(ids[lost[0]])
                return str(diverged(self._data.clients[client].name or client, round, name))
        return None


def mean_of(values: list[Any]) -> float | None:
    there = [v for v in values if v is not None]
    return round(sum(there) / len(there), 6) if there else None
