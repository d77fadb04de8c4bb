"""What a round records about its clients: numbers, and whether their models are still finite."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedselect.core.errors import InputError, diverged
from fedselect.core.tree import Tree, block, rows
from fedselect.data import Federation
from fedselect.tasks.metrics import Measure, known

Record = dict[str, Any]
"""One round as written to metrics.jsonl: means, and under "clients" one list entry for each client.

If it does not list all clients, "id" has the numbers of those it lists, and "of" says how many clients there are.
"""
SENT = ("bytes_up", "bytes_down")
ID = "id"
"""The numbers of the clients in a record's lists, if it does not list all of them."""
MANY = 1000
"""With more clients than this, a record lists only those that trained or were measured, if they are less than half of all."""
CHOSEN = "chosen"
"""The name of the view that a client reports, if clients choose."""


def means(metrics: Sequence[Measure]) -> tuple[str, ...]:
    """The names of the means in a record: each metric, the headline also by view, and what every task has."""
    first, *others = [m.name for m in metrics]
    return (first, f"{first}_local", f"{first}_merged", *others, "train_loss", "share")


def columns(metrics: Sequence[Measure]) -> tuple[str, ...]:
    """The names of the per-client lists in a record."""
    return (*means(metrics), *SENT)


def validated(metric: str) -> str:
    """The name of a metric on validation data, which records also have if a run asks for it."""
    return f"val_{metric.removeprefix('test_')}"


def figures(metrics: Sequence[Measure]) -> dict[str, Measure]:
    """What is measured of each client, by column: the metrics, the headline also by view."""
    views = {f"{metrics[0].name}_{view}": metrics[0] for view in ("local", "merged")}
    return {**{m.name: m for m in metrics}, **views}


def check_figures(lists: dict[str, list[Any]], metrics: Sequence[Measure], names: Sequence[str | int], round: int) -> None:
    """Refuse numbers outside the range of their metric, as a deployment's server would."""
    for column, measure in figures(metrics).items():
        for name, value in zip(names, lists[column], strict=True):
            if value is not None and (why := measure.unfit(value)):
                raise InputError(f"client {name}, round {round}: it measured {why}")


def check_defined(record: Record, metrics: Sequence[Measure]) -> None:
    """Refuse a headline that is undefined for all clients, if clients were measured."""
    first, *others = [m.name for m in metrics]
    if evaluated(record) and record[first] is None:
        there = [name for name in others if record[name] is not None]
        mend = (
            f"choose another with headline=... (--headline): {' or '.join(there)}." if there else "no other metric is, either."
        )
        raise InputError(f"round {record['round']}: {first} is not a finite number for any client; {mend}")


def evaluated(record: Record) -> bool:
    """Whether clients were measured in this round; a metric may still be undefined for all of them."""
    return record["share"] is not None


def wrong(record: Any, round: int, metrics: Sequence[Measure]) -> str:
    """What is wrong with a line of metrics.jsonl as the record of this round; empty if nothing is."""
    if not isinstance(record, dict) or not isinstance(lists := record.get("clients"), dict):
        return "it is not the record of a round"
    if record.get("round") != round:
        return f"it should be of round {round}"
    known = columns(metrics)
    lost = [n for n in ("seconds", *known) if n not in record or not isinstance(record[n], int | float | None)]
    lost += [n for n in known if not isinstance(lists.get(n), list)]
    if lost:
        return f"it lacks {lost[0]!r}"
    if ID in lists and not isinstance(record.get("of"), int):
        return "it lacks 'of', the number of clients"
    listed = [ID, *known] if ID in lists else known
    return "" if len({len(lists[n]) for n in listed}) == 1 else "its lists have different numbers of clients"


class Notes:
    """What a round measures of each client. Numbers are read after the round, because reading one waits for the GPU."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._values: dict[str, dict[int, Any]] = {k: {} for k in columns}
        self._found: list[tuple[str, Tensor, Tensor]] = []

    def add(self, what: str, ids: Tensor, values: Tensor) -> None:
        self._found.append((what, ids, values))

    def values(self) -> dict[str, dict[int, Any]]:
        """The columns, each with values by client."""
        for what, ids, values in self._found:
            for i, v in zip(ids.tolist(), values.tolist(), strict=True):
                self._values[what][i] = known(v) if isinstance(v, float) else v
        return self._values


def listed(own: Mapping[str, Mapping[int, Any]], clients: int, everybody: bool) -> tuple[Sequence[int], dict[str, list[Any]]]:
    """The clients that a record lists, and its lists; without `everybody`, of many clients only those with values."""
    there = {i for values in own.values() for i in values}
    some = not everybody and clients > MANY and 2 * len(there) < clients
    who = sorted(there) if some else range(clients)
    lists = {k: [values.get(i) for i in who] for k, values in own.items()}
    return who, {ID: list(who), **lists} if some else lists


def whole(record: Record) -> dict[str, list[Any]]:
    """A record's lists with an entry for every client."""
    lists = record["clients"]
    if ID not in lists:
        return lists  # type: ignore[no-any-return]
    out = {name: [None] * record["of"] for name in lists if name != ID}
    for name, values in out.items():
        for i, v in zip(lists[ID], lists[name], strict=True):
            values[i] = v
    return out


class Finite:
    """Checks that trees are still finite, without waiting for the answer until `settle`."""

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
        """Wait for the answers; `problem` is the first one found, in words."""
        for ids, tree, fine in self._watched:
            if not bool(fine) and self.problem is None:
                self.problem = self._find(ids, tree, round)
        self._watched.clear()

    def _find(self, ids: Tensor, tree: Tree, round: int) -> str | None:
        for name, v in tree.items():  # perhaps only their sum overflowed
            lost = (~torch.isfinite(rows(v)).all(1)).nonzero().flatten().tolist()
            if lost:
                client = int(ids[lost[0]])
                return str(diverged(self._data.clients[client].name or client, round, name))
        return None


def mean_of(values: list[Any]) -> float | None:
    there = [v for v in values if v is not None]
    return round(sum(there) / len(there), 6) if there else None
