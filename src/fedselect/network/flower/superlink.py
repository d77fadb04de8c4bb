"""Flower's SuperLink at two addresses: a public one for nodes, and one for control from this machine only.

Flower serves everything at one port and checks nobody who starts, stops and lists runs, registers keys, or takes over a
server's work. Here that port is bound to loopback. A second socket of the same server has the public address and serves only
what nodes need: `/v1/fleet/`, where each request is signed with a node's key, and `/health`.

    python -m fedselect.network.flower.superlink --public HOST:PORT [options of flower-superlink]

`--host` and `--port` among Flower's options are then the address for control, by default 127.0.0.1:8000.
"""

import sys
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Callable[[], Awaitable[Any]], Send], Awaitable[None]]


def two_doors(app: App, private: int) -> App:
    """The whole application for connections at the private port; at any other port only what nodes need."""

    async def behind_the_doors(scope: Scope, receive: Callable[[], Awaitable[Any]], send: Send) -> None:
        if scope["type"] == "lifespan" or (scope.get("server") or (None, None))[1] == private or _for_nodes(scope):
            await app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"only nodes come in here\n"})
        else:
            await send({"type": "websocket.close", "code": 1008})

    return behind_the_doors


def _for_nodes(scope: Scope) -> bool:
    path = str(scope.get("path"))
    return scope["type"] == "http" and (path == "/health" or path.startswith("/v1/fleet/"))


def serve(public: str, app: App, host: str, port: int, **options: Any) -> None:
    """Like `uvicorn.run`, at two addresses."""
    uvicorn = import_module("uvicorn")
    options.pop("reload", None)
    options.pop("workers", None)
    config = uvicorn.Config(two_doors(app, port), host=host, port=port, **options)
    name, _, number = public.rpartition(":")
    outside = uvicorn.Config(app, host=name.strip("[]"), port=int(number), **options)
    server = uvicorn.Server(config)
    server.run(sockets=[config.bind_socket(), outside.bind_socket()])
    if not server.started:
        sys.exit(3)


def main() -> None:
    """flower-superlink with one more option."""
    if "--public" not in sys.argv[1:-1]:
        sys.exit("give the address for nodes: --public HOST:PORT")
    at = sys.argv.index("--public")
    _, public = sys.argv.pop(at), sys.argv.pop(at)
    command = import_module("flwr.superlink.cli.flower_superlink")
    command.uvicorn = SimpleNamespace(run=partial(serve, public))  # type: ignore[attr-defined]
    command.flower_superlink()


if __name__ == "__main__":
    main()
