"""Commands that train: run, compare, sweep, resume."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Container, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedselect.cli import completion
from fedselect.cli.flags import EXTRA, alternatives, configure, flags, numbers, words
from fedselect.cli.run_options import OPTIONS, Shown, with_run_options
from fedselect.cli.terminal import console, say, say_metrics
from fedselect.cli.tune import resume_tuning
from fedselect.core.errors import InputError
from fedselect.core.options import find, named

if TYPE_CHECKING:
    from fedselect.runs.config import Config
    from fedselect.runs.loop import Watch
    from fedselect.simulate.records import Record

_MORE = (
    "Options of the method, data set, model, task, aggregator and local training are flags too: "
    "[bold]--limit 0.5 --clients 8 --width 32 --batch-size 16[/bold]. List them with [bold]fedselect methods NAME[/bold] and "
    "[bold]fedselect data list[/bold]."
)
_STATUS = " Exit status: 0 if at least one run finished; the table and stderr name those that diverged."

Method = Annotated[str | None, typer.Option(help="Method (default: fedselect)", autocompletion=completion.method)]
DataName = Annotated[str | None, typer.Option("--data", help="Data set (default: digits)", autocompletion=completion.data)]
ModelName = Annotated[
    str | None, typer.Option("--model", help="Model (default: depends on the data)", autocompletion=completion.model)
]
Seeds = Annotated[str | None, typer.Option(help="Seeds, separated by commas (default: 0)")]
Out = Annotated[Path | None, typer.Option(help="Run directory (default: a new one under runs/)")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="A TOML file, or the config.json of a run; flags override it")
]
Overwrite = Annotated[bool, typer.Option(help="Replace an existing run directory, including models and figures exported to it")]
Report = Annotated[bool, typer.Option(help="Write report.html beside the runs")]


def add_to(app: typer.Typer) -> None:
    own = " [bold]--fedselect.limit 0.5[/bold] sets an option of one method only."
    grid = "Options with several values span the grid: [bold]--limit 0.1,0.3[/bold]."
    app.command(context_settings=EXTRA, epilog=_MORE)(run)
    app.command(context_settings=EXTRA, epilog=_MORE + own + _STATUS)(compare)
    app.command(context_settings=EXTRA, epilog=grid + _STATUS)(sweep)
    app.command()(resume)


@with_run_options(*OPTIONS)
def run(
    ctx: typer.Context,
    shown: Shown,
    *,
    method: Method = None,
    data: DataName = None,
    model: ModelName = None,
    out: Out = None,
    config: ConfigFile = None,
    overwrite: Overwrite = False,
    **given: Any,
) -> None:
    """Train one federation with one method."""
    from fedselect.runs import rundir, runner
    from fedselect.runs.config import read
    from fedselect.simulate import ranks

    raw = read(config) if config else {}
    where = str(config or "this run")
    made = configure(raw, method, data, model, flags(ctx.args), where=where, **given)
    out = out or rundir.free(f"{made.method['name']}-{made.data['name']}-seed{made.seed}")
    with _watching(out, [made], shown) as watch:
        history = runner.start(made, out, overwrite=overwrite, watch=watch)
    _say_outcome(made, history, out)
    if ranks.rank() == 0:
        say_metrics([out], made.score)


@with_run_options(*(name for name in OPTIONS if name != "seed"))
def compare(
    ctx: typer.Context,
    shown: Shown,
    *,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Methods, separated by commas (default: all except the ablation layers)", autocompletion=completion.methods
        ),
    ] = None,
    data: DataName = None,
    model: ModelName = None,
    seeds: Seeds = None,
    out: Out = None,
    config: ConfigFile = None,
    overwrite: Overwrite = False,
    report: Report = False,
    **given: Any,
) -> None:
    """Compare several methods over several seeds in one table."""
    from fedselect.runs import rundir
    from fedselect.runs.config import read

    raw = dict(read(config)) if config else {}
    runs = compared(raw, str(config or ""), methods, data, model, seeds, more=flags(ctx.args), **given)
    train_all(runs, out or rundir.free("compare"), overwrite, shown, report)


@with_run_options(*(name for name in OPTIONS if name not in ("seed", "view")))
def sweep(
    ctx: typer.Context,
    shown: Shown,
    *,
    method: Method = None,
    data: DataName = None,
    model: ModelName = None,
    seeds: Seeds = None,
    out: Out = None,
    config: ConfigFile = None,
    overwrite: Overwrite = False,
    report: Report = False,
    **given: Any,
) -> None:
    """Train one method over a grid of settings and seeds. Settings of equal shape train together in one batch."""
    from fedselect.runs import rundir
    from fedselect.runs.config import read

    raw = read(config) if config else {}
    grid = {name: alternatives(name, value) for name, value in flags(ctx.args).items()}
    many = [name for name, values in grid.items() if len(values) > 1]
    runs: dict[str, Config] = {}
    tasks: dict[str, str] = {}
    for values in itertools.product(*grid.values()):
        one = dict(zip(grid, values, strict=True))
        for s in numbers(seeds) if seeds else [raw.get("seed", 0)]:
            where = str(config or "this run")
            made = configure(raw, method, data, model, one, where=where, tasks=tasks, seed=s, **given)
            if made not in runs.values():  # 0.1 and 0.10 are one setting
                name = "-".join([made.method["name"], *(f"{n}={one[n]}" for n in many), f"seed{s}"])
                runs[_folder(name, runs)] = made
    train_all(runs, out or rundir.free("sweep"), overwrite, shown, report)


@with_run_options()
def resume(out: Annotated[Path, typer.Argument(help="The directory of a run, a comparison or a search")], shown: Shown) -> None:
    """Resume an interrupted run, comparison or search. The result is the same as without the interruption."""
    from fedselect.runs import rundir, runner
    from fedselect.tuning.trials import is_search

    if is_search(out):
        resume_tuning(out, shown.quiet)
        return
    named = rundir.read_configs(out) if (out / "compare.json").exists() else {}
    complete = all(rundir.finished(run) for run in [out / name for name in named] or [out])
    with _watching(out, [] if complete else list(named.values()), shown) as watch:
        done = runner.resume(out, watch)
    if complete:
        say(f"{out} was already finished; nothing was trained")
    _say_table(done, out, report=False)


def compared(
    raw: dict[str, Any],
    where: str,
    methods: str | None,
    data: str | None,
    model: str | None,
    seeds: str | None,
    *,
    more: dict[str, str],
    **given: Any,
) -> dict[str, Config]:
    """The runs of a comparison, by name: those in a file (`where` names it), overridden by flags."""
    from fedselect.methods import METHODS

    raw = dict(raw)
    own, seed = raw.pop("method", None), raw.pop("seed", 0)  # the file of a single run is a comparison of one
    alone = {own["name"]: {k: v for k, v in own.items() if k != "name"}} if isinstance(own, dict) and "name" in own else {}
    listed = raw.pop("methods", alone)
    own_seeds = raw.pop("seeds", [seed])
    if not isinstance(listed, dict) or not all(isinstance(m, dict) for m in listed.values()) or not isinstance(own_seeds, list):
        raise InputError(f"{where}: methods must be a table of tables, and seeds a list.")
    listed = {named(name, METHODS): options for name, options in listed.items()}
    names = _names(methods, listed)
    tasks = dict[str, str]()
    runs = {}
    for name in names:
        for s in numbers(seeds) if seeds else own_seeds:
            one = {**raw, "method": {"name": name, **listed.get(name, {})}, "seed": s}
            whose = f"{where}: {name}" if where else name
            made = configure(one, None, data, model, more, among=names, where=whose, tasks=tasks, **given)
            runs[f"{name}-seed{made.seed}"] = made
    return runs


def train_all(runs: dict[str, Config], out: Path, overwrite: bool, shown: Shown, report: bool) -> None:
    from fedselect.runs import runner

    with _watching(out, list(runs.values()), shown) as watch:
        done = runner.start_comparison(runner.Comparison(runs), out, overwrite=overwrite, watch=watch)
    _say_table(done, out, report)


@contextmanager
def _watching(out: Path, runs: list[Config], shown: Shown) -> Iterator[Watch]:
    """Set up everything that shows progress: the terminal, a browser, a tracker."""
    from fedselect.report.live import live as serve
    from fedselect.runs.progress import progress
    from fedselect.runs.trackers import tracking
    from fedselect.simulate import ranks

    if shown.port and not shown.live:
        raise InputError("--port needs --watch; pass both, or remove --port.")
    if ranks.rank() > 0:  # only the first process prints
        shown = Shown(quiet=True)
    with ExitStack() as stack:
        told: list[Watch] = []
        if shown.track is not None:
            told.append(stack.enter_context(tracking(shown.track, out)))
        if shown.live:
            say(f"watch it at {stack.enter_context(serve(out, shown.port))}")
        drawn = stack.enter_context(progress(console, shown.quiet, runs, out))
        told += [drawn] if drawn else []

        def watch(config: Config, record: Record) -> None:
            for tell in told:
                tell(config, record)

        yield watch


def _names(methods: str | None, listed: dict[str, Any]) -> list[str]:
    from fedselect.methods import METHODS

    if methods is None and listed:
        return list(listed)
    if methods in (None, "all"):
        return [m for m in METHODS if m != "layers"]  # an ablation that names layers of one network
    names = list(dict.fromkeys(named(word, METHODS) for word in words(methods or "")))
    for name in names:
        find("method", name, METHODS)
    if not names:
        raise InputError("name at least one method: --methods fedselect,fedavg.")
    return names


def _folder(name: str, taken: Container[str]) -> str:
    """A safe and unused name for a run directory, without path separators."""
    plain = re.sub(r"[^\w.,=+-]+", "_", name).lstrip(".")
    return next(n for n in (plain, *(f"{plain}-{i}" for i in range(2, 10_000))) if n not in taken)


def _say_outcome(config: Config, history: list[Record], out: Path) -> None:
    from fedselect.runs import tables
    from fedselect.simulate import keeping

    shown = config.measured()[0]
    ended = keeping.final(history, shown.name)
    assert ended is not None  # the last round is evaluated
    when = f", {keeping.said(ended)}" if ended.get("kept") is not None else ""
    when += ", each client's chosen model" if config.view else ""
    values = ended["clients"][shown.name]
    drawn = f"{sum(v is not None for v in values)} of {len(values)} " if config.eval_fraction < 1.0 else ""
    whose = f"mean over {drawn}clients, each on its own {tables.DATA[config.score]} data{when}"
    say(f"{shown.name} {shown.said(ended[shown.name])}  ({whose})  in {out}")


def _say_table(done: list[Path], out: Path, report: bool) -> None:
    from fedselect.report import write_report
    from fedselect.runs import rundir, tables
    from fedselect.simulate import ranks

    if ranks.rank() > 0:
        return
    found = tables.rows(done)
    console.print(tables.render(found, tables.rowless(done)))
    say_metrics(done, found[0].score)
    for run, why in tables.failures(done):
        say(f"{run} diverged: {why}")
    if failed := [run for run in done if rundir.failure(run)]:
        say(f"to retry a diverged run: {rundir.again(failed[0])} (on a CPU it will diverge again)")
        print(f"note: {len(failed)} of {len(done)} runs diverged.", file=sys.stderr)
    if report:
        say(f"wrote {write_report([out])}")
    say(f"runs in {out}")
