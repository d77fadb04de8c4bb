"""fedselect reproduce."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedselect.cli.flags import numbers, words
from fedselect.cli.terminal import console, say
from fedselect.core.errors import InputError

if TYPE_CHECKING:
    from fedselect.paper.make import Reproduction
    from fedselect.paper.protocol import Target
    from fedselect.runs.config import Config


def reproduce(
    target: Annotated[
        str,
        typer.Argument(
            help="table1, table2, table3, p-alpha, alpha, data-size, fig-convergence, fig-data-size, fig-iou, or all of "
            "these; of ours: plain, beyond, readings, little, stem, long, own, shifts, shifts-digits, natural."
        ),
    ],
    *,
    columns: Annotated[
        str | None,
        typer.Option(
            help="Data sets with commas between; also pacs (in officehome's place) and digits. (default: the paper's)"
        ),
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds with commas between. (default: the target's; 0,1,2)")] = None,
    methods: Annotated[str | None, typer.Option(help="Only these methods' rows, with commas between.")] = None,
    rates_: Annotated[
        str, typer.Option("--rates", help="tuned (on held-out training data, over the paper's grid), or paper (as published).")
    ] = "tuned",
    scale: Annotated[
        float, typer.Option(help="Shrink rounds, images and clients to this fraction; not comparable then.")
    ] = 1.0,
    rounds: Annotated[int | None, typer.Option(help="So many rounds instead of the paper's; not comparable then.")] = None,
    out: Annotated[Path, typer.Option(help="Where runs and results go; several processes may share it.")] = Path(
        "runs/reproduce"
    ),
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or one GPU such as cuda:1.")] = "auto",
    precision: Annotated[str, typer.Option(help="Of matrix products: auto, float32, or on a GPU tf32 or bf16.")] = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run, and run nothing.")] = False,
    there: Annotated[
        bool, typer.Option("--there", help="Run nothing: of the table, the rows whose runs are all there.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the result alone.")] = False,
) -> None:
    """Run the paper's tables and figures, as far as they are missing, and print our numbers beside the paper's."""
    from fedselect.paper.make import Reproduction, gather, run, with_data
    from fedselect.paper.plan import How
    from fedselect.paper.progress import overall
    from fedselect.paper.protocol import choose, targets
    from fedselect.runs.runner import ctrl_c
    from fedselect.simulate import ranks

    if ranks.world() > 1:
        raise InputError("reproduce runs in one process; to share the work, start it several times on one --out.")
    if rates_ not in ("paper", "tuned"):
        raise InputError(f"rates is paper or tuned, not {rates_!r}.")
    chosen: Any = rates_
    how = How(tuple(numbers(seeds)) if seeds is not None else None, scale, rounds, chosen, device, precision)
    asked = words(columns) if columns is not None else None
    if asked == []:
        raise InputError("name at least one column, or leave --columns out.")
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; runs and results go into a folder.")
    if any((out / file).exists() for file in ("config.json", "compare.json")):
        raise InputError(
            f"{out} is a run or a comparison; runs and results go into a folder of their own: choose another --out."
        )
    found = choose(targets(target), asked, words(methods) if methods is not None else None)
    work = Reproduction(with_data(found, how, asked is not None), how, out)
    if dry_run:
        _list(work)
        return
    if there:
        tuned = work.judged()
    else:
        with ctrl_c() as stop, overall(console, quiet) as told:
            tuned = run(work, stop, told)
    for one in work.targets:
        _show(work, one, *gather(work, one, tuned))


def _show(work: Reproduction, target: Target, found: list[Any], made: list[Path]) -> None:
    from fedselect.paper import write

    if not found:
        say(f"{target.name}: no row has all its runs yet; without --there, what is missing is run.")
        return
    for block in found:
        console.print(write.render(target, block, work.how))
        for note in write.notes(target, block):
            say(note)
    say(f"wrote {', '.join(map(str, made))}\n")


def _list(work: Reproduction) -> None:
    """How many runs and rounds there are, and how many of them are there already."""
    from fedselect.paper.make import Reproduction, rates
    from fedselect.runs.rundir import done

    judged = work.judged()
    parts = {"tuning": work.tuning()}
    for target in work.targets:
        parts[target.name] = Reproduction([target], work.how, work.out).reported(rates(judged))
    seen: dict[Path, Config] = {}
    for name, runs in parts.items():
        fresh = {place: config for place, config in runs.items() if place not in seen}
        left = [config for place, config in fresh.items() if not done(place)]
        if runs:
            rest = f"{len(runs) - len(fresh)} of them listed above, " if len(fresh) < len(runs) else ""
            there = len(fresh) - len(left)
            say(f"{name:<16} {len(runs):>5} runs, {rest}{there} there, {sum(c.rounds for c in left)} rounds to run")
        seen |= fresh
    left = [config for place, config in seen.items() if not done(place)]
    say(f"{'in all':<16} {len(seen):>5} runs, {len(seen) - len(left)} there, {sum(c.rounds for c in left)} rounds to run")
    if work.how.mark:
        say(work.how.mark)
