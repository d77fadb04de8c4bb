"""Run directories as one reads them: what a run is of, how far it came, and what came out.

A run directory holds config.json, task.json (what is measured), federation.json (who has what), schema.json (the columns, of
tables), metrics.jsonl (a line a round), masks.jsonl (the masks), persistence.json (where clients keep disagreeing, if the
method measures it), groups.json (who shares with whom, if the method makes groups), summary.json (when finished), failed.json
(if its numbers stopped being finite), budget.jsonl (what was charged, if it is private) and checkpoint/. One that `result.save`
wrote in a program has result.json and the models in place of checkpoint/, and is for reading alone.
A comparison holds compare.json and one run directory for each method and seed.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedselect.core import sums
from fedselect.core.errors import InputError, RunError
from fedselect.core.files import check_folder_name, is_part, is_unused, read_json, write_bytes, write_json
from fedselect.core.snapshots import places
from fedselect.runs.config import Config
from fedselect.simulate import Simulation
from fedselect.simulate import checkpoint as checkpoints
from fedselect.simulate.records import Record, wrong
from fedselect.tasks import Classification, Measure

BEGIN = ("config.json", "compare.json")  # a run has the one, a comparison the other, from its beginning on
FILES = {
    *BEGIN, "task.json", "federation.json", "schema.json", "metrics.jsonl", "masks.jsonl", "persistence.json", "groups.json",
    "budget.jsonl", "summary.json", "failed.json", "report.html", ".lock", "result.json", "models.safetensors",
    "masks.safetensors",
    "tune.json", "outcome.json", "chosen.json",
    "shared.safetensors",
}  # fmt: skip
NEEDED = ("method", "seed", "rounds", "clients", "share", "bytes_up", "bytes_down", "seconds", "environment")
MADE = re.compile(  # from a run, by `export` and `report --figures`
    r"client-\d+\.(safetensors|pt2|onnx|md|schema\.json)|(table|clients|metrics)\.(csv|tex)|(convergence|bytes|clients|(shares|overlap|cross)-.+)\.(pdf|png)"
)


def read_configs(out: Path) -> dict[str, Config]:
    """The configurations of a comparison, by run directory."""
    return {name: Config.from_dict(c, f"{out / 'compare.json'}: {name}") for name, c in read_comparison(out).items()}


def read_comparison(out: Path) -> dict[str, dict[str, Any]]:
    """The same as the file has them: enough to say which runs there are."""
    path = out / "compare.json"
    raw = read_json(path, "it should list the runs of a comparison.")
    for name, config in raw.items():
        try:
            check_folder_name(name)
        except InputError as e:
            raise InputError(f"{path}: {e}") from None
        if not isinstance(config, dict):
            raise InputError(f"{path}: {name} should be a configuration, not {config!r}.")
    return raw


def read_config(out: Path) -> dict[str, Any]:
    """A run's configuration as its file has it, whatever version wrote it: enough to say what ran."""
    path = out / "config.json"
    found = read_json(path, "it should say how to run.")
    for name in ("method", "data", "model"):
        if not isinstance(found.get(name), dict) or not isinstance(found[name].get("name"), str):
            raise RunError(f"{path} does not name a {name}; put it back as it was.")
    for name in ("seed", "rounds"):
        if not isinstance(found.get(name), int):
            raise RunError(f"{path} has no number of {name}; put it back as it was.")
    if found.get("score", "test") not in ("test", "val"):
        raise RunError(f"{path} has the score {found['score']!r}; put it back as it was.")
    return found


def described(out: Path) -> dict[str, Any]:
    """A run's configuration, and whether it was deployed: such a run is another than the same one simulated."""
    return read_config(out) | ({"deployed": "yes"} if deployed(out) else {})


def write_measures(out: Path, metrics: Sequence[Measure], learned: Mapping[str, Any] | None = None) -> None:
    """Say what a run measures, its headline first, so that its numbers can be read without the code that took them.

    learned: options of the task that clients' data gave, such as the mean and scale of targets.
    """
    write_json(out / "task.json", {"metrics": [m.to_json() for m in metrics], **({"learned": learned} if learned else {})})


