"""The command line."""

import itertools
import re
import sys
import warnings
from collections.abc import Container, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import DownloadColumn, Progress
from rich.table import Table

from fedselect.cli import show
from fedselect.cli.deploy import deploy_app
from fedselect.cli.flags import configure as _config
from fedselect.cli.flags import flags as _flags
from fedselect.cli.flags import numbers, words
from fedselect.cli.reproduce import reproduce
from fedselect.core.errors import FedselectError, InputError, unknown
from fedselect.core.options import Option, find, options, summary
from fedselect.data import DATA
from fedselect.data.fetch import fetch
from fedselect.methods import METHODS
from fedselect.models import MODELS
from fedselect.report import write_report
from fedselect.report.figures import write_figures
from fedselect.report.live import live as serve
from fedselect.runs import presets, rundir, runner, tables
from fedselect.runs.config import Config, read
from fedselect.runs.environment import package_version
from fedselect.runs.export import export
from fedselect.runs.progress import progress
from fedselect.runs.trackers import tracking
from fedselect.simulate import ranks
from fedselect.simulate.records import Record
from fedselect.training.step import Training

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False, rich_markup_mode="rich",
    help="Personalized federated learning: every client gets its own model.",
)  # fmt: skip
data_app = typer.Typer(no_args_is_help=True, help="Data sets: what there is.")
app.add_typer(data_app, name="data")
app.add_typer(deploy_app, name="deploy")
app.command()(reproduce)
console = tables.terminal()

_EXTRA = {"allow_extra_args": True, "ignore_unknown_options": True}
_MORE = (
    "Options of the method, the data, the model and of local training are flags too: [bold]--limit 0.5 --clients 8 "
    "--width 32 --batch-size 16[/bold]. [bold]fedselect methods NAME[/bold] and [bold]fedselect data list[/bold] show them."
)
_STATUS = " Exit status: 0 where any run came to its end; the table and stderr say which diverged."

Out = Annotated[Path | None, typer.Option(help="Run directory; by default a new one under runs/.")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="A TOML file, or the config.json of a run; flags override it.")
]
DataName = Annotated[str | None, typer.Option("--data", help="Data set. (default: digits)")]
ModelName = Annotated[str | None, typer.Option("--model", help="Model. (default: what suits the data)")]
Rounds = Annotated[int | None, typer.Option(help="Communication rounds. (default: 30)")]
Fraction = Annotated[float | None, typer.Option(help="Share of clients that train in a round. (default: 1)")]
Late = Annotated[str | None, typer.Option(help="COUNT@ROUND: the last COUNT clients join in that round.")]
EvalEvery = Annotated[int | None, typer.Option(help="Evaluate every so many rounds. (default: 1)")]
Chunk = Annotated[str | None, typer.Option(help="Clients that train side by side, or auto. (default: auto)")]
Rows = Annotated[
    str | None, typer.Option(help="What rests of a client between rounds: all, or personal (packed). (default: auto)")
]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda. (default: auto)")]
Precision = Annotated[
    str | None, typer.Option(help="Of matrix products: float32, or on a GPU tf32 or bf16. (default: tf32 on a GPU)")
]
Deterministic = Annotated[
    bool | None,
    typer.Option("--deterministic", help="The same bits each time on the same GPU, or an error that says why."),
]
Score = Annotated[
    str | None,
    typer.Option(help="Measure accuracy on test data, or on val: held out of training data with --val. (default: test)"),
]
Cross = Annotated[
    bool | None, typer.Option("--cross", help="At the end, also try every client's model on every other client's data.")
]
Preset = Annotated[
    str | None, typer.Option(help="Values to start from: paper, authors (the method's own), or ours (fedselect).")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the result alone.")]
Overwrite = Annotated[
    bool, typer.Option(help="Replace an existing run directory; models and figures made from it there go too.")
]
Live = Annotated[bool, typer.Option("--watch", help="Show the report in a browser while it trains, on this machine alone.")]
Port = Annotated[int, typer.Option(help="Port for --watch. (default: a free one)", show_default=False)]
Track = Annotated[str | None, typer.Option(help="Also write to tensorboard, mlflow or wandb.")]


def _version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    pass


@app.command(context_settings=_EXTRA, epilog=_MORE)
def run(
    ctx: typer.Context,
    method: Annotated[str | None, typer.Option(help="Method. (default: fedselect)")] = None,
    data: DataName = None,
    model: ModelName = None,
    rounds: Rounds = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the partition, the initial model and training. (default: 0)")
    ] = None,
    out: Out = None,
    config: ConfigFile = None,
    fraction: Fraction = None,
    late: Late = None,
    eval_every: EvalEvery = None,
    chunk: Chunk = None,
    rows: Rows = None,
    device: Device = None,
    precision: Precision = None,
    deterministic: Deterministic = None,
    score: Score = None,
    cross: Cross = None,
    preset: Preset = None,
    quiet: Quiet = False,
    overwrite: Overwrite = False,
    live: Live = False,
    port: Port = 0,
    track: Track = None,
) -> None:
    """Train one federation with one method."""
    raw = read(config) if config else {}
    flags = _flags(ctx.args)
    made = _config(
        raw, method, data, model, flags, where=str(config or "this run"),
        rounds=rounds, seed=seed, fraction=fraction, late=late, eval_every=eval_every, chunk=chunk, rows=rows, device=device,
        precision=precision, deterministic=deterministic, score=score, cross=cross, preset=preset,
    )  # fmt: skip
    out = out or _free(f"{made.method['name']}-{made.data['name']}-seed{made.seed}")
    with _watching(out, [made], quiet, live, port, track) as watch:
        result = runner.start(made, out, overwrite=overwrite, watch=watch)
    _say_outcome(made, result.accuracy, out)


