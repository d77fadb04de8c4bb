"""tune: which method and which settings for this federation."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedselect.cli.flags import EXTRA, configure, flags, numbers, words
from fedselect.cli.run_options import OPTIONS, with_run_options
from fedselect.cli.terminal import console, say
from fedselect.core.errors import InputError, Stopped
from fedselect.core.files import read_json
from fedselect.core.options import find, named, options
from fedselect.tuning import space

if TYPE_CHECKING:
    from fedselect.cli.board import Board
    from fedselect.runs.config import Config
    from fedselect.tasks import Measure
    from fedselect.tuning.outcome import Judge, Row
    from fedselect.tuning.trials import Asked, Found

OWN = ("seed", "score", "cross", "preset", "view")  # options of a run that a search sets itself, or may try several of
_MORE = (
    "Options with several values are what is tried: [bold]--lr 0.01,0.1 --fedselect.limit 0.1,0.3[/bold]; options with one "
    "value are the same for all. What is not given is tried over a few values of its own."
)


def add_to(app: typer.Typer) -> None:
    app.command(context_settings=EXTRA, epilog=_MORE)(tune)


@with_run_options(*(name for name in OPTIONS if name not in OWN))
def tune(
    ctx: typer.Context,
    *,
    methods: Annotated[str | None, typer.Option(help=f"Names with commas between. (default: {','.join(space.TRIED)})")] = None,
    data: Annotated[str | None, typer.Option("--data", help="Data set. (default: digits)")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Model. (default: what suits the data)")] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="A time (10m, 2h) or a number of rounds of all runs together (2000). (default: no limit)"),
    ] = None,
    for_: Annotated[str, typer.Option("--for", help="mean: the mean over clients; worst: the worst tenth of them.")] = "mean",
    seeds: Annotated[str, typer.Option(help="Seeds of the trials, with commas between.")] = "0,1,2",
    test_seeds: Annotated[
        str | None,
        typer.Option(help="Seeds of the look at test data; none: do not look. (default: the three after the last of --seeds)"),
    ] = None,
    rungs: Annotated[
        str | None, typer.Option(help="How many settings train to which round, as an earlier search says: 64x3,16x8,4x30.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory; by default a new one under runs/.")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="A TOML file, or the config.json of a run.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace an existing run directory.")] = False,
    report: Annotated[bool, typer.Option(help="Write report.html.")] = True,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the result alone.")] = False,
    **given: Any,
) -> None:
    """Choose a method and its settings for a federation, on validation data held out of each client's training data.

    Settings are trained side by side; after a few rounds the weaker ones are dropped, and the others go on (successive
    halving). Ends with a ranking, the chosen setting as a file for run --config, and one look at test data.
    """
    from fedselect.runs import rundir
    from fedselect.tuning import trials
    from fedselect.tuning.budget import Budget
    from fedselect.tuning.trials import Asked

    if for_ not in ("mean", "worst"):
        raise InputError(f"--for is mean or worst, not {for_!r}.")
    if rungs is not None and budget is not None:
        raise InputError("--rungs say how much is trained, and so does --budget; give one of the two.")
    own = numbers(seeds)
    fresh = [max(own) + i for i in (1, 2, 3)] if test_seeds is None else [] if test_seeds == "none" else numbers(test_seeds)
    settings = _settings(ctx, methods, data, model, config, given)
    order = space.order({n: str(c.method["name"]) for n, c in settings.items()}, own[0])
    asked = Asked({n: settings[n] for n in order}, own, fresh, Budget.parse(budget), for_ == "worst", rungs)
    out = out or rundir.free(f"tune-{asked.one.data['name']}")

    def go(board: Board) -> Found:
        return trials.start(asked, out, overwrite=overwrite, watch=board.watch, told=board.told)

    _show(asked, out, quiet, go, report)


def resume_tuning(out: Path, quiet: bool) -> None:
    from fedselect.tuning import trials

    asked, _ = trials.read(out)
    _show(asked, out, quiet, lambda board: trials.resume(out, board.watch, board.told), report=True)


def _settings(
    ctx: typer.Context, methods: str | None, data: str | None, model: str | None, config: Path | None, given: dict[str, Any]
) -> dict[str, Config]:
    """Every setting that is tried, by name."""
    from fedselect.methods import METHODS
    from fedselect.runs.config import read
    from fedselect.tuning import trials

    raw: dict[str, Any] = {k: v for k, v in (read(config) if config else {}).items() if k not in ("method", "seed", "score")}
    names = list(dict.fromkeys(named(word, METHODS) for word in words(methods))) if methods else list(space.TRIED)
    for name in names:
        find("method", name, METHODS)
    given_flags = {flag: words(value) for flag, value in flags(ctx.args).items()}
    _check_one_data(given_flags, data or raw.get("data", {}).get("name", "digits"))
    tasks: dict[str, str] = {}
    found: dict[str, Config] = {}
    for method in names:
        mine = {flag: values for flag, values in given_flags.items() if _concerns(flag, method, names)}
        if "view" not in mine and "best" in given_flags.get("view", []):  # the choice of every client, whatever the method
            mine["view"] = ["best"]
        tried = {**space.values(method, [flag.rpartition(".")[2].replace("-", "_") for flag in mine]), **mine}
        many = [name for name, values in tried.items() if len(values) > 1]
        for one in space.grid(tried):
            where = str(config or method)
            every = {flag: str(value) for flag, value in one.items()}
            made = configure(raw, method, data, model, every, among=[method], where=where, tasks=tasks, score="val", **given)
            name = trials.settings_name(method, {n: one[n] for n in many})
            if made not in found.values():  # 0.1 and 0.10 are one setting
                found[name] = made
    return found


def _concerns(flag: str, method: str, names: list[str]) -> bool:
    """Whether a flag says something about a method: it is its own, or nobody's here, and then of the data and the like."""
    from fedselect.methods import METHODS

    head, _, option = flag.rpartition(".")
    option = option.replace("-", "_")
    if head in names:
        return head == method
    owners = [name for name in names if option in options(METHODS[name])]
    return bool(head) or not owners or method in owners


