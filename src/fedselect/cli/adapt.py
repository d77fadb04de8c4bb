"""The commands adapt and share: make a model for a new client, and export what another machine needs to do so."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedselect.adaptation import EPOCHS
from fedselect.cli.flags import EXTRA, flags, words
from fedselect.cli.terminal import console, say
from fedselect.core.errors import InputError
from fedselect.core.files import read_json

if TYPE_CHECKING:
    from fedselect.adaptation.adapted import Adapted

_MORE = (
    "Options of the data set are flags too: [bold]--data audiomnist --client 55 --train 100[/bold], or for a table "
    "[bold]--test-share 0.25[/bold]. The best model is chosen on held-out samples; test data is only reported."
)
Source = Annotated[
    Path, typer.Argument(help="A finished run directory, a saved result, or a file written by `fedselect share`")
]


def add_to(app: typer.Typer) -> None:
    app.command("adapt", context_settings=EXTRA, epilog=_MORE)(adapt_)
    app.command("share")(share)


def adapt_(
    ctx: typer.Context,
    run: Source,
    *,
    data: Annotated[str, typer.Option(help="The client's own data: folder:PATH, table:FILE or the name of a data set")],
    out: Annotated[Path, typer.Option(help="A new folder for the model and adapted.json")],
    client: Annotated[str | None, typer.Option(help="Name or number of the client, if the data has several")] = None,
    samples: Annotated[int | None, typer.Option(help="Use only this many training samples, drawn at random")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the folds, of training and of the partition")] = 0,
    epochs: Annotated[str, typer.Option(help="Numbers of fine-tuning epochs to try")] = ",".join(map(str, EPOCHS)),
    rates: Annotated[
        str | None, typer.Option(help="Learning rates to try (default: 0.1, 0.3 and 1 times the rate of the run)")
    ] = None,
    form: Annotated[str, typer.Option("--format", help="safetensors, pt2 (torch.export) or onnx")] = "safetensors",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or one GPU such as cuda:1")] = "auto",
    overwrite: Annotated[bool, typer.Option(help="Replace an adapted model in --out")] = False,
) -> None:
    """Make a model for a new client from a finished run and a few samples of that client."""
    from fedselect.adaptation.adapted import check_place
    from fedselect.adaptation.adapting import adapt, shared_of
    from fedselect.adaptation.reading import few, read

    check_place(out, form, overwrite)
    passes, speeds = [int(e) for e in _numbers(epochs, "epochs")], None if rates is None else _numbers(rates, "rates")
    shared = shared_of(run).check()
    mine = read(shared, data, client, seed, flags(ctx.args))
    if samples is not None:
        mine = few(mine, samples, seed)
    with console.status("reading") as status:

        def show(i: int, what: str) -> None:
            status.update(f"{i + 1}: {what}")

        made = adapt(shared, mine, seed=seed, epochs=passes, rates=speeds, device=device, on_trial=show)
    console.print(_table(made))
    say(_said(made))
    made.save(out, form, overwrite)
    say(f"wrote {out / f'model.{form}'} and adapted.json")
    if load := read_json(out / "adapted.json", "it was just written.")["load"]:
        say(f"\n{load}")


def share(
    run: Annotated[Path, typer.Argument(help="A finished run directory or a saved result")],
    out: Annotated[Path, typer.Option(help="The file to write")],
) -> None:
    """Write the shared part of a finished run to a file. On another machine, fedselect adapt FILE makes a model from it."""
    from fedselect.adaptation.adapting import shared_of

    if out.exists():
        raise InputError(f"{out} already exists; choose another --out, or remove it first.")
    shared = shared_of(run).check()
    shared.write(out)
    heads = max((len(v) for tree in shared.offers.rows.values() for v in tree.values()), default=1)
    say(
        f"wrote {out}: {shared.model.name} after round {shared.about['round']}"
        + (f", {heads} heads to choose from" * (heads > 1))
    )
    say(f"on the machine with the data, run: fedselect adapt {out.name} --data folder:PATH --out FOLDER")


def _table(made: Adapted) -> Table:
    grid = Table(box=SIMPLE_HEAD)
    grid.add_column("model", no_wrap=True)
    tested = any(r.test is not None for r in made.rows)
    title = made.headline.title
    columns = (
        "epochs",
        "rate",
        "rounds",
        f"held-out {title}",
        "loss",
        "gain ± error",
        *([f"test {title}"] if tested else []),
    )
    for column in columns:
        grid.add_column(column, justify="right")
    for r in made.rows:
        loss = f"{r.loss:.3f}" if math.isfinite(r.loss) else "-"
        gain = "" if r.gain is None or r.error is None else f"{r.gain:+.3f} ± {r.error:.3f}"
        cells = [*(("" if v is None else f"{v:g}") for v in (r.epochs, r.lr, r.rounds)), _shown(made, r.headline), loss, gain]
        cells += [_shown(made, r.test)] if tested else []
        grid.add_row(r.words, *cells, style="bold" if r.kind == made.chosen else "")
    return grid


def _shown(made: Adapted, value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else made.headline.show(value)


def _said(made: Adapted) -> str:
    chosen = next(r for r in made.rows if r.kind == made.chosen)
    if chosen.kind == "shared":
        return f"chosen: the unchanged shared model; on these {made.samples} samples no other model is significantly better."
    return f"chosen: {chosen.words}; its held-out loss is significantly lower than the shared model's."


def _numbers(text: str, what: str) -> list[float]:
    try:
        return [float(w) for w in words(text)]
    except ValueError:
        raise InputError(f"--{what} takes numbers separated by commas, not {text!r}.") from None
