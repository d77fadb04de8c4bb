"""Replaces the programs that start Flower's app processes, so that no code from the network runs.

`fedselect deploy server` and `client` put commands of the same names first in PATH; these end up here. An app may contain only
a configuration, and must name the apps of the installed package.
"""

import io
import shlex
import sys
import tomllib
import zipfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from fedselect.core.errors import InputError

COMPONENTS = {
    "serverapp": "fedselect.network.flower.apps:server_app",
    "clientapp": "fedselect.network.flower.apps:client_app",
}
ALLOWED = {"pyproject.toml", "LICENSE", ".info/CONTENT", ".info/METADATA"}
LARGEST = 1 << 24
"""Most bytes of an app, unpacked."""
COMMANDS = ("flwr-clientapp", "flwr-serverapp")


def check_bundle(bundle: bytes) -> None:
    """Refuse an app that is more than a configuration for our own apps."""
    with zipfile.ZipFile(io.BytesIO(bundle)) as content:
        foreign = sorted(set(content.namelist()) - ALLOWED)
        if sum(part.file_size for part in content.infolist()) > LARGEST:
            raise InputError(f"the app takes more than {LARGEST >> 20} MB; a configuration does not.")
        named = tomllib.loads(content.read("pyproject.toml").decode())["tool"]["flwr"]["app"]["components"]
    if foreign:
        raise InputError(f"the app contains {foreign[0]}, but this node runs installed code only (see --allow-shipped-code).")
    if named != COMPONENTS:
        raise InputError(f"the app names {named}, but this node runs {COMPONENTS} only (see --allow-shipped-code).")


def checked(install: Callable[..., Any]) -> Callable[..., Any]:
    def install_checked(bundle: Any, *args: Any, **kwargs: Any) -> Any:
        check_bundle(bundle)
        return install(bundle, *args, **kwargs)

    return install_checked


def commands(folder: Path) -> Path:
    """Commands for PATH that start Flower's app processes through this file, without modules from the current directory."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in COMMANDS:
        start = f"import sys; sys.argv[0] = '{name}'; from fedselect.network.flower.guard import main; main()"
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P -c "{start}" "$@"\n')
        script.chmod(0o700)
    return folder


def main() -> None:
    """Run flwr-clientapp or flwr-serverapp, whichever was called, and check each app before it is installed."""
    side, name = {"flwr-clientapp": ("supernode", "clientapp"), "flwr-serverapp": ("superlink", "serverapp")}[sys.argv[0]]
    installing = import_module(f"flwr.{side}.runtime.run_{name}")
    installing.install_from_fab = checked(installing.install_from_fab)  # type: ignore[attr-defined]
    getattr(import_module(f"flwr.{side}.cli"), f"flwr_{name}")()
