"""A result as a small table, for prompts and notebooks."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedselect.core.errors import InputError
from fedselect.core.shown import html_table
from fedselect.results.source import Source
from fedselect.simulate.keeping import final, said
from fedselect.simulate.records import CHOSEN, Record, whole
from fedselect.tasks import Measure, Spread

MOST = 10  # rows shown


@dataclass(frozen=True)
class Table:
    """A caption, column headers, one row per client, and summary rows."""

    caption: str
    heads: list[str]
    rows: list[list[str]]
    sums: list[list[str]]


def last(source: Source, history: Sequence[Record]) -> Record:
    """The record of the last evaluation."""
    headline = source.metrics[0].name
    if (found := final(history, headline)) is not None:
        return found
    if not any(source.tested):
        raise InputError(
            "no client has test data, so nothing was evaluated; pass fs.ClientData(test=...), or use train_loss in "
            "result.history."
        )
    raise InputError(f"nothing was evaluated; {'use a smaller eval_every' if history else 'run at least one round'}.")


def table(source: Source, history: Sequence[Record]) -> Table:
    """The last scores of each client and over clients, or training losses if nothing was evaluated."""
    clients = len(source.names)
    who = f"{clients} client{'' if clients == 1 else 's'}"
    caption = f"Result of {source.method}: {who}, {len(history)} round{'' if len(history) == 1 else 's'}"
    if not history:
        return Table(caption, ["client"], _cut([[name] for name in source.names[:MOST]], 1, clients), [])
    try:
        record, metrics = last(source, history), list(source.metrics)
        caption += f", own test data {said(record)}"
        if "of" in record:
            measured = sum(v is not None for v in record["clients"][metrics[0].name])
            caption += f", {measured} of {clients} clients evaluated"
    except InputError:
        record, metrics = history[-1], [Measure("train_loss", more_is_better=False)]
        caption += ", nothing was tested"
    lists = whole(record)
    shares = any(lists["share"])
    chosen = lists.get(CHOSEN)
    heads = ["client", *(m.title for m in metrics), *(["personal %"] if shares else []), *([CHOSEN] if chosen else [])]
    rows = [
        [name, *(_shown(m, lists[m.name][i]) for m in metrics), *([_share(lists["share"][i])] if shares else []),
         *([chosen[i] or ""] if chosen else [])]
        for i, name in enumerate(source.names[:MOST])
    ]  # fmt: skip
    spreads = [(m, Spread.of(m, lists[m.name])) for m in metrics]
    sums = [["mean", *(_shown(m, s.mean) for m, s in spreads), *([_share(record["share"])] if shares else [])]]
    if clients > 1:
        sums.append(["worst tenth", *(_shown(m, s.worst_tenth) for m, s in spreads), *([""] if shares else [])])
    sums = [[*line, *[""] * (len(heads) - len(line))] for line in sums]
    return Table(caption, heads, _cut(rows, len(heads), clients), sums)


def text(found: Table) -> str:
    """The table as plain text."""
    lines = [found.heads, *found.rows, *found.sums]
    wide = [max(len(line[i]) for line in lines) for i in range(len(found.heads))]

    def said(line: list[str]) -> str:
        numbers = [cell.rjust(w) for cell, w in zip(line[1:], wide[1:], strict=True)]
        return "  ".join([line[0].ljust(wide[0]), *numbers]).rstrip()

    rule = "-" * (sum(wide) + 2 * (len(wide) - 1))
    return "\n".join([found.caption, said(found.heads), rule, *map(said, found.rows), *([rule] if found.sums else []),
                      *map(said, found.sums)])  # fmt: skip


def html(found: Table) -> str:
    """The table as HTML, for notebooks."""
    return html_table(found.caption, found.heads, found.rows, found.sums)


def _cut(rows: list[list[str]], columns: int, clients: int) -> list[list[str]]:
    """The first rows, and the number of the others."""
    if clients <= MOST:
        return rows
    return [*rows[: MOST - 1], [f"... {clients - MOST + 1} more", *[""] * (columns - 1)]]


def _shown(measure: Measure, value: float | None) -> str:
    return "" if value is None else measure.show(value)


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"
