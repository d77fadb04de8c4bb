"""Which network engine carries a deployment's letters."""

from pathlib import Path
from typing import Annotated

import typer

from fedselect.core.errors import unknown
from fedselect.network.engine import Engine
from fedselect.network.flower import launch as flower
from fedselect.network.grpc import launch as grpc
from fedselect.network.site import Site

ENGINES: dict[str, Engine] = {"flower": flower, "grpc": grpc}
EngineName = Annotated[str, typer.Option("--engine", help=f"What carries the letters: {' or '.join(ENGINES)}.")]


def find_engine(name: str) -> Engine:
    """An engine whose packages are installed."""
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    ENGINES[name].need()
    return ENGINES[name]


def engine_of(part: Path) -> Engine:
    """The engine for which a site was made."""
    return find_engine(Site.read(part).engine)
