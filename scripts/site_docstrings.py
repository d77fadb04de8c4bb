"""griffe extension: lines `name: meaning` at the end of a docstring, which the program reads as the meanings of options, become
the table of parameters on the site."""

import re
from typing import Any

import griffe

LINE = re.compile(r"^(\w+(?:, \w+)*): (.+)$")


class Meanings(griffe.Extension):
    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        names = {n for n, m in cls.members.items() if m.is_attribute}
        self._told(cls, names)

    def on_function_instance(self, *, func: griffe.Function, **kwargs: Any) -> None:
        self._told(func, {p.name for p in func.parameters})

    def _told(self, thing: griffe.Object, names: set[str]) -> None:
        if thing.docstring is None:
            return
        kept, told = [], []
        for line in thing.docstring.value.splitlines():
            found = LINE.match(line)
            if found and {n.strip() for n in found[1].split(",")} <= names:
                told += [f"    {name.strip()}: {found[2]}" for name in found[1].split(",")]
            elif told and line.startswith("    ") and line.strip():
                told.append(f"    {line}")
            else:
                kept.append(line)
        if told:
            thing.docstring.value = "\n".join(kept).rstrip() + "\n\nArgs:\n" + "\n".join(told)
