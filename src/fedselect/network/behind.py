"""A server that is behind its clients because its newest checkpoint was lost or an older copy was restored.

Clients keep three generations, so losing one checkpoint costs nothing: they go back with the server, and the repeated rounds
give the same bits. Older states are gone. If most clients would have to start over, the run stops and says so.
"""

from collections.abc import Collection, Mapping
from pathlib import Path

from fedselect.core.errors import CheckpointError, RunError
from fedselect.core.snapshots import places
from fedselect.network.examiner import Hello
from fedselect.network.vault import Vault


def is_ahead(said: Hello, round: int, accepted: int) -> bool:
    """Whether a client has rounds that a server at this round cannot have asked for, and no earlier one to go back to."""
    return said.newest > round + 1 and (said.base < accepted or said.base == 0)


SUMS_ONCE = (
    "with --secret no client repeats a round, because the sums of both attempts could be compared; restore the newer "
    "checkpoint and continue with --resume, or start a new run."
)


def check_ahead(round: int, ahead: Mapping[int, int], here: Collection[int], secret: bool) -> None:
    """Stop if most clients are ahead. `ahead`: the newest round of each such client; `secret`: clients cannot go back."""
    count = sum(i in here for i in ahead)
    if 2 * count <= len(here):
        return
    found = (
        f"the server's checkpoint is of round {round}, but {count} of {len(here)} clients have later rounds (up to "
        f"{max(ahead.values())}) and no longer keep that one; an older checkpoint was probably restored"
    )
    if secret:
        raise RunError(f"{found}; {SUMS_ONCE}")
    raise RunError(
        f"{found}. Restore the newer checkpoint and continue with --resume, start a new run, or continue with "
        "--resume --go-back, which resets the personal parameters of these clients."
    )


def check_any(vault: Vault, done: list[int]) -> None:
    """Refuse to restart from the first round if checkpoints exist but none is intact."""
    if not done and places(vault.folder):
        raise CheckpointError(
            f"no checkpoint in {vault.folder} is intact; restore a copy and continue with --resume, or start a new run."
        )


def lost(folder: Path, round: int, told: str) -> dict[str, str]:
    """What to record when the server continues although a newer checkpoint exists; `told`: where its metrics end."""
    newer = [p for p in places(folder) if int(p.name) > round]
    if not newer:
        return {}
    whole = int(newer[-1].name) in Vault(folder).rounds()
    why = told if whole else f"{newer[-1]} is damaged"
    return {"server": f"{why}, so it continues from round {round} and repeats the rounds since"}
