"""Reading run directories: the configuration of a run, its progress and its results.

A run directory contains config.json, task.json (the metrics), federation.json (the clients), schema.json (the columns of a
table), metrics.jsonl (one line per round), masks.jsonl (the masks), persistence.json (if the method measures persistence),
groups.json (if the method forms groups), summary.json (once finished), failed.json (if the run diverged), budget.jsonl (the
privacy budget spent, if private) and checkpoint/. A directory written by `result.save` has result.json and the models instead
of checkpoint/, and cannot be resumed. A comparison contains compare.json and one run directory per method and seed.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from fedselect.core import sums
from fedselect.core.errors import InputError, RunError
from fedselect.core.files import check_folder_name, is_part, is_unused, read_json, write_bytes, write_json
from fedselect.core.names import client_number
from fedselect.core.snapshots import places
from fedselect.runs.config import Config
from fedselect.simulate import Simulation
from fedselect.simulate import checkpoint as checkpoints
from fedselect.simulate.records import Record, wrong
from fedselect.tasks import Classification, Measure

BEGIN = ("config.json", "compare.json")  # written first: the one by a run, the other by a comparison
FILES = {
    *BEGIN, "task.json", "federation.json", "schema.json", "metrics.jsonl", "masks.jsonl", "persistence.json", "groups.json",
    "budget.jsonl", "summary.json", "failed.json", "report.html", ".lock", "result.json", "models.safetensors",
    "masks.safetensors",
    "tune.json", "outcome.json", "chosen.json",
    "shared.safetensors",
}  # fmt: skip
NEEDED = ("method", "seed", "rounds", "clients", "share", "bytes_up", "bytes_down", "seconds", "environment")
MADE = re.compile(  # files written by `export` and `report --figures`
    r"client-\d+\.(safetensors|pt2|onnx|md|schema\.json)|(table|clients|metrics)\.(csv|tex)|(convergence|bytes|clients|(shares|overlap|cross)-.+)\.(pdf|png)"
)


def no_run(place: Path) -> RunError:
    """The error for a place that is not a run directory, with the run directories that it contains, if any."""
    if not place.exists():
        return RunError(f"there is no run directory {place}; check the path.")
    if not place.is_dir():
        return RunError(f"{place} is a file, not a run directory; give the folder that a run wrote (its --out).")
    inside = sorted({path.parent for name in BEGIN for path in place.glob(f"*/{name}")})
    if inside:
        return RunError(f"{place} is not a run directory, but contains {len(inside)}; give one, such as {inside[0]}.")
    return RunError(
        f"{place} is not a run directory: it has neither config.json nor compare.json; give the folder that a run wrote "
        "(its --out)."
    )


def read_configs(out: Path) -> dict[str, Config]:
    """The configurations of a comparison, by run directory."""
    return {name: Config.from_dict(c, f"{out / 'compare.json'}: {name}") for name, c in read_comparison(out).items()}


def read_comparison(out: Path) -> dict[str, dict[str, Any]]:
    """The configurations as stored in the file, unchecked."""
    path = out / "compare.json"
    raw = read_json(path, "it must list the runs of a comparison.")
    for name, config in raw.items():
        try:
            check_folder_name(name)
        except InputError as e:
            raise InputError(f"{path}: {e}") from None
        if not isinstance(config, dict):
            raise InputError(f"{path}: {name} must be a configuration, not {config!r}.")
    return raw


def read_config(out: Path) -> dict[str, Any]:
    """A run's configuration as stored in its file, by whatever version."""
    path = out / "config.json"
    found = read_json(path, "it must contain the configuration of a run.")
    for name in ("method", "data", "model"):
        if not isinstance(found.get(name), dict) or not isinstance(found[name].get("name"), str):
            raise RunError(f"{path} does not name a {name}; restore the original file.")
    for name in ("seed", "rounds"):
        if not isinstance(found.get(name), int):
            raise RunError(f"{path} has no number for {name}; restore the original file.")
    if found.get("score", "test") not in ("test", "val"):
        raise RunError(f"{path} has the invalid score {found['score']!r}; restore the original file.")
    return found


def described(out: Path) -> dict[str, Any]:
    """A run's configuration and whether it was deployed: deployed and simulated runs are listed separately."""
    return read_config(out) | ({"deployed": "yes"} if deployed(out) else {})


