"""A server that is behind its clients: its newest checkpoint was lost, or an older copy of it was put back.

Clients keep three generations, so one lost checkpoint costs nothing: they go back with the server, and the rounds that run
again give the same bits. Further back their states are gone; before most of them begin anew, the run stops and says so.
"""

from collections.abc import Collection, Mapping
from pathlib import Path

from fedselect.core.errors import CheckpointError, RunError
from fedselect.core.snapshots import places
from fedselect.network.examiner import Hello
from fedselect.network.vault import Vault


def is_ahead(said: Hello, round: int, accepted: int) -> bool:
    """Whether a client has rounds that a server at this round cannot have asked for, and no more those that it could."""
    return said.newest > round + 1 and (said.base < accepted or said.base == 0)


SUMS_ONCE = (
    "with --secret a client takes part in no round twice, as sums of the same round could be compared; put the newer "
    "checkpoint back, then go on with --resume, or begin another run."
)


def check_ahead(round: int, ahead: Mapping[int, int], here: Collection[int], secret: bool) -> None:
    """Stop where most clients are ahead; by client, the newest round of each that is. `secret`: they do not go back."""
    count = sum(i in here for i in ahead)
    if 2 * count <= len(here):
        return
    found = (
        f"the server's checkpoint is of round {round}, but {count} of {len(here)} clients have later rounds (up to "
        f"{max(ahead.values())}) and no longer that one, so an older checkpoint must have been put in place"
    )
    if secret:
        raise RunError(f"{found}; {SUMS_ONCE}")
    raise RunError(
        f"{found}: put the newer one back, then go on with --resume; or begin another run; or go on with --resume --go-back, "
        "where the personal parameters of these clients begin anew."
    )


def check_any(vault: Vault, done: list[int]) -> None:
    """Refuse to begin at the first round where there were checkpoints and none is whole."""
    if not done and places(vault.folder):
        raise CheckpointError(
            f"no checkpoint in {vault.folder} is whole; put a copy of one back, then go on with --resume, or begin another run."
        )


def lost(folder: Path, round: int, told: str) -> dict[str, str]:
    """What to note of a server that goes on from here though there is a newer checkpoint; `told`: where its metrics end."""
    newer = [p for p in places(folder) if int(p.name) > round]
    if not newer:
        return {}
    whole = int(newer[-1].name) in Vault(folder).rounds()
    why = told if whole else f"{newer[-1]} is damaged"
    return {"server": f"{why}, so it goes on from round {round}; the rounds since run again"}
