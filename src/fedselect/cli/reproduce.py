"""fedselect reproduce: rerun the paper's tables and figures."""

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
            help="From the paper: table1, table2, table3, p-alpha, alpha, data-size, fig-convergence, fig-data-size, fig-iou, "
            "or all; our own: plain, beyond, readings, little, stem, long, own, shifts, shifts-digits, natural"
        ),
    ],
    *,
    columns: Annotated[
        str | None,
        typer.Option(
            help="Data sets, separated by commas; also pacs (instead of officehome) and digits (default: the paper's)"
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Seeds, separated by commas (default: those of the target, usually 0,1,2)")
    ] = None,
    methods: Annotated[str | None, typer.Option(help="Only the rows of these methods, separated by commas")] = None,
    rates_: Annotated[
        str,
        typer.Option(
            "--rates", help="Learning rates: tuned (on held-out training data, over the paper's grid) or paper (as published)"
        ),
    ] = "tuned",
    scale: Annotated[
        float, typer.Option(help="Shrink rounds, images and clients to this fraction; results are then not comparable")
    ] = 1.0,
    rounds: Annotated[
        int | None, typer.Option(help="Number of rounds, instead of the paper's; results are then not comparable")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for runs and results; several processes may share it")] = Path(
        "runs/reproduce"
    ),
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or one GPU such as cuda:1")] = "auto",
    precision: Annotated[
        str, typer.Option(help="Precision of matrix multiplication: auto, float32, bf16, or on a GPU tf32")
    ] = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would run; run nothing")] = False,
    there: Annotated[bool, typer.Option("--there", help="Show completed rows only; run nothing")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result")] = False,
) -> None:
    """Run whatever is missing of the paper's tables and figures, and print our numbers beside the paper's."""
    from fedselect.paper.make import Reproduction, gather, run, with_data
    from fedselect.paper.plan import How
    from fedselect.paper.progress import overall
    from fedselect.paper.protocol import choose, targets
    from fedselect.runs.runner import ctrl_c
    from fedselect.simulate import ranks

    if ranks.world() > 1:
        raise InputError("reproduce cannot run under torchrun; to share the work, start it several times with the same --out.")
    if rates_ not in ("paper", "tuned"):
        raise InputError(f"--rates must be paper or tuned, not {rates_!r}.")
    chosen: Any = rates_
    how = How(tuple(numbers(seeds)) if seeds is not None else None, scale, rounds, chosen, device, precision)
    asked = words(columns) if columns is not None else None
    if asked == []:
        raise InputError("--columns names no data set; name at least one, or remove the option.")
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; choose a folder as --out.")
    if any((out / file).exists() for file in ("config.json", "compare.json")):
        raise InputError(f"{out} is already a run or a comparison; choose another folder as --out.")
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
        say(f"{target.name}: no row is complete yet; run the command without --there to run what is missing.")
        return
    for block in found:
        console.print(write.render(target, block, work.how))
        for note in write.notes(target, block):
            say(note)
    say(f"wrote {', '.join(map(str, made))}\n")


def _list(work: Reproduction) -> None:
    """Print how many runs and rounds each target needs, and how many are complete."""
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
            rest = f"{len(runs) - len(fresh)} listed above, " if len(fresh) < len(runs) else ""
            there = len(fresh) - len(left)
            say(f"{name:<16} {len(runs):>5} runs, {rest}{there} complete, {sum(c.rounds for c in left)} rounds to run")
        seen |= fresh
    left = [config for place, config in seen.items() if not done(place)]
    say(f"{'total':<16} {len(seen):>5} runs, {len(seen) - len(left)} complete, {sum(c.rounds for c in left)} rounds to run")
    if work.how.mark:
        say(work.how.mark)