@app.command(context_settings=_EXTRA, epilog=_MORE + " [bold]--fedselect.limit 0.5[/bold] sets one method's alone." + _STATUS)
def compare(
    ctx: typer.Context,
    methods: Annotated[
        str | None, typer.Option(help="Names with commas between. (default: all but layers, the ablation)")
    ] = None,
    data: DataName = None,
    model: ModelName = None,
    rounds: Rounds = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds with commas between. (default: 0)")] = None,
    out: Out = None,
    config: ConfigFile = None,
    fraction: Fraction = None,
    late: Late = None,
    eval_every: EvalEvery = None,
    chunk: Chunk = None,
    rows: Rows = None,
    device: Device = None,
    precision: Precision = None,
    deterministic: Deterministic = None,
    score: Score = None,
    cross: Cross = None,
    preset: Preset = None,
    quiet: Quiet = False,
    overwrite: Overwrite = False,
    live: Live = False,
    port: Port = 0,
    track: Track = None,
    report: Annotated[bool, typer.Option(help="Write report.html beside the runs.")] = False,
) -> None:
    """Train with several methods and seeds, and print one table."""
    raw = dict(read(config)) if config else {}
    own, seed = raw.pop("method", None), raw.pop("seed", 0)  # of the file of one run: a comparison of that run alone
    alone = {own["name"]: {k: v for k, v in own.items() if k != "name"}} if isinstance(own, dict) and "name" in own else {}
    listed = raw.pop("methods", alone)
    own_seeds = raw.pop("seeds", [seed])
    if not isinstance(listed, dict) or not all(isinstance(m, dict) for m in listed.values()) or not isinstance(own_seeds, list):
        raise InputError(f"{config}: methods is a table of tables and seeds a list.")
    names = _names(methods, listed)
    flags = _flags(ctx.args)
    runs = {}
    for name in names:
        for s in numbers(seeds) if seeds else own_seeds:
            one = {**raw, "method": {"name": name, **listed.get(name, {})}, "seed": s}
            made = _config(
                one, None, data, model, flags, among=names, where=f"{config}: {name}" if config else name,
                rounds=rounds, fraction=fraction, late=late, eval_every=eval_every, chunk=chunk, rows=rows, device=device,
                precision=precision, deterministic=deterministic, score=score, cross=cross, preset=preset,
            )  # fmt: skip
            runs[f"{name}-seed{made.seed}"] = made
    out = out or _free("compare")
    with _watching(out, list(runs.values()), quiet, live, port, track) as watch:
        done = runner.start_comparison(runner.Comparison(runs), out, overwrite=overwrite, watch=watch)
    _say_table(done, out, report)


