"""Commands about schemas of tables: one made at each client, all merged before a deployment begins."""

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
    name: Annotated[str, typer.Argument(help="table:FILE of this client, or table:FOLDER of several.", metavar="TABLE")],
    out: Annotated[Path, typer.Option(help="The file to write.")],
    seed: Annotated[int, typer.Option(help="Seed of the division into training and test rows.")] = 0,
) -> None:
    """Write what training rows say of a table: columns, kinds, counts, means, variances, categories, classes. No rows."""
    from fedselect.data.tables import schema_of

    data = configure({}, None, name, None, flags(ctx.args), task="classification").data  # nothing is trained
    if data["name"] != "table":
        raise InputError(f"a schema is one of a table: table:FILE, not {name!r}.")
    if not data["path"]:
        raise InputError("say which table: fedselect data schema table:FILE --target COLUMN --out FILE.")
    given: dict[str, Any] = {k: v for k, v in data.items() if k not in ("name", "path", "schema")}
    made = options.call(schema_of, path=Path(data["path"]).expanduser(), seed=seed, **given)
    made.write(out)
    _say(out, made)


def merge(
    files: Annotated[list[Path], typer.Argument(help="Schemas, one of each client.", metavar="FILE...")],
    out: Annotated[Path, typer.Option(help="The file to write.")],
) -> None:
    """Merge the schemas of all clients into the one that a federation agrees on: fedselect deploy init --schema FILE."""
    from fedselect.data.columns import Schema
    from fedselect.data.fitting import merge as merged

    names = [file.stem for file in files]
    if len(set(files)) < len(files):
        raise InputError("a schema is given twice; give each client's once.")
    shown = names if len(set(names)) == len(names) else list(map(str, files))
    made = merged({name: Schema.read(file) for name, file in zip(shown, files, strict=True)}).check_whole()
    made.write(out)
    _say(out, made)


def _say(out: Path, made: Schema) -> None:
    names = sum(column.kind == "category" for column in made.columns)
    asked = f"{len(made.classes)} classes" if made.classes else "0 or 1" if made.labels else "numbers"
    say(
        f"wrote {out}: {len(made.columns)} columns ({names} of categories) make {len(made.inputs)} inputs; target "
        f"{', '.join(made.target)}: {asked}; {made.rows} training rows"
    )
    if lacking := [column.name for column in made.columns if column.kind is None]:
        console.print(f"without a value here: {', '.join(lacking)}", highlight=False)
