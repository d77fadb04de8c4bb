"""Commands for table schemas: each client writes one, and they are merged before a deployment starts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedselect.cli.flags import EXTRA, configure, flags
from fedselect.cli.terminal import console, say
from fedselect.core import options
from fedselect.core.errors import InputError

if TYPE_CHECKING:
    from fedselect.data.columns import Schema


def add_to(data_app: typer.Typer) -> None:
    data_app.command("schema", context_settings=EXTRA)(schema)
    data_app.command("merge")(merge)


def schema(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="table:FILE of one client, or table:FOLDER of several", metavar="TABLE")],
    out: Annotated[Path, typer.Option(help="The file to write")],
    seed: Annotated[int, typer.Option(help="Seed of the split into training and test rows")] = 0,
) -> None:
    """Write the schema of a table: columns, kinds, counts, means, variances, categories and classes, but no rows."""
    from fedselect.data.tables import schema_of

    data = configure({}, None, name, None, flags(ctx.args), task="classification").data  # nothing is trained
    if data["name"] != "table":
        raise InputError(f"only a table has a schema; type table:FILE, not {name!r}.")
    if not data["path"]:
        raise InputError("the table is missing; type: fedselect data schema table:FILE --target COLUMN --out FILE.")
    given: dict[str, Any] = {k: v for k, v in data.items() if k not in ("name", "path", "schema")}
    made = options.call(schema_of, path=Path(data["path"]).expanduser(), seed=seed, **given)
    made.write(out)
    _say(out, made)


def merge(
    files: Annotated[list[Path], typer.Argument(help="Schemas, one per client", metavar="FILE...")],
    out: Annotated[Path, typer.Option(help="The file to write")],
) -> None:
    """Merge the schemas of all clients into one for the federation, to be used in: fedselect deploy init --schema FILE."""
    from fedselect.data.columns import Schema
    from fedselect.data.fitting import merge as merged

    names = [file.stem for file in files]
    if len(set(files)) < len(files):
        raise InputError("the same schema is listed twice; list each client's once.")
    shown = names if len(set(names)) == len(names) else list(map(str, files))
    made = merged({name: Schema.read(file) for name, file in zip(shown, files, strict=True)}).check_whole()
    made.write(out)
    _say(out, made)


def _say(out: Path, made: Schema) -> None:
    names = sum(column.kind == "category" for column in made.columns)
    asked = f"{len(made.classes)} classes" if made.classes else "0 or 1" if made.labels else "numbers"
    say(
        f"wrote {out}: {len(made.columns)} columns ({names} categorical), {len(made.inputs)} model inputs; target "
        f"{', '.join(made.target)}: {asked}; {made.rows} training rows"
    )
    if lacking := [column.name for column in made.columns if column.kind is None]:
        console.print(f"columns without any value: {', '.join(lacking)}", highlight=False)