def measures(out: Path) -> list[Measure]:
    """What a run measures, its headline first; older runs do not say, and were all classification."""
    path, mend = out / "task.json", "delete it if this is classification, else start the run again with --overwrite."
    if not path.exists():
        return list(Classification().measured())
    try:
        found = [Measure.from_json(m) for m in read_json(path, mend)["metrics"]]
    except (KeyError, TypeError, ValueError):
        found = []
    if not found:
        raise RunError(f"{path} does not say what the run measures; {mend}")
    return found


def headline(out: Path) -> Measure:
    """The metric that tables show first."""
    return measures(out)[0]


def finished(out: Path) -> bool:
    return (out / "summary.json").exists()


def deployed(out: Path) -> bool:
    """Whether this is a run over a network, in the server's part of a site."""
    return (out / "plan.json").exists()


def failure(out: Path) -> str | None:
    """Why a run did not come to its end: its numbers stopped being finite, which on a CPU they always will.

    Among others it is left alone, unless it is resumed by its own name.
    """
    path = out / "failed.json"
    return str(read_json(path, f"delete it, then: fedselect resume {out}").get("why")) if path.exists() else None


def done(out: Path) -> bool:
    """Whether there is nothing left to do."""
    return finished(out) or failure(out) is not None


def again(out: Path) -> str:
    """The command that goes on with a run."""
    if not deployed(out):
        return f"fedselect resume {out}"
    place = out.resolve()
    return f"fedselect deploy run {place.parent.parent} --resume --name {place.name}"


def outcome(out: Path) -> dict[str, Any]:
    """What a finished run came to; its config.json must still say what ran."""
    summary, mend = out / "summary.json", f"delete it, then: {again(out)}"
    found = read_json(summary, mend)
    first = headline(out).name
    needed = (*NEEDED, first, f"{first}_local", f"{first}_merged")
    if lacking := [name for name in needed if name not in found]:
        raise RunError(f"{summary} lacks {lacking[0]!r}, so it is no outcome of a run; {mend}")
    checkpoints.claim(out / "checkpoint", owner(read_config(out)))
    return found


def view_of(summary: Mapping[str, Any], found: Mapping[str, Any], headline: str) -> str:
    """What a run's headline is of; older runs and those under way do not say, but by the numbers that were found."""
    return str(summary.get("view", "local" if found[headline] == found[f"{headline}_local"] else "merged"))


def read_records(path: Path, growing: bool = False) -> list[Record]:
    """The rounds of a metrics file; of one that is being written, those that are whole."""
    content = path.read_bytes() if path.exists() else b""
    found, damage = _records(path, sums.lines(content) if growing else content.splitlines())
    if damage:
        raise RunError(f"{damage}; start again with --overwrite.")
    return found


def intact_rounds(path: Path) -> tuple[int, str]:
    """How many rounds of a metrics file can be read, and what keeps us from reading more."""
    found, damage = _records(path, path.read_bytes().splitlines() if path.exists() else [])
    return len(found), damage or f"{path} ends with round {len(found)}"


