"""The command diagnose: find out where clients differ before choosing what to personalize."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fedselect.cli.flags import EXTRA, configure, flags
from fedselect.cli.run_options import with_run_options
from fedselect.cli.terminal import console, say
from fedselect.cli.train import ConfigFile, DataName, ModelName
from fedselect.core.errors import InputError
from fedselect.core.files import is_unused, write_bytes, write_json
from fedselect.core.options import options

if TYPE_CHECKING:
    from fedselect.diagnosis.diagnosis import Diagnosis
    from fedselect.runs.config import Config

METHOD = "fedpersist"
TAKEN = ("seed", "task", "adapt", "chunk", "rows", "device", "precision", "deterministic")
"""Options that a diagnosis shares with a run."""
LEFT = ("methods", "seeds", "preset", "cross", "eval_every", "eval_fraction", "score")
"""Fields of a configuration file that a diagnosis ignores."""
FILES = ("diagnosis.json", "diagnosis.png", "diagnosis.md")
_MORE = (
    "Options of the data set, the model and local training are flags too: "
    "[bold]--shift motley --clients 8 --lr 0.05 --epochs 1[/bold]. Only training data is used."
)


def add_to(app: typer.Typer) -> None:
    app.command(context_settings=EXTRA, epilog=_MORE)(diagnose)


@with_run_options(*TAKEN)
def diagnose(
    ctx: typer.Context,
    *,
    data: DataName = None,
    model: ModelName = None,
    rounds: Annotated[
        int, typer.Option(help="Rounds in which all parameters are shared; one more round measures persistence")
    ] = 10,
    out: Annotated[Path | None, typer.Option(help="Also write diagnosis.json, .png and .md to this folder")] = None,
    config: ConfigFile = None,
    overwrite: Annotated[bool, typer.Option(help="Replace an earlier diagnosis")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result")] = False,
    **given: Any,
) -> None:
    """Train one shared model for a few rounds, then report where clients differ and which method to try first."""
    from fedselect.diagnosis.diagnosis import check_rounds, observe
    from fedselect.runs.progress import progress

    check_rounds(rounds)
    asked = flags(ctx.args)
    if {"window", f"{METHOD}.window"} & asked.keys():
        raise InputError("a diagnosis sets its window with --rounds; remove --window.")
    if out is not None:
        _may_write(out, overwrite)
    named = {"data": data, "model": model, **given}
    made = _configured(config, rounds, named, asked)
    simulation = made.simulation()
    with progress(console, quiet, [made]) as watch:
        found = observe(simulation, rounds, None if watch is None else lambda record: watch(made, record))
    command = _command(found.methods, {"config": config, **named}, asked)
    console.print(_table(found))
    for line in _said(found, command):
        say(line)
    if out is not None:
        _write(out, found, command)
        say(f"\nwrote {', '.join(FILES)} to {out}")


def _configured(file: Path | None, rounds: int, named: dict[str, Any], asked: dict[str, str]) -> Config:
    """A FedPersist run that is just long enough, with all clients in every round. Ignores what `file` says of a method."""
    from fedselect.runs.config import read

    raw = {k: v for k, v in (read(file) if file else {}).items() if k not in LEFT}
    raw |= {"rounds": rounds + 1, "fraction": 1.0, "late": None}
    made = configure(raw, METHOD, given_flags=asked, where=str(file or "this diagnosis"), **named)
    return dataclasses.replace(made, method={**made.method, "window": rounds})


def _command(methods: list[str], named: dict[str, Any], asked: dict[str, str]) -> str:
    """The command that starts the recommended run on the same data with the same options."""
    from fedselect.methods import METHODS

    alone, ours = len(methods) == 1, options(METHODS[METHOD])
    theirs = {option for name in methods for option in options(METHODS[name])}
    parts = ["fedselect", *(["run", "--method"] if alone else ["compare", "--methods"]), ",".join(methods)]
    for name, value in named.items():
        flag = "seeds" if name == "seed" and not alone else name
        if value is not None:
            parts += [f"--{flag}", *([] if value is True else [str(value)])]
    for name, value in asked.items():
        option = name.rpartition(".")[2].replace("-", "_")
        if option not in ours or option in theirs:
            parts += [f"--{name.removeprefix(f'{METHOD}.')}", value]
    return shlex.join(parts)


def _table(found: Diagnosis) -> Table:
    """Clients by layers. On a terminal, darker cells are more persistent."""
    columns = found.table
    widest = max(map(len, ["client", *found.clients]))
    wide = widest + 3 + sum(3 + max(5, len(name)) for name in columns) > console.width  # then names take two lines
    table = Table(box=SIMPLE_HEAD, title="persistence", title_justify="left", collapse_padding=wide, pad_edge=not wide)
    table.add_column("client", no_wrap=True, min_width=widest)
    for name in columns:
        part, dot, last = name.rpartition(".")
        table.add_column(f"{part}{dot}\n{last}" if wide else name, justify="right", no_wrap=True, min_width=5)
    for i, client in enumerate(found.clients):
        table.add_row(client, *(_cell(column[i]) for column in columns.values()))
    return table


def _cell(value: float | None) -> Text:
    if value is None:
        return Text("-")
    if console.color_system not in ("256", "truecolor"):  # too few shades
        return Text(f"{value:.2f}", style="bold" if value > 0.5 else "")
    level = min(max(value, 0.0), 1.0)
    shade = [round(255 + level * (end - 255)) for end in (8, 69, 148)]
    return Text(f"{value:.2f}", style=f"{'white' if level > 0.5 else 'black'} on rgb({shade[0]},{shade[1]},{shade[2]})")


def _said(found: Diagnosis, command: str) -> list[str]:
    return [*found.sentences, "", found.heads, found.keeps, found.advice, f"  {command}", "", found.limits]


def _may_write(out: Path, overwrite: bool) -> None:
    """Refuse to overwrite anything but a diagnosis, and that only with --overwrite."""
    if not (out.exists() or out.is_symlink()) or is_unused(out):
        return
    if out.is_symlink() or not out.is_dir() or any(p.name not in FILES for p in out.iterdir()):
        raise InputError(f"{out} contains files that are not part of a diagnosis; choose another --out.")
    if not overwrite:
        raise InputError(f"{out} already exists; choose another --out, or pass --overwrite to replace it.")


def _write(out: Path, found: Diagnosis, command: str) -> None:
    found.save(out / "diagnosis.png")
    write_json(out / "diagnosis.json", {**found.to_json(), "command": command})
    write_bytes(out / "diagnosis.md", _page(found, command).encode())


def _page(found: Diagnosis, command: str) -> str:
    columns = found.table
    rows = [["client", *columns], ["---", *("--:" for _ in columns)]]
    rows += [[c, *("-" if v[i] is None else f"{v[i]:.2f}" for v in columns.values())] for i, c in enumerate(found.clients)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    said = "\n".join(f"- {sentence}" for sentence in found.sentences)
    return (
        f"# Where clients differ\n\n{said}\n\n{found.heads} {found.keeps} {found.advice}\n\n```\n{command}\n```\n\n"
        f"![persistence](diagnosis.png)\n\n{table}\n\n{found.limits}\n"
    )
