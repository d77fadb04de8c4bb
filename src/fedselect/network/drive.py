"""A deployed run in its run directory: the same files as a simulated run, and resumable at any moment."""

import copy
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedselect.core import doing, sums
from fedselect.core.errors import FedselectError, RunError
from fedselect.core.files import disk, locked, read_json, write_json
from fedselect.methods.choice import CHOICES
from fedselect.methods.groups import groups_of
from fedselect.network import behind
from fedselect.network.assignment import Assignment
from fedselect.network.plan import Plan, need_plugins
from fedselect.network.rounds import Nodes, Outcome
from fedselect.network.server import Server
from fedselect.network.vault import Vault
from fedselect.private import budget
from fedselect.private.settings import as_private
from fedselect.runs import grouped
from fedselect.runs.config import Config, load_plugins
from fedselect.runs.kept import KeptFile
from fedselect.runs.loop import Watch
from fedselect.runs.rundir import finished, intact_rounds, kept_records, read_records, write_measures
from fedselect.runs.summary import summarise
from fedselect.simulate.keeping import replay, stalled
from fedselect.simulate.records import CHOSEN, SENT, Record, check_defined, columns, evaluated, mean_of, means, validated
from fedselect.tasks.metrics import Measure


def prepare(out: Path, plan: Plan, names: Sequence[str] = ()) -> None:
    """Create a run directory with its plan and, if clients have names, their names."""
    if out.exists() and any(out.iterdir()):
        raise RunError(f"{out} already exists; choose another --name, or resume it with --resume.")
    with disk(out):
        out.mkdir(parents=True, exist_ok=True)
    write_json(out / "plan.json", plan.to_flat())
    write_json(out / "config.json", plan.config.to_json())
    write_measures(out, plan.config.measured())
    if names:
        write_json(out / "federation.json", {"clients": [{"name": n, "classes": []} for n in names], "layers": {}})
    say(out, "prepared")


def serve(out: Path, nodes: Nodes, keys: dict[int, int] | None, watch: Watch) -> None:
    """Run all rounds from the last checkpoint on; status.json says how it goes."""
    flat = read_json(out / "plan.json", "it should hold the plan of a deployed run.")
    with locked(out):
        goes_back = bool(read_json(out / "status.json", "it should hold the status of the run.").get("goes_back"))
        say(out, "running")
        try:
            load_plugins()
            need_plugins(flat, "server")
            with doing.heard(lambda what, share: _say_doing(out, what, share)):
                away = _rounds(Plan.from_flat(flat, out.name), out, nodes, keys, watch, goes_back)
        except FedselectError as e:
            _say_at_last(out, "failed", str(e))
            raise
        except (KeyboardInterrupt, SystemExit):
            _say_at_last(out, "stopped", "the run was stopped; continue with --resume.")
            raise
        except BaseException as e:
            why = f"the server failed ({type(e).__name__}: {e}); fix that, then continue with --resume."
            _say_at_last(out, "failed", why)
            raise
        say(out, "finished", absent=away)


def say(out: Path, status: str, error: str = "", **more: Any) -> None:
    """Write a run's status: prepared, submitted, running, stopped, failed, or finished (then also which clients were away)."""
    write_json(out / "status.json", {"status": status, "error": error, **more})


def _say_at_last(out: Path, status: str, error: str) -> None:
    """The same as a run ends; if the disk is full, the error that ended it says so."""
    with suppress(RunError):
        say(out, status, error)


def _say_doing(out: Path, what: str, share: float | None) -> None:
    """Note how far long work inside a round is, for whoever follows the run."""
    say(out, "running", doing=["" if share is None else what, share])


def _rounds(plan: Plan, out: Path, nodes: Nodes, keys: dict[int, int] | None, watch: Watch, goes_back: bool) -> dict[str, str]:
    """Run the remaining rounds; returns which clients have no final model yet, and why."""
    server = Server(plan.assignment(plan.config.device), plan.limits, out / "masks", keys, plan.config.make_aggregator())
    server.goes_back = goes_back
    if server.budget is not None:
        server.budget.keep(out / budget.NAME)
    vault = Vault(out / "checkpoint")
    told, end = intact_rounds(out / "metrics.jsonl")
    done = [r for r in vault.rounds() if r <= told + 1] or vault.rounds()  # the last round's line is written with the next
    behind.check_any(vault, done)
    lost = behind.lost(vault.folder, done[-1], end) if done else {}
    pending: Record | None = server.load(vault, done[-1])["pending"] if done else None
    history: list[Record] = []
    groups = KeptFile(out / grouped.NAME, lambda: grouped.find(groups_of(server.assigned.method, server.state)))

    def finish(record: Record, outcome: Outcome) -> None:
        """Complete a round once its clients have measured it, which they do as the next one begins."""
        if not history:  # an earlier server may have written this round and later ones
            history.extend(kept_records(out / "metrics.jsonl", record["round"] - 1))
        _measured(record, outcome, server.assigned.metrics)
        if record["round"] <= plan.config.eval_every:
            check_defined(record, server.assigned.metrics)
        _note_kept(history, record, server)
        history.append(record)
        with disk(out / "metrics.jsonl"), (out / "metrics.jsonl").open("a") as metrics:
            metrics.write(sums.to_line(record))
            metrics.flush()
            os.fsync(metrics.fileno())
        watch(plan.config, record)

    def before() -> list[Record]:
        """The rounds before the one that is not measured yet."""
        at = pending["round"] - 1 if pending else 0
        return history[:at] or (read_records(out / "metrics.jsonl")[:at] if at else [])

    def enough() -> bool:
        return server.spent or (plan.config.patience is not None and stalled(before(), plan.config.patience))

    while server.round < plan.config.rounds and not enough():
        outcome = server.step(nodes)
        outcome.set_back, lost = {**lost, **outcome.set_back}, {}
        if pending is not None:
            finish(pending, outcome)
        pending = _record(outcome, plan.clients, server.assigned)
        if plan.config.secret:
            pending["cut"] = _rounded(float(server.memory["cut"]["share"]))
        if server.task:
            write_measures(out, server.assigned.metrics, server.task)
        server.save(vault, {"pending": pending})
        groups.update()
    if pending is None:
        raise RunError(f"{out} has no round to finish.")
    if server.round < plan.config.rounds:
        pending["stopped"] = True
    last = server.close(nodes)
    if server.assigned.keep == "best":  # only now is it known whether the last round is the best: tell every client
        measured = copy.deepcopy(pending)
        _measured(measured, last, server.assigned.metrics)
        _note_kept(before(), measured, server)
        earlier, last = last, server.close(nodes)
        last.set_back = {**earlier.set_back, **last.set_back}
    last.set_back = {**lost, **last.set_back}
    if not last.measured:
        mend = last.advice("start the clients, then continue with --resume.")
        raise RunError(f"no client measured the last round ({last.why()}); {mend}")
    _closed(pending, last)
    finish(pending, last)
    server.save(vault, {"pending": pending})  # if closed again, it still knows the clients that are away then
    spent = {"privacy": _spent(plan, pending["epsilon"])} if "epsilon" in pending else {}
    write_json(out / "summary.json", {**summarise(plan.config, history, server.tested), **attendance(history), **spent})
    return dict(pending["absent"])


