"""The command tune: choose a method and its settings for a federation."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedselect.cli.flags import EXTRA, alternatives, configure, flags, numbers, words
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

OWN = ("seed", "score", "eval_fraction", "cross", "preset", "view")  # options of a run that a search sets itself or varies
_MORE = (
    "An option with several values is searched over: [bold]--lr 0.01,0.1 --fedselect.limit 0.1,0.3[/bold]; an option with "
    "one value is fixed. For the main options that you do not set, a few usual values are tried."
)


def add_to(app: typer.Typer) -> None:
    app.command(context_settings=EXTRA, epilog=_MORE)(tune)


@with_run_options(*(name for name in OPTIONS if name not in OWN))
def tune(
    ctx: typer.Context,
    *,
    methods: Annotated[
        str | None, typer.Option(help=f"Methods, separated by commas (default: {','.join(space.TRIED)})")
    ] = None,
    data: Annotated[str | None, typer.Option("--data", help="Data set (default: digits)")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Model (default: depends on the data)")] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="A time such as 10m or 2h, or a total number of rounds over all runs such as 2000 (default: no limit)"
        ),
    ] = None,
    for_: Annotated[
        str, typer.Option("--for", help="What to optimize: the mean over clients, or the worst tenth of clients (worst)")
    ] = "mean",
    seeds: Annotated[str, typer.Option(help="Seeds of the trials, separated by commas")] = "0,1,2",
    test_seeds: Annotated[
        str | None,
        typer.Option(help="Seeds of the final test; none skips it (default: the three after the last of --seeds)"),
    ] = None,
    rungs: Annotated[
        str | None, typer.Option(help="Settings x round of every rung, as printed by an earlier search: 64x3,16x8,4x30")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory of the search (default: a new one under runs/)")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="A TOML file, or the config.json of a run")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace an existing run directory")] = False,
    report: Annotated[bool, typer.Option(help="Write report.html")] = True,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result")] = False,
    **given: Any,
) -> None:
    """Choose a method and its settings on validation data, which is held out of each client's training data.

    All settings train for a few rounds, then the weaker ones are dropped and the others go on (successive halving).
    The result is a ranking, the chosen setting as a file for run --config, and its score on test data with fresh seeds.
    """
    from fedselect.runs import rundir
    from fedselect.tuning import trials
    from fedselect.tuning.budget import Budget
    from fedselect.tuning.trials import Asked

    if for_ not in ("mean", "worst"):
        raise InputError(f"--for must be mean or worst, not {for_!r}.")
    if rungs is not None and budget is not None:
        raise InputError("--rungs and --budget both set how much is trained; pass only one of them.")
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
    """The settings to try, by name."""
    from fedselect.methods import METHODS
    from fedselect.runs.config import read
    from fedselect.tuning import trials

    raw: dict[str, Any] = {k: v for k, v in (read(config) if config else {}).items() if k not in ("method", "seed", "score")}
    names = list(dict.fromkeys(named(word, METHODS) for word in words(methods))) if methods else list(space.TRIED)
    for name in names:
        find("method", name, METHODS)
    given_flags = {flag: alternatives(flag, value) for flag, value in flags(ctx.args).items()}
    _check_one_data(given_flags, data or raw.get("data", {}).get("name", "digits"))
    tasks: dict[str, str] = {}
    found: dict[str, Config] = {}
    for method in names:
        mine = {flag: values for flag, values in given_flags.items() if _concerns(flag, method, names)}
        if "view" not in mine and "best" in given_flags.get("view", []):  # an option of the run, not of a method
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
    """Whether a flag applies to a method: it is an option of the method, or of no method here (then of the data, ...)."""
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
            raise InputError(f"all settings must train on the same data; give --{flag} one value, not {len(values)}.")


def _show(asked: Asked, out: Path, quiet: bool, go: Callable[[Board], Found], report: bool) -> None:
    from fedselect.cli.board import Board, shown
    from fedselect.report import write_report

    board = Board(asked)
    try:
        with shown(board, console, quiet, out):
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
    """Print the ranking: all settings of the last rung, then the best of the others."""
    first = judge.measure
    table = Table(title=f"{judge.said} on each client's validation data", title_justify="left", box=SIMPLE_HEAD)
    for column in ("setting", "rounds", first.title, "behind", "MB", "sec"):
        table.add_column(column, justify="left" if column == "setting" else "right", no_wrap=True)
    last = [r for r in rows if r.rounds == rows[0].rounds and r.score is not None]
    shown = [*last, *[r for r in rows if r not in last][: max(0, 12 - len(last))]]
    for r in shown:
        score = "diverged" if r.score is None else _with_error(first, r.score, r.error)
        behind = "" if r.behind is None else _with_error(first, r.behind, r.behind_error)
        near = " n.s." if r.chance else ""
        table.add_row(r.name, str(r.rounds), score, behind + near, f"{r.bytes / 1e6:.2f}", f"{r.seconds:.1f}")
    rest = len(rows) - len(shown)
    table.caption = (
        "±: standard error over seeds; behind: difference to the first row, paired by seed and client; n.s.: not significant "
        "(within two standard errors); MB and sec: for a full run" + (f"; outcome.json lists {rest} more" if rest else "")
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
    say(f"chosen: {found.chosen}" + (f"; not significantly worse: {', '.join(near)}" if near else ""))
    say(f"  fedselect run --config {out / 'chosen.json'} --out DIR")
    if test is None:
        say("test data was not used")
    else:
        seeds = ", ".join(map(str, test["seeds"]))
        value = _with_error(first, statistics.fmean(test["values"]), standard_error(test["values"]))
        say(
            f"on test data, fresh seeds {seeds}: {first.title} {value} (mean over clients, ± standard error over "
            f"seeds), worst tenth {first.show(statistics.fmean(test['worst_tenth']))}"
        )
    schedule = found.progress.schedule
    if schedule:
        say(f"to repeat this search independently of the machine's speed: --rungs {halving.spell(schedule)}")
