"""Which network engine carries a deployment's letters."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from fedselect.core.errors import unknown

if TYPE_CHECKING:
    from fedselect.network.engine import Engine

ENGINES = {"flower": "fedselect.network.flower.launch", "grpc": "fedselect.network.grpc.launch"}
"""The module of each, an `Engine`."""
EngineName = Annotated[str, typer.Option("--engine", help=f"What carries the letters: {' or '.join(ENGINES)}.")]


def find_engine(name: str) -> Engine:
    """An engine whose packages are installed."""
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    engine = cast("Engine", import_module(ENGINES[name]))
    engine.need()
    return engine


def engine_of(part: Path) -> Engine:
    """The engine for which a site was made."""
    from fedselect.network.site import Site

    return find_engine(Site.read(part).engine)