def _spent(plan: Plan, epsilon: float) -> dict[str, Any]:
    """The privacy promised and spent; for samples, delta is that of the smallest client."""
    private = as_private(plan.config.private)
    assert private is not None
    return budget.outcome(private, epsilon, private.delta_for(plan.clients if private.unit == "client" else 1))


def attendance(history: list[Record]) -> dict[str, Any]:
    """Which clients missed rounds, were rejected or set back, or have no final model yet, each with the last reason."""
    missed: dict[str, list[int]] = {}
    why: dict[str, str] = {}
    for record in history:
        why |= record.get("missed", {})
        for client in record.get("missed", {}):
            missed.setdefault(client, []).append(record["round"])
    said = {
        kind: [{"round": r["round"], "who": who, "why": why} for r in history for who, why in r.get(kind, {}).items()]
        for kind in ("rejected", "set_back")
    }
    return {"missed": missed, "why": why, **said, "absent": history[-1].get("absent", {}) if history else {}}


def over(out: Path) -> bool:
    """Whether a run is finished and every client has its final model; otherwise it can be resumed, if only to close it."""
    return finished(out) and not read_json(out / "summary.json", "it should hold the outcome of a run.").get("absent")


def _record(outcome: Outcome, clients: int, assigned: Assignment) -> Record:
    """A round as the simulation records it, and also which clients missed it."""
    metrics = assigned.metrics
    held = [validated(m.name) for m in metrics] if assigned.validates else []
    chosen = [] if assigned.view is None else [CHOSEN]
    lists: dict[str, list[Any]] = {k: [None] * clients for k in (*columns(metrics), *held, *chosen)}
    for i, sent in outcome.uploads.items():
        for name, value in sent.items():
            lists[name][i] = _rounded(value)
    return {
        "round": outcome.round,
        "seconds": round(outcome.seconds, 4),
        **({} if outcome.epsilon is None else {"epsilon": outcome.epsilon}),
        **dict.fromkeys((*means(metrics), *held)),
        "train_loss": mean_of(lists["train_loss"]),
        **{k: sum(v or 0 for v in lists[k]) for k in SENT},
        "clients": lists,
        "missed": {str(i): why for i, why in sorted(outcome.missed.items())},
        "rejected": outcome.rejected,
        "set_back": outcome.set_back,
    }


def _measured(record: Record, outcome: Outcome, metrics: Sequence[Measure]) -> None:
    for i, figures in outcome.measured.items():
        for name, value in figures.items():
            record["clients"][name][i] = CHOICES[int(value or 0)] if name == CHOSEN else _rounded(value)
    held = [name for m in metrics if (name := validated(m.name)) in record["clients"]]
    record.update({name: mean_of(record["clients"][name]) for name in (*means(metrics), *held)})


def _note_kept(history: Sequence[Record], record: Record, server: Server) -> None:
    """Record which rounds are kept by now; if it is one for all, the server tells the clients."""
    keep, headline = server.assigned.keep, server.assigned.metrics[0]
    if not server.assigned.validates or not evaluated(record):
        return
    if not any(evaluated(r) for r in history) and record[validated(headline.name)] is None:
        what = "view=best chooses" if keep == "last" else f"keep={keep} and patience choose"
        raise RunError(
            f"{what} on validation data, and no client has any; start clients whose data has some "
            "(--val 20, for a table --val-share 0.2), or start a run without this option."
        )
    if keep == "last":
        return
    record["kept"] = replay([*history, record], keep, headline)
    server.best = record["kept"] if keep == "best" else None


def _closed(record: Record, outcome: Outcome) -> None:
    """Note which clients missed the end of the run; those present at an earlier close are measured and have their model."""
    measured = record["clients"]["share"]
    record["absent"] = {str(i): why for i, why in sorted(outcome.missed.items()) if measured[i] is None}
    for kind in ("rejected", "set_back"):
        record[kind] = {**getattr(outcome, kind), **record.get(kind, {})}


def _rounded(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value


def config_of(out: Path) -> Config:
    return Config.from_dict(read_json(out / "config.json", "it should hold the configuration."), str(out / "config.json"))
