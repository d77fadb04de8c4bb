"""Vault: states that survive any crash, on clients and on the server; one snapshot each, readable by the owner only."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedselect.core import snapshots
from fedselect.core.errors import CheckpointError, RunError
from fedselect.core.files import disk, read_json, write_json
from fedselect.core.tree import Tree

ADVICE = "delete it to continue from the snapshot before it."


@dataclass(frozen=True)
class Snapshot:
    """One saved state: its tensors, in their own order, and its notes."""

    round: int
    tensors: Tree
    notes: dict[str, Any]


def private(path: Path) -> None:
    """Create a folder that only its owner can enter."""
    with disk(path):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.chmod(0o700)


def claim(folder: Path, identity: dict[str, str]) -> None:
    """Bind a folder to an identity, or refuse one that belongs to another."""
    private(folder)
    card = folder / "identity.json"
    if not card.exists():
        write_json(card, identity)
        card.chmod(0o600)
    found = read_json(card, "it should say whose vault this is; restore it, or use another --vault.")
    for name, value in identity.items():
        if found.get(name) != value:
            raise CheckpointError(
                f"this client's vault belongs to {name} {found.get(name)!r}, not {value!r}; "
                "each vault is for one federation, method, model and client: start this client with another --vault."
            )


class Vault:
    """Snapshots of one run in one folder, by round."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def rounds(self) -> list[int]:
        """The rounds whose snapshots are complete and undamaged."""
        return [int(p.name) for p in snapshots.places(self.folder) if _intact(p)]

    def damaged(self) -> list[int]:
        """The rounds whose snapshots are there but damaged."""
        return [int(p.name) for p in snapshots.places(self.folder) if not _intact(p)]

    def save(self, round: int, tensors: Tree, notes: dict[str, Any], keep: set[int]) -> None:
        """Write a snapshot, then drop all others except those of the rounds in `keep`."""
        private(self.folder)
        snapshots.save(self.folder, round, tensors, {"notes": notes}, keep, private=True)

    def find(self, round: int) -> Snapshot | None:
        """The snapshot of a round, or None if it is missing or damaged."""
        try:
            said, tensors = snapshots.load(snapshots.at(self.folder, round), ADVICE)
        except RunError:
            return None
        return Snapshot(round, tensors, said["notes"]) if _noted(said) else None

    def notes(self, round: int) -> dict[str, Any]:
        """The notes saved with a snapshot; empty if they cannot be read."""
        try:
            return dict(snapshots.manifest(snapshots.at(self.folder, round), ADVICE).get("notes", {}))
        except RunError:
            return {}

    def load(self, round: int) -> Snapshot:
        found = self.find(round)
        if found is None:
            raise CheckpointError(f"{snapshots.at(self.folder, round)} is damaged or missing; {ADVICE}")
        return found


def _intact(place: Path) -> bool:
    try:
        return _noted(snapshots.checked(place, ADVICE))
    except RunError:
        return False


def _noted(said: dict[str, Any]) -> bool:
    """Whether a manifest has its notes; the first manifests had no checksum, so theirs may be lost."""
    return isinstance(said.get("notes"), dict)