def _check_one_data(given: dict[str, list[str]], data: str) -> None:
    from fedselect.data import DATA
    from fedselect.runs.config import at_path

    name = at_path({"name": data})["name"]
    known = options(find("data", name, DATA))
    for flag, values in given.items():
        if len(values) > 1 and flag.removeprefix("data.").replace("-", "_") in known:
            raise InputError(f"settings are compared on the same data; give --{flag} one value, not {len(values)}.")


def _show(asked: Asked, out: Path, quiet: bool, go: Callable[[Board], Found], report: bool) -> None:
    from fedselect.cli.board import Board, shown
    from fedselect.report import write_report

    board = Board(asked)
    try:
        with shown(board, console, quiet):
            found = go(board)
    except Stopped:
        if (out / "outcome.json").exists():
            _say_rows(*_so_far(out))
        raise
    _say_rows(found.rows, found.judge)
    _say_choice(found, out)
    if report:
        say(f"wrote {write_report([out])}")
    say(f"trials in {out}")


def _so_far(out: Path) -> tuple[list[Row], Judge]:
    from fedselect.tuning import trials
    from fedselect.tuning.outcome import Row

    asked, _ = trials.read(out)
    said = read_json(out / "outcome.json", trials.MEND)
    return [Row(**row) for row in said["ranking"]], asked.judge


def _say_rows(rows: list[Row], judge: Judge) -> None:
    """The ranking: those of the last rung, and the best of the others."""
    first = judge.measure
    table = Table(title=f"{judge.said} on own validation data", title_justify="left", box=SIMPLE_HEAD)
    for column in ("setting", "rounds", first.title, "behind", "MB", "sec"):
        table.add_column(column, justify="left" if column == "setting" else "right", no_wrap=True)
    last = [r for r in rows if r.rounds == rows[0].rounds and r.score is not None]
    shown = [*last, *[r for r in rows if r not in last][: max(0, 12 - len(last))]]
    for r in shown:
        score = "diverged" if r.score is None else _with_error(first, r.score, r.error)
        behind = "" if r.behind is None else _with_error(first, r.behind, r.behind_error)
        near = " chance" if r.chance else ""
        table.add_row(r.name, str(r.rounds), score, behind + near, f"{r.bytes / 1e6:.2f}", f"{r.seconds:.1f}")
    rest = len(rows) - len(shown)
    table.caption = (
        "±: standard error over seeds; behind: the first, paired by seed and client; chance: within two standard errors; "
        "MB and sec: a whole run, as these went" + (f"; {rest} more that were dropped are in outcome.json" if rest else "")
    )
    table.caption_justify = "left"
    console.print(table)


def _with_error(first: Measure, value: float, error: float | None) -> str:
    return first.show(value) + (f" ± {first.show(error)}" if error is not None else "")


def _say_choice(found: Found, out: Path) -> None:
    from fedselect.tuning import halving
    from fedselect.tuning.outcome import standard_error

    first, test = found.judge.measure, found.test
    near = [r.name for r in found.rows if r.chance]
    say(f"chosen: {found.chosen}" + (f"; within chance of it: {', '.join(near)}" if near else ""))
    say(f"  fedselect run --config {out / 'chosen.json'} --out DIR")
    if test is None:
        say("test data was not looked at")
    else:
        seeds = ", ".join(map(str, test["seeds"]))
        value = _with_error(first, statistics.fmean(test["values"]), standard_error(test["values"]))
        say(
            f"one look at test data, fresh seeds {seeds}: {first.title} {value} (mean over clients, ± standard error over "
            f"seeds), worst tenth {first.show(statistics.fmean(test['worst_tenth']))}"
        )
    schedule = found.progress.schedule
    if schedule:
        say(f"the same search again, whatever the clock says: --rungs {halving.spell(schedule)}")