def kept_records(path: Path, rounds: int) -> list[Record]:
    """The lines of the rounds a checkpoint covers; what was written after it is dropped, for those rounds run again."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    if len(lines) < rounds:
        raise RunError(f"{path} has {len(lines)} rounds where the checkpoint has {rounds}; start again with --overwrite.")
    kept = b"".join(line + b"\n" for line in lines[:rounds])
    if lines and path.read_bytes() != kept:
        write_bytes(path, kept)
    return read_records(path)


def _records(path: Path, lines: list[bytes]) -> tuple[list[Record], str]:
    """The rounds up to the first line that is damaged, and what is wrong with that one."""
    found: list[Record] = []
    known = measures(path.parent)
    for line in lines:
        try:
            record = sums.from_line(line)
            problem = wrong(record, len(found) + 1, known)
        except ValueError as e:
            problem = str(e)
        if problem:
            return found, f"{path} is damaged in line {len(found) + 1} ({problem})"
        found.append(record)
    return found, ""


def check_client(out: Path, client: int) -> None:
    """Refuse a client that a run does not have, before its data is read; of a run that does not say, `reopen` says more."""
    file = out / "federation.json"
    there = read_json(file, "delete it: clients are then known by number.").get("clients") if file.exists() else None
    if isinstance(there, list) and not 0 <= client < len(there):
        raise InputError(f"there is no client {client} in {out}; there are 0 to {len(there) - 1}.")


def saved(out: Path) -> bool:
    """Whether this is what `result.save` wrote in a program: numbers and models of a run that no command can repeat."""
    return (out / "result.json").exists()


def check_not_saved(out: Path) -> None:
    if saved(out):
        raise RunError(f"{out} was saved by a program, without its data and model; in Python: fs.load_result({str(out)!r})")


def reopen(out: Path) -> tuple[Config, Simulation]:
    """A run as its last checkpoint left it."""
    check_not_saved(out)
    if (out / "compare.json").exists():
        raise RunError(f"{out} is a comparison; name one of its runs, such as {out / next(iter(read_configs(out)))}.")
    if not (out / "config.json").exists():
        raise RunError(f"{out} is not a run directory: it has no config.json.")
    if deployed(out):
        raise RunError(f"{out} was deployed: personal models lie with the clients; there: fedselect deploy export")
    config = Config.from_dict(read_json(out / "config.json", "it should say how to run."), str(out / "config.json"))
    if why := failure(out):
        raise RunError(f"{out} diverged, so it has no model: {why}")
    found = checkpoints.find(out / "checkpoint", owner(config))
    if found is None and finished(out):  # of a table, which keeps no models
        raise RunError(
            f"{out} has its numbers alone; make it anew with: fedselect run --config {out / 'config.json'} --out DIR"
        )
    if found is None:
        raise RunError(f"{out} has no checkpoint yet; let it run for a while.")
    simulation = config.simulation(found.chunk, found.rows)
    checkpoints.load(found.place, simulation, owner(config))
    return config, simulation


def core(config: Mapping[str, Any]) -> dict[str, Any]:
    """What makes two configurations the same run: all but where and in how large pieces it runs."""
    return checkpoints.as_first_written({k: v for k, v in config.items() if k not in ("device", "chunk", "rows")})


def owner(config: Config | Mapping[str, Any]) -> checkpoints.Run:
    """Whose checkpoints those of a run with this configuration are; a file's may be of an older version."""
    return checkpoints.Run(core(config.to_json()) if isinstance(config, Config) else _renewed(config), _renewed)


def _renewed(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as this version writes it: an option that came later has the default that the run was made with."""
    try:
        return core(Config.from_dict(config, "config.json").to_json())
    except InputError:  # it has an option that is gone
        return core(config)


def free(name: str) -> Path:
    """A directory under runs/ that does not exist yet."""
    base = Path("runs") / name
    return next(p for p in (base, *(base.with_name(f"{name}-{i}") for i in range(2, 10_000))) if not p.exists())


def identity(config: Config) -> str:
    return checkpoints.identity(core(config.to_json()))


def is_run(out: Path) -> bool:
    """Whether a directory is a run or a comparison, or is about to be one, and holds nothing that those do not write."""
    if out.is_symlink() or not out.is_dir():
        return False
    return is_unused(out) or (_begun(out) and all(map(_ours, out.iterdir())))


def _begun(out: Path) -> bool:
    """Whether a directory says how to run, as ours do: others have files of these names, too."""
    try:
        raw = {name: read_json(out / name, "") for name in BEGIN if (out / name).is_file()}
    except RunError:
        return False
    configs = [c for name, found in raw.items() for c in ([found] if name == "config.json" else found.values())]
    return bool(configs) and all(isinstance(c, dict) and {"method", "data"} <= c.keys() for c in configs)


def _ours(path: Path) -> bool:
    """Whether this is what a run directory has in it."""
    if path.is_symlink():
        return False
    if not path.is_dir():
        return path.name in FILES or MADE.fullmatch(path.name) is not None or is_part(path)
    inside = list(path.iterdir())
    match path.name:
        case "track":  # trackers name their files as they like
            return True
        case "figures":
            return all(p.is_file() and MADE.fullmatch(p.name) for p in inside)
        case "checkpoint":
            states = places(path)
            return all(p in states or is_part(p) for p in inside)
    return is_part(path) or is_run(path)


def check_links(out: Path) -> None:
    """A run writes into its own directory alone: nothing that it appends to or replaces may lead elsewhere."""
    for path in (out / name for name in (*sorted(FILES), "checkpoint", "track")):
        if path.is_symlink():
            raise RunError(f"{path} is a link; a run writes into its own directory alone: put what it points to in its place.")
