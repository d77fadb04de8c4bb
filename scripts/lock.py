"""Write requirements.lock (to run), requirements-test.lock (to test) and requirements-docs.lock (for the documentation site)
from what this environment holds.

Pins are the versions that are installed here, for the package's dependencies and theirs; run it with `make lock` in an
environment that was brought up to date and passes the tests.
"""

import re
import tomllib
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
RANGES = {"triton": ">=3.7,<3.8"}
"""Not pinned: where torch has CUDA, it asks for an exact version itself."""


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(requirements: list[str]) -> dict[str, str]:
    """Every package that these need, as {name: version}; extras that are asked for count too."""
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    queue = [Requirement(text) for text in requirements]
    while queue:
        wanted = queue.pop()
        name = canonical(wanted.name)
        for extra in ("", *wanted.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            dist = distribution(name)
            found[name] = dist.version.partition("+")[0]  # a local build's label is not on the index
            needs = map(Requirement, dist.requires or [])
            queue.extend(r for r in needs if r.marker is None or r.marker.evaluate({"extra": extra}))
    return found


def write(name: str, pins: dict[str, str], first: str = "") -> None:
    head = f"# made by scripts/lock.py (make lock); do not edit\n{first}"
    (ROOT / name).write_text(head + "".join(n + RANGES.get(n, f"=={v}") + "\n" for n, v in sorted(pins.items())))
    print(f"{name}: {len(pins)} packages")


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    run = closure([*project["dependencies"], *extras["report"], *extras["data"], "setuptools", "wheel"])
    test = closure([*extras["test"], *extras["flower"], *extras["grpc"]])
    write("requirements.lock", run)
    write("requirements-test.lock", {n: v for n, v in test.items() if n not in run}, "-r requirements.lock\n")
    docs = closure(extras["docs"])
    write("requirements-docs.lock", {n: v for n, v in docs.items() if n not in run}, "-r requirements.lock\n")


if __name__ == "__main__":
    main()
