"""The seam to Flower: a ClientApp, a ServerApp, and our messages as Flower's. Only this file and `guard` import flwr."""

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedselect.core.errors import DataError, FedselectError
from fedselect.core.files import read_json
from fedselect.network.desk import Desk
from fedselect.network.drive import prepare, serve
from fedselect.network.flower import reasons
from fedselect.network.flower.pulls import Pulls
from fedselect.network.home import Home
from fedselect.network.letters import Letter, heard, refusal, unseal
from fedselect.network.plan import Plan, Scalars, check_name, need_plugins
from fedselect.network.rounds import Reply
from fedselect.runs.config import Config, load_plugins
from fedselect.runs.progress import describe
from fedselect.simulate.records import Record

SERVER = "FEDSELECT_SERVER"  # the server's folder, set by `fedselect deploy server`

client_app = ClientApp()
server_app = ServerApp()


@client_app.train()
def answer(message: Message, context: Context) -> Message:
    """Answer one message of the server from this node's data and vault; an error becomes a reply that says what is wrong."""
    try:
        home = Home.from_flat(cast(Scalars, context.node_config))
        desk = Desk(home, cast(Scalars, context.run_config), f"flower-{context.run_id}")
        reply = desk.answer(from_record(message.content))
    except FedselectError as e:
        reply = refusal(e)
    return Message(to_record(reply), reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds. A site's server runs only what `fedselect deploy run` prepared in its folder."""
    config = cast(Scalars, context.run_config)
    site = os.environ.get(SERVER)
    name = check_name(str(config.get("run") or f"flower-{context.run_id}"))
    keys = None
    if site is not None:
        out = Path(site) / "runs" / name
        known = read_json(Path(site) / "nodes.json", "start the server with: fedselect deploy server.")
        keys = {int(node): int(client) for node, client in known.items()} or None
    else:
        out = Path("fedselect-runs") / name
        if not (out / "plan.json").exists():
            load_plugins()
            need_plugins(config, "server")
            prepare(out, Plan.from_flat(config, name))
    serve(out, GridNodes(grid), keys, _say)


def _say(config: Config, record: Record) -> None:
    print(f"round {record['round']}  {describe(record, config.measured()[0])}", flush=True)


class GridNodes:
    """Flower's grid as a transport of messages."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def present(self) -> list[int]:
        return list(self.grid.get_node_ids())

    def ask(self, letters: Iterable[tuple[int, Letter]], timeout: float) -> Iterator[tuple[int, Reply]]:
        """Send one message at a time and, while replies come quickly, receive one at a time: memory holds only one model."""
        waiting: dict[str, int] = {}
        for node, letter in letters:
            message = Message(to_record(letter), node, MessageType.TRAIN, ttl=timeout)
            sent = [i for i in self.grid.push_messages([message]) if i]
            if sent:
                waiting[sent[0]] = node
            else:
                yield node, "could not be reached"
        left = set(waiting)
        for number, reply in Pulls(self.grid.pull_messages).until(time.monotonic() + timeout, left):
            yield waiting[number], _read(reply)
        for number in left:
            yield waiting[number], f"no reply within {timeout:g} s"


def _read(message: Message) -> Reply:
    if message.has_error():
        return reasons.of_error(message.error.code, str(message.error.reason))
    try:
        return heard(from_record(message.content))
    except DataError as e:
        return e


def to_record(letter: Letter) -> RecordDict:
    text, body = letter.seal()
    return RecordDict({"head": ConfigRecord({"letter": text}), "body": ArrayRecord({"bytes": Array(body.numpy())})})


def from_record(content: RecordDict) -> Letter:
    """A letter from a Flower message; `unseal` checks its parts."""
    try:
        text = content.config_records["head"]["letter"]
        array = content.array_records["body"]["bytes"].numpy()
    except Exception as e:  # numpy may raise nearly anything on damaged bytes
        raise DataError(f"a Flower message cannot be read ({type(e).__name__}).") from None
    if not isinstance(text, str) or not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.ndim != 1:
        raise DataError("a Flower message has no fedselect content.")
    return unseal(text, torch.from_numpy(np.array(array)))
