"""The environment of a run: software, hardware, commit."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from fedselect.core.version import package_version
from fedselect.simulate.inputs import pick_device, pick_precision


def environment(device: str = "auto", precision: str = "auto") -> dict[str, Any]:
    where = pick_device(device)
    return {
        "fedselect": package_version(),
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name(where) if where.type == "cuda" else _cpu(),
        "precision": pick_precision("auto", where) if precision == "auto" else precision,
    }


def commit() -> str | None:
    """The commit of the checkout this package runs from, with + for uncommitted changes. FEDSELECT_COMMIT overrides it."""
    here = Path(__file__).resolve().parents[3]
    if "FEDSELECT_COMMIT" in os.environ or not (here / ".git").exists():
        return os.environ.get("FEDSELECT_COMMIT")
    try:
        said = [
            subprocess.run(
                ["git", "-C", str(here), *args], capture_output=True, text=True, check=True, timeout=10
            ).stdout.strip()
            for args in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        ]
    except (OSError, subprocess.SubprocessError):
        return None
    return said[0] + ("+" if said[1] else "")


def _cpu() -> str:
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' * (threads != 1)}"
