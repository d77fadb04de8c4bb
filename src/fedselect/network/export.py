"""Export a client's finished model from its vault, as a file for the plain network."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from fedselect.core import snapshots, tensors
from fedselect.core.errors import InputError, RunError
from fedselect.core.files import replace
from fedselect.core.tree import nested
from fedselect.models import Layout
from fedselect.network.client import MODEL
from fedselect.network.vault import Vault
from fedselect.runs.export import loading
from fedselect.serve.formats import ABOUT


def runs(vault: Path) -> list[Path]:
    """The runs in a vault, oldest first."""
    found = [p for p in vault.iterdir() if p.is_dir()] if vault.is_dir() else []
    return sorted(found, key=lambda p: p.stat().st_mtime_ns)


@dataclass(frozen=True)
class ExportedModel:
    run: str
    view: str  # for a client that chose between models, also its choice
    snippet: str | None  # Python that loads it; None if the vault does not know the network


def export_model(vault: Path, out: Path, run: str | None, view: str | None) -> ExportedModel:
    """Write the final model of a run, with how inputs are scaled and what its outputs mean."""
    there = {p.name: p for p in runs(vault)}
    done = [name for name, p in there.items() if snapshots.places(p / MODEL)]
    if run is not None and run not in there:
        raise InputError(f"{vault} holds no run {run!r}; it holds {', '.join(there) or 'none'}.")
    if not done or (run is not None and run not in done):
        raise RunError(
            f"{vault} holds no finished model{f' of {run}' if run else ''} yet; it is written when a run ends. A client that "
            "missed the end gets it once the server continues with --resume."
        )
    name = run or done[-1]
    place = snapshots.places(there[name] / MODEL)[-1]
    found = Vault(place.parent).find(int(place.name))
    if found is None:
        raise RunError(
            f"{place} is damaged; to have it written again, start this client, and on the server: fedselect deploy run SITE "
            f"--resume --name {name}"
        )
    models, notes = nested("model", found.tensors), found.notes
    beside = {f"{end}.{n}": v for end in ("input", "output") for n, v in models.pop(end, {}).items()}
    chosen = view or str(notes["view"])
    if chosen not in models:
        raise InputError(f"the view must be {' or '.join(models)}, not {chosen!r}.")
    whose = {"run": name} | {k: str(notes[k]) for k in ("client", "federation") if k in notes}  # older vaults do not say
    _check_place(out, whose)
    said = {**whose, "view": chosen, "classes": json.dumps(notes.get("classes"))}
    said |= {ABOUT: json.dumps(notes["about"])} if "about" in notes else {}  # older vaults do not say

    def write(fresh: Path) -> None:
        with os.fdopen(os.open(fresh, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "wb") as file:
            file.write(tensors.to_bytes({**models[chosen], **beside}, said))

    replace(out, write)
    view = f"best: {notes['chosen']}" if chosen == "best" else chosen
    if "model" not in notes:
        return ExportedModel(name, view, None)
    shape, kind = tuple(notes["shape"]), getattr(torch, notes["kind"])
    snippet = loading(
        out, notes["model"], shape, len(notes["classes"]), kind, notes["classes"],
        outputs=notes.get("outputs"), units="output.scale" in beside, table="schema" in notes,
        layout=Layout.from_json(notes["layout"]) if "layout" in notes else None, bare=notes.get("bare", True),
    )  # fmt: skip
    return ExportedModel(name, view, snippet)


def _check_place(out: Path, whose: dict[str, str]) -> None:
    """Refuse to overwrite a file unless it holds the model of the same run and client."""
    if not out.exists():
        return
    try:
        with safe_open(out, "pt") as file:
            found = file.metadata() or {}
    except (SafetensorError, OSError):
        found = {}
    if any(found.get(k) != v for k, v in whose.items()):
        said = ", ".join(f"{k} {found[k]}" for k in whose if k in found)
        held = f"the model of {said}" if said else "something else"
        raise InputError(f"{out} holds {held}; choose another --out, or remove it first.")