def write_measures(out: Path, metrics: Sequence[Measure], learned: Mapping[str, Any] | None = None) -> None:
    """Write the metrics of a run, headline first, so that its numbers can be read without its code.

    learned: options of the task that were computed from clients' data, such as the mean and scale of targets.
    """
    write_json(out / "task.json", {"metrics": [m.to_json() for m in metrics], **({"learned": learned} if learned else {})})


def measures(out: Path) -> list[Measure]:
    """The metrics of a run, headline first. Old runs have no task.json and were all classification."""
    path, mend = out / "task.json", "delete it if this is classification, otherwise restart the run with --overwrite."
    if not path.exists():
        return list(Classification().measured())
    try:
        found = [Measure.from_json(m) for m in read_json(path, mend)["metrics"]]
    except (KeyError, TypeError, ValueError):
        found = []
    if not found:
        raise RunError(f"{path} does not list the metrics of the run; {mend}")
    return found


def headline(out: Path) -> Measure:
    """The metric that tables show first."""
    return measures(out)[0]


def finished(out: Path) -> bool:
    return (out / "summary.json").exists()


def deployed(out: Path) -> bool:
    """Whether this is a deployed run, in the server's part of a site."""
    return (out / "plan.json").exists()


def failure(out: Path) -> str | None:
    """Why a run diverged, or None: its numbers stopped being finite. On a CPU they would do so again.

    Resuming a comparison skips the run. Resuming the run itself tries it again.
    """
    path = out / "failed.json"
    return str(read_json(path, f"delete it, then: fedselect resume {out}").get("why")) if path.exists() else None


def done(out: Path) -> bool:
    """Whether the run is finished or diverged."""
    return finished(out) or failure(out) is not None


def again(out: Path) -> str:
    """The command that resumes a run."""
    if not deployed(out):
        return f"fedselect resume {quote(str(out))}"
    place = out.resolve()
    return f"fedselect deploy run {quote(str(place.parent.parent))} --resume --name {quote(place.name)}"


def outcome(out: Path) -> dict[str, Any]:
    """The summary of a finished run. Its config.json must be unchanged."""
    summary, mend = out / "summary.json", f"delete it, then: {again(out)}"
    found = read_json(summary, mend)
    first = headline(out).name
    needed = (*NEEDED, first, f"{first}_local", f"{first}_merged")
    if lacking := [name for name in needed if name not in found]:
        raise RunError(f"{summary} lacks {lacking[0]!r}; {mend}")
    checkpoints.claim(out / "checkpoint", owner(read_config(out)))
    return found


def view_of(summary: Mapping[str, Any], found: Mapping[str, Any], headline: str) -> str:
    """The view that a run's headline reports. For old and unfinished runs it is inferred from the numbers."""
    return str(summary.get("view", "local" if found[headline] == found[f"{headline}_local"] else "merged"))


def read_records(path: Path, growing: bool = False) -> list[Record]:
    """The rounds of a metrics file. If it is `growing`, an incomplete last line is ignored."""
    content = path.read_bytes() if path.exists() else b""
    found, damage = _records(path, sums.lines(content) if growing else content.splitlines())
    if damage:
        raise RunError(f"{damage}; restart the run with --overwrite.")
    return found


def intact_rounds(path: Path) -> tuple[int, str]:
    """The number of readable rounds in a metrics file, and why there are no more."""
    found, damage = _records(path, path.read_bytes().splitlines() if path.exists() else [])
    return len(found), damage or f"{path} ends with round {len(found)}"


