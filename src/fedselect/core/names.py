"""Dotted names by pattern: conv1.weight, layer4 for everything inside it, * for anything."""

import re
from collections.abc import Iterable


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a pattern matches, directly or as parts of a module that it matches."""
    regex = re.compile(".*".join(map(re.escape, pattern.split("*"))) + r"(\..*)?")
    return [n for n in names if regex.fullmatch(n)]


def some(names: Iterable[str], most: int = 12) -> str:
    """Names for a sentence: the first ones, and how many more there are."""
    found = list(names)
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")
