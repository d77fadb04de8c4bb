"""Commands that use the results of runs: report, export, predict."""

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from fedselect.cli.terminal import say


def add_to(app: typer.Typer) -> None:
    app.command("report")(report_)
    app.command("export")(export_)
    app.command("predict")(predict)


def report_(
    places: Annotated[list[Path], typer.Argument(help="Directories of runs or comparisons", metavar="DIR...")],
    out: Annotated[
        Path | None, typer.Option(help="The page to write (default: DIR/report.html; for several directories ./report.html)")
    ] = None,
    figures: Annotated[
        bool, typer.Option("--figures", help="Also write figures (PDF, PNG) and tables (LaTeX, CSV) to figures/ beside it")
    ] = False,
) -> None:
    """Write report.html: one page with every figure and table, which opens offline."""
    from fedselect.report import write_report
    from fedselect.report.figures import write_figures

    page = write_report(places, out)
    say(f"wrote {page}")
    if figures:
        folder = page.parent / "figures"
        say(f"wrote {len(write_figures(places, folder))} figures and tables to {folder}")


def export_(
    run: Annotated[Path, typer.Argument(help="The directory of one run")],
    client: Annotated[str, typer.Option(help="Name or number of the client whose model to export")],
    form: Annotated[str, typer.Option("--format", help="safetensors, pt2 (torch.export) or onnx")] = "safetensors",
    out: Annotated[Path | None, typer.Option(help="The file to write (default: in the run directory)")] = None,
) -> None:
    """Write one client's personalized model to a file, and print how to load it."""
    from fedselect.runs import tables
    from fedselect.runs.export import card_file, export

    made = export(run, client, form, out)
    unfinished = f", round {made.round} of {made.rounds}" if made.round < made.rounds else ""
    recorded = f" (recorded in the run: {made.headline.said(made.said)})" if made.said is not None else ""
    own = f"the {tables.DATA[made.score]} data of {made.client}"
    say(f"wrote {made.path}{unfinished}: {made.headline.name} {made.headline.said(made.value)} on {own}{recorded}")
    say(f"\n{made.snippet}")
    say(f"# or: fedselect predict {quote(str(made.path))} FILE   (model card: {card_file(made.path)})")


def predict(
    model: Annotated[Path, typer.Argument(help="A file written by `export` or `deploy export`: safetensors, pt2 or onnx")],
    file: Annotated[Path, typer.Argument(help="A table, arrays (.npy, .npz), an image or a folder of images")],
    out: Annotated[Path | None, typer.Option(help="The CSV file to write (default: print to the terminal)")] = None,
    proba: Annotated[bool, typer.Option("--proba", help="Also write the probability of each class")] = False,
) -> None:
    """Predict with an exported model: one line of CSV per sample."""
    from fedselect.serve import given, load_model

    served = load_model(model)
    names, x = given.read(served, file)
    given.write(*given.table(served, names, x, proba), out)
    if out is not None:
        say(f"wrote {len(names)} predictions to {out}")