def kept_records(path: Path, rounds: int) -> list[Record]:
    """The rounds that a checkpoint covers. Later lines are dropped from the file, since those rounds run again."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    if len(lines) < rounds:
        raise RunError(f"{path} has {len(lines)} rounds, but the checkpoint has {rounds}; restart the run with --overwrite.")
    kept = b"".join(line + b"\n" for line in lines[:rounds])
    if lines and path.read_bytes() != kept:
        write_bytes(path, kept)
    return read_records(path)


def _records(path: Path, lines: list[bytes]) -> tuple[list[Record], str]:
    """The rounds before the first damaged line, and what is wrong with that line."""
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


def check_client(out: Path, client: int | str) -> None:
    """Refuse a client that the run does not have before reading any data, if federation.json lists the clients."""
    file = out / "federation.json"
    there = read_json(file, "delete it; clients are then listed by number.").get("clients") if file.exists() else None
    if isinstance(there, list):
        client_number(client, [str(c.get("name", i)) for i, c in enumerate(there)])


def saved(out: Path) -> bool:
    """Whether `result.save` wrote this directory. It has metrics and models, but no command can rerun it."""
    return (out / "result.json").exists()


def check_not_saved(out: Path) -> None:
    if saved(out):
        raise RunError(
            f"{out} was saved from Python without its data and model; open it in Python with: fs.load_result({str(out)!r})"
        )


def reopen(out: Path) -> tuple[Config, Simulation]:
    """Rebuild a run from its last checkpoint."""
    check_not_saved(out)
    if (out / "compare.json").exists():
        raise RunError(f"{out} is a comparison; pass one of its runs, such as {out / next(iter(read_configs(out)))}.")
    if not (out / "config.json").exists():
        raise no_run(out)
    if deployed(out):
        raise RunError(
            f"{out} was deployed, so each personalized model is on its client; export it there with: fedselect deploy export"
        )
    config = Config.from_dict(
        read_json(out / "config.json", "it must contain the configuration of a run."), str(out / "config.json")
    )
    if why := failure(out):
        raise RunError(f"{out} diverged, so it has no model: {why}")
    found = checkpoints.find(out / "checkpoint", owner(config))
    if found is None and finished(out):  # a run of `reproduce`, which stores no models
        raise RunError(
            f"{out} has no stored models; train them again with: fedselect run --config {out / 'config.json'} --out DIR"
        )
    if found is None:
        raise RunError(f"{out} has no checkpoint yet; wait until the run has written one.")
    simulation = config.simulation(found.chunk, found.rows)
    checkpoints.load(found.place, simulation, owner(config))
    return config, simulation


def core(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a configuration that identifies a run: everything except device, chunk and rows."""
    return checkpoints.as_first_written({k: v for k, v in config.items() if k not in ("device", "chunk", "rows")})


def owner(config: Config | Mapping[str, Any]) -> checkpoints.Run:
    """The owner of a run's checkpoints. A configuration from a file may be of an older version."""
    return checkpoints.Run(core(config.to_json()) if isinstance(config, Config) else _renewed(config), _renewed)


def _renewed(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as this version writes it. Newer options have the defaults that the run used."""
    try:
        return core(Config.from_dict(config, "config.json").to_json())
    except InputError:  # it has a removed option
        return core(config)


def free(name: str) -> Path:
    """A directory under runs/ that does not exist yet."""
    base = Path("runs") / name
    return next(p for p in (base, *(base.with_name(f"{name}-{i}") for i in range(2, 10_000))) if not p.exists())


def identity(config: Config) -> str:
    return checkpoints.identity(core(config.to_json()))


def is_run(out: Path) -> bool:
    """Whether a directory is empty or contains only a run or a comparison."""
    if out.is_symlink() or not out.is_dir():
        return False
    return is_unused(out) or (_begun(out) and all(map(_ours, out.iterdir())))


def _begun(out: Path) -> bool:
    """Whether a directory has a configuration of ours, not just a file with the same name."""
    try:
        raw = {name: read_json(out / name, "") for name in BEGIN if (out / name).is_file()}
    except RunError:
        return False
    configs = [c for name, found in raw.items() for c in ([found] if name == "config.json" else found.values())]
    return bool(configs) and all(isinstance(c, dict) and {"method", "data"} <= c.keys() for c in configs)


def _ours(path: Path) -> bool:
    """Whether this is a file or folder of a run directory."""
    if path.is_symlink():
        return False
    if not path.is_dir():
        return path.name in FILES or MADE.fullmatch(path.name) is not None or is_part(path)
    inside = list(path.iterdir())
    match path.name:
        case "track":  # trackers choose their own file names
            return True
        case "figures":
            return all(p.is_file() and MADE.fullmatch(p.name) for p in inside)
        case "checkpoint":
            states = places(path)
            return all(p in states or is_part(p) for p in inside)
    return is_part(path) or is_run(path)


def check_links(out: Path) -> None:
    """Refuse symbolic links among the files of a run: it must write only into its own directory."""
    for path in (out / name for name in (*sorted(FILES), "checkpoint", "track")):
        if path.is_symlink():
            raise RunError(f"{path} is a link, but a run writes only into its own directory; replace the link with its target.")
