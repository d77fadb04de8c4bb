"""The network engines that can carry a deployment's messages."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from fedselect.core.errors import unknown

if TYPE_CHECKING:
    from fedselect.network.engine import Engine

ENGINES = {"flower": "fedselect.network.flower.launch", "grpc": "fedselect.network.grpc.launch"}
"""Each engine's module, which is an `Engine`."""
EngineName = Annotated[str, typer.Option("--engine", help=f"Network engine: {' or '.join(ENGINES)}")]


def find_engine(name: str) -> Engine:
    """Look up an engine by name and check that its packages are installed."""
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    engine = cast("Engine", import_module(ENGINES[name]))
    engine.need()
    return engine


def engine_of(part: Path) -> Engine:
    """The engine that a site was created for."""
    from fedselect.network.site import Site

    return find_engine(Site.read(part).engine)