@app.command(
    context_settings=_EXTRA, epilog="Options with several values make the grid: [bold]--limit 0.1,0.3[/bold]." + _STATUS
)
def sweep(
    ctx: typer.Context,
    method: Annotated[str | None, typer.Option(help="Method. (default: fedselect)")] = None,
    data: DataName = None,
    model: ModelName = None,
    rounds: Rounds = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds with commas between. (default: 0)")] = None,
    out: Out = None,
    config: ConfigFile = None,
    fraction: Fraction = None,
    late: Late = None,
    eval_every: EvalEvery = None,
    chunk: Chunk = None,
    rows: Rows = None,
    device: Device = None,
    precision: Precision = None,
    deterministic: Deterministic = None,
    score: Score = None,
    cross: Cross = None,
    preset: Preset = None,
    quiet: Quiet = False,
    overwrite: Overwrite = False,
    live: Live = False,
    port: Port = 0,
    track: Track = None,
    report: Annotated[bool, typer.Option(help="Write report.html beside the runs.")] = False,
) -> None:
    """Train one method over a grid of settings and seeds; those of the same shapes train as one program."""
    raw = read(config) if config else {}
    flags = {name: [v.strip() for v in value.split(",")] for name, value in _flags(ctx.args).items()}
    many = [name for name, values in flags.items() if len(values) > 1]
    runs: dict[str, Config] = {}
    for values in itertools.product(*flags.values()):
        one = dict(zip(flags, values, strict=True))
        for s in numbers(seeds) if seeds else [raw.get("seed", 0)]:
            made = _config(
                raw, method, data, model, one, where=str(config or "this run"),
                rounds=rounds, seed=s, fraction=fraction, late=late, eval_every=eval_every, chunk=chunk, rows=rows,
                device=device, precision=precision, deterministic=deterministic, score=score, cross=cross, preset=preset,
            )  # fmt: skip
            if made not in runs.values():  # 0.1 and 0.10 are one setting
                name = "-".join([made.method["name"], *(f"{n}={one[n]}" for n in many), f"seed{s}"])
                runs[_folder(name, runs)] = made
    out = out or _free("sweep")
    with _watching(out, list(runs.values()), quiet, live, port, track) as watch:
        done = runner.start_comparison(runner.Comparison(runs), out, overwrite=overwrite, watch=watch)
    _say_table(done, out, report)


@app.command()
def resume(
    out: Annotated[Path, typer.Argument(help="A run directory, or that of a comparison.")],
    quiet: Quiet = False,
    live: Live = False,
    port: Port = 0,
    track: Track = None,
) -> None:
    """Go on with a run or a comparison that was interrupted, as if it had not been."""
    runs = list(rundir.read_configs(out).values()) if (out / "compare.json").exists() else []
    with _watching(out, runs, quiet, live, port, track) as watch:
        done = runner.resume(out, watch)
    _say_table(done, out, report=False)


@app.command("report")
def report_(
    places: Annotated[list[Path], typer.Argument(help="Run directories, or those of comparisons.", metavar="DIR...")],
    out: Annotated[
        Path | None, typer.Option(help="Where to write the page. (default: DIR/report.html; of several, ./report.html)")
    ] = None,
    figures: Annotated[
        bool, typer.Option("--figures", help="Also write figures (PDF, PNG) and tables (LaTeX, CSV) into figures/ beside it.")
    ] = False,
) -> None:
    """Write report.html: one page with every figure and table, that opens without a network."""
    page = write_report(places, out)
    _say(f"wrote {page}")
    if figures:
        folder = page.parent / "figures"
        _say(f"wrote {len(write_figures(places, folder))} figures and tables to {folder}")


