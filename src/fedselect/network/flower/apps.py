"""The seam to Flower: a ClientApp, a ServerApp, and letters as Flower's messages. Nothing else but `guard` imports flwr."""

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
from fedselect.network.client import Node
from fedselect.network.drive import prepare, serve
from fedselect.network.letters import Letter, unseal
from fedselect.network.plan import Home, Plan, Scalars, check_name, need_plugins
from fedselect.network.server import Reply
from fedselect.runs.config import Config, load_plugins
from fedselect.runs.progress import describe
from fedselect.simulate.records import Record

SERVER = "FEDSELECT_SERVER"  # the server's folder, where `fedselect deploy server` was started
POLL = 0.5
CODES = {2: "raised an error", 5: "is gone", 8: "died while it worked"}

client_app = ClientApp()
server_app = ServerApp()


@client_app.train()
def answer(message: Message, context: Context) -> Message:
    """One letter of the server, answered from this node's data and vault; what is wrong here is said in words."""
    flat = cast(Scalars, context.run_config)
    try:
        load_plugins()
        need_plugins(flat, "client")
        home = Home.from_flat(cast(Scalars, context.node_config))
        plan = home.adapt(Plan.from_flat(flat, f"flower-{context.run_id}"))
        node = Node(plan.assignment(home.device), home.client, home.load(plan), home.vault, home.identity(plan))
        reply = node.answer(from_record(message.content))
    except FedselectError as e:
        reply = Letter({"kind": "refused", "why": str(e)})
    return Message(to_record(reply), reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """All rounds of a run. A site's server runs only what `fedselect deploy run` prepared in its folder."""
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
    """Flower's grid as what carries letters."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def present(self) -> list[int]:
        return list(self.grid.get_node_ids())

    def ask(self, letters: Iterable[tuple[int, Letter]], timeout: float) -> Iterator[tuple[int, Reply]]:
        """One message at a time out and one reply at a time in, so that memory holds one model, not one a client."""
        waiting: dict[str, int] = {}
        for node, letter in letters:
            message = Message(to_record(letter), node, MessageType.TRAIN, ttl=timeout)
            sent = [i for i in self.grid.push_messages([message]) if i]
            if sent:
                waiting[sent[0]] = node
            else:
                yield node, "could not be reached"
        until = time.monotonic() + timeout
        while waiting and time.monotonic() < until:
            for number in list(waiting):
                for reply in self.grid.pull_messages([number]):
                    yield waiting.pop(number), _read(reply)
            if waiting:
                time.sleep(POLL)
        for node in waiting.values():
            yield node, f"no reply within {timeout:g} s"


def _read(message: Message) -> Reply:
    if message.has_error():
        said = CODES.get(message.error.code, f"failed with Flower's code {message.error.code}")
        return f"{said}: {message.error.reason}" if message.error.code == 2 else said
    try:
        letter = from_record(message.content)
    except DataError as e:
        return e
    return str(letter.head.get("why")) if letter.head.get("kind") == "refused" else letter


def to_record(letter: Letter) -> RecordDict:
    text, body = letter.seal()
    return RecordDict({"head": ConfigRecord({"letter": text}), "body": ArrayRecord({"bytes": Array(body.numpy())})})


def from_record(content: RecordDict) -> Letter:
    """A letter from a message; its parts are checked by `unseal`."""
    try:
        text = content.config_records["head"]["letter"]
        array = content.array_records["body"]["bytes"].numpy()
    except Exception as e:  # numpy fed with damaged bytes may raise nearly anything
        raise DataError(f"a message holds no letter ({type(e).__name__}).") from None
    if not isinstance(text, str) or not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.ndim != 1:
        raise DataError("a message holds no letter.")
    return unseal(text, torch.from_numpy(np.array(array)))
