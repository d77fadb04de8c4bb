"""The examples as their pages tell them: what a test runs is what a reader would type, in a folder of its own."""

import re
import shlex
from itertools import pairwise
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"
KINDS = ("audio", "multilabel", "pictures", "regression", "sensor", "tabular", "text")
MAIN = "from fedselect.cli import main; main()"


class Page:
    """What an example tells its reader to type."""

    def __init__(self, kind: str) -> None:
        self.kind, self.page = kind, (EXAMPLES / kind / "README.md").read_text(encoding="utf-8")

    def commands(self, *words: str) -> list[list[str]]:
        """The arguments of the page's commands that begin with these words, in their order."""
        lines = re.findall(rf"^fedselect ({' '.join(words)}\b.*)$", self.page, re.M)
        assert lines, f"examples/{self.kind}/README.md has no command: fedselect {' '.join(words)}"
        return [shlex.split(line, comments=True) for line in lines]

    def command(self, *words: str) -> list[str]:
        (found,) = self.commands(*words)
        return found


class Example(Page):
    """One example in a new folder, its data made; `fork` starts processes, which keep plugins out of this one."""

    def __init__(self, kind: str, folder: Path, fork) -> None:
        super().__init__(kind)
        self.folder, self._fork = folder, fork
        for file in (EXAMPLES / kind).glob("*.py"):
            (folder / file.name).write_bytes(file.read_bytes())
        self.python("import data; data.main()")
        (folder / "runs").mkdir()

    def python(self, code: str, *args: object) -> str:
        process = self._fork(code, *args, cwd=self.folder)
        out, err = process.communicate()
        assert process.returncode == 0, err
        return out

    def run(self, *args: object) -> str:
        """What a command prints."""
        return self.python(MAIN, *args)


def options(args: list[str]) -> dict[str, str]:
    """The options among these arguments, each with what follows it."""
    return {name: value for name, value in pairwise([*args, ""]) if name.startswith("--")}


def with_option(args: list[str], name: str, value: object) -> list[str]:
    """The same arguments with another value of an option, or with it."""
    if name not in args:
        return [*args, name, str(value)]
    at = args.index(name)
    return [*args[: at + 1], str(value), *args[at + 2 :]]


def without(args: list[str], *names: str) -> list[str]:
    """The same arguments without these options and their values."""
    for name in names:
        if name in args:
            at = args.index(name)
            args = args[:at] + args[at + 2 :]
    return args