@app.command("export")
def export_(
    run: Annotated[Path, typer.Argument(help="The directory of one run.")],
    client: Annotated[int, typer.Option(help="Whose model, by number.")],
    form: Annotated[str, typer.Option("--format", help="safetensors, pt2 (torch.export) or onnx.")] = "safetensors",
    out: Annotated[Path | None, typer.Option(help="The file. (default: in the run directory)")] = None,
) -> None:
    """Write one client's personalised model to a file, and print how to load it."""
    made = export(run, client, form, out)
    unfinished = f", round {made.round} of {made.rounds}" if made.round < made.rounds else ""
    recorded = f" (the run: {100 * made.said:.2f}%)" if made.said is not None else ""
    own = f"client {client}'s {tables.DATA[made.score]} data"
    _say(f"wrote {made.path}{unfinished}: accuracy {100 * made.accuracy:.2f}% on {own}{recorded}")
    _say(f"\n{made.snippet}")


@app.command()
def methods(name: Annotated[str | None, typer.Argument(help="One method: its options, a line each.")] = None) -> None:
    """List the methods and their options."""
    if name is None:
        _list("method", METHODS)
        console.print("common to all, local training: " + _inline(options(Training)))
        console.print(f"on {', '.join(presets.SUITED)} other rates hold where nothing is said: fedselect methods NAME")
        return
    factory = find("method", name, METHODS)
    console.print(f"[bold]{name}[/bold]  {summary(factory)}", highlight=False)
    _details({**options(factory), **options(Training)})
    for chosen in presets.NAMES:
        console.print(f"  --preset {chosen:<8} {presets.describe(chosen, name, 'cifar10')}", highlight=False)
    for data in presets.SUITED:
        values = (f"{k}={v}" for table in presets.suited(name, data).values() for k, v in table.items())
        console.print(f"  on {data}, where nothing else is said: {', '.join(values)}", highlight=False)


@data_app.command("show", context_settings=_EXTRA)
def data_show(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="A data set of `fedselect data list`, or folder:PATH, domains:PATH.")],
    seed: Annotated[int, typer.Option(help="Seed of the partition.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Also draw it: a .png or .pdf file.")] = None,
) -> None:
    """Show who would have what, before anything is trained; options of the data are flags: --clients 20."""
    made = _config({}, None, name, None, _flags(ctx.args), seed=seed)
    data = made.make_data()
    console.print(show.table(data), markup=False)
    if out is not None:
        _say(f"wrote {show.picture(data, out)}")


@data_app.command("fetch")
def data_fetch(
    name: Annotated[str, typer.Argument(help="cifar10, cifar100 or cifar10c.")],
    data_dir: Annotated[Path | None, typer.Option(help="Where to put it. (default: $FEDSELECT_DATA or the user cache)")] = None,
) -> None:
    """Download a data set, resuming and checking it."""
    with Progress(*Progress.get_default_columns(), DownloadColumn(), console=console, disable=not console.is_terminal) as bars:
        task = bars.add_task(f"fetching {name}", total=None)
        path = fetch(name, data_dir, lambda done, total: bars.update(task, completed=done, total=total))
    _say(f"{name} is in {path}")


@data_app.command("list")
def data_list() -> None:
    """List the data sets and their options."""
    _list("data", DATA)


@app.command()
def models() -> None:
    """List the models and their options."""
    _list("model", MODELS)


@app.command()
def version() -> None:
    """Print the version."""
    console.print(package_version(), highlight=False)


def main() -> None:
    """Entry point: an error a person can act on is one sentence on stderr, not a traceback."""
    warnings.showwarning = _warn  # type: ignore[assignment]
    try:
        with ranks.joined():
            console.quiet = ranks.rank() > 0  # of several processes one speaks
            app()
    except runner.Stopped as e:
        _fail(str(e), 130)
    except FedselectError as e:
        _fail(f"error: {e}", 2)


