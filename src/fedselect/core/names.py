"""Names of parameters by pattern (conv1.weight, layer4 for everything inside it, * for anything), and names of clients."""

import re
from collections.abc import Iterable, Sequence
from numbers import Integral

from fedselect.core.errors import InputError, nearest


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a pattern matches, directly or as parts of a module that it matches."""
    regex = re.compile(".*".join(map(re.escape, pattern.split("*"))) + r"(\..*)?")
    return [n for n in names if regex.fullmatch(n)]


def some(names: Iterable[str], most: int = 12) -> str:
    """Names for a sentence: the first ones, and how many more there are."""
    found = list(names)
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")


def client_number(client: int | str, names: Sequence[str]) -> int:
    """The number of a client given by number or name. `names`: of all clients, in order.

    A text is a name if a client has it, otherwise a number, otherwise a name in other letters: "Village" for "village".
    """
    if isinstance(client, str):
        alike = [i for i, name in enumerate(names) if name == client]
        if not alike and client.isdecimal():
            return client_number(int(client), names)
        alike = alike or [i for i, name in enumerate(names) if name.casefold() == client.casefold()]
        if not alike:
            near = nearest(client, names)
            said = f"did you mean {' or '.join(map(repr, near))}?" if near else f"choose one of {some(names, 10)}."
            raise InputError(f"there is no client {client!r}; {said}")
        if len(alike) > 1:
            raise InputError(f"several clients are called {client!r}; use their numbers.")
        return alike[0]
    if not isinstance(client, Integral) or not 0 <= client < len(names):
        raise InputError(f"there is no client {client}; choose one of 0 to {len(names) - 1}.")
    return int(client)


def client_said(number: int, names: Sequence[str]) -> str:
    """A client in words, with its number if it has a name."""
    name = names[number]
    return f"client {number}" if name == str(number) else f"client {name} (number {number})"
