"""Dotted names by pattern: conv1.weight, layer4 for all that is inside, * for anything."""

import re
from collections.abc import Iterable


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a pattern matches, as they are or as parts of what it matches."""
    regex = re.compile(".*".join(map(re.escape, pattern.split("*"))) + r"(\..*)?")
    return [n for n in names if regex.fullmatch(n)]


def some(names: Iterable[str], most: int = 12) -> str:
    """Names for a sentence: the first ones, and how many there are beside them."""
    found = list(names)
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")