def _warn(message: Warning | str, category: type[Warning], *_: Any) -> None:
    """A warning is a sentence too; those of libraries are for their developers."""
    if category is UserWarning and ranks.rank() == 0:
        print(f"note: {message}", file=sys.stderr)


def _fail(message: str, code: int) -> None:
    print(message, file=sys.stderr)
    sys.exit(code)


@contextmanager
def _watching(out: Path, runs: list[Config], quiet: bool, live: bool, port: int, track: str | None) -> Iterator[runner.Watch]:
    """Everybody who wants to hear of a round: the terminal, a browser, a tracker."""
    if port and not live:
        raise InputError("--port is that of the page of --watch; give both, or leave it out.")
    with ExitStack() as stack:
        told: list[runner.Watch] = []
        quiet = quiet or ranks.rank() > 0
        if ranks.rank() > 0:
            track, live = None, False
        if track is not None:
            told.append(stack.enter_context(tracking(track, out)))
        if live:
            _say(f"watch it at {stack.enter_context(serve(out, port))}")
        shown = stack.enter_context(progress(console, quiet, runs))
        told += [shown] if shown else []

        def watch(config: Config, record: Record) -> None:
            for tell in told:
                tell(config, record)

        yield watch


def _names(methods: str | None, listed: dict[str, Any]) -> list[str]:
    if methods is None and listed:
        return list(listed)
    if methods in (None, "all"):
        return [m for m in METHODS if m != "layers"]  # an ablation, of layers that another network may not have
    names = words(methods or "")
    for name in names:
        if name not in METHODS:
            raise unknown("method", name, METHODS)
    if not names:
        raise InputError("name at least one method: --methods fedselect,fedavg.")
    return names


def _folder(name: str, taken: Container[str]) -> str:
    """A name for a run directory: what would lead elsewhere, as a path in it does, is left out."""
    plain = re.sub(r"[^\w.,=+-]+", "_", name).lstrip(".")
    return next(n for n in (plain, *(f"{plain}-{i}" for i in range(2, 10_000))) if n not in taken)


def _free(name: str) -> Path:
    """A directory under runs/ that does not exist yet."""
    base = Path("runs") / name
    return next(p for p in (base, *(base.with_name(f"{name}-{i}") for i in range(2, 10_000))) if not p.exists())


def _say_outcome(config: Config, accuracy: float, out: Path) -> None:
    _say(f"accuracy {100 * accuracy:.2f}%  (mean over clients, own {tables.DATA[config.score]} data)  in {out}")


def _say(text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def _say_table(done: list[Path], out: Path, report: bool) -> None:
    if ranks.rank() > 0:
        return
    console.print(tables.render(tables.rows(done), tables.rowless(done)))
    for run, why in tables.failures(done):
        _say(f"{run} did not come to its end: {why}")
    if failed := [run for run in done if rundir.failure(run)]:
        _say(f"such a run is tried again by its own name, which helps on a GPU at most: fedselect resume {failed[0]}")
        print(f"note: {len(failed)} of {len(done)} runs diverged.", file=sys.stderr)
    if report:
        _say(f"wrote {write_report([out])}")
    _say(f"runs in {out}")


def _list(kind: str, table: Any) -> None:
    grid = Table(box=None, pad_edge=False)
    grid.add_column(kind, style="bold", no_wrap=True)
    grid.add_column("what it does, and its options with their defaults")
    for name, factory in table.items():
        grid.add_row(name, f"{summary(factory)}\n[dim]{_inline(options(factory))}[/dim]")
    console.print(grid, highlight=False)


def _inline(found: dict[str, Option]) -> str:
    return ", ".join(o.describe() for o in found.values())


def _details(found: dict[str, Option]) -> None:
    for option in found.values():
        console.print(f"  --{option.name.replace('_', '-'):<14} {option.describe().partition('=')[2]}", highlight=False)


if __name__ == "__main__":
    main()
