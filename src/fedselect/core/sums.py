"""Checksums inside JSON: a bit that flipped on disk is reported when the text is read, and the text is never used.

The last entry of a file or line is "crc32", the checksum of everything before it. Text of earlier versions has none and is
accepted. For a file the checksum covers its values, so that it may be indented differently; for a line it covers its bytes,
which is as fast as reading. After editing a file by hand, delete the entry.
"""

import json
import re
import zlib
from collections.abc import Mapping
from typing import Any

KEY = "crc32"
_SEAL = re.compile(rb', "' + KEY.encode() + rb'": "[0-9a-f]{8}"}')
_LENGTH = len(f', "{KEY}": "00000000"}}')
EDITED = f'it does not match its checksum, so it is damaged; if you edited it by hand, delete its entry "{KEY}"'


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """A table of fields with its checksum."""
    return {**value, KEY: _of(json.dumps(value).encode())}


def opened(found: Mapping[str, Any]) -> dict[str, Any]:
    """A table of fields without its checksum, if it has one; ValueError if they do not match."""
    said = dict(found)
    key = KEY if KEY in said else next(reversed(said), KEY)
    told = said.pop(key, None)
    right = told == _of(json.dumps(said).encode())
    if key == KEY and told is not None and not right:
        raise ValueError(EDITED)
    if key != KEY and right:  # the bit flipped in the checksum's key
        raise ValueError(EDITED)
    return said if key == KEY else dict(found)


def to_line(record: Mapping[str, Any]) -> str:
    """A record as a line of a file, with its checksum last."""
    text = json.dumps(record)
    return f'{text[:-1]}, "{KEY}": "{_of(text.encode())}"}}\n'


def from_line(line: bytes) -> Any:
    """The record in a line, without its checksum; ValueError if they do not match."""
    found = json.loads(line)
    right = line[-10:-2].decode(errors="replace") == _of(line[:-_LENGTH] + b"}")
    if _SEAL.fullmatch(line[-_LENGTH:]) and right:
        del found[KEY]
    elif right or (isinstance(found, dict) and KEY in found):
        raise ValueError("it does not match its checksum")
    return found


def lines(content: bytes) -> list[bytes]:
    """The lines of a file that is still being written, without an incomplete last line; a missing newline is fine."""
    *whole, rest = content.split(b"\n")
    return [*whole, rest] if _SEAL.search(rest) else whole


def _of(text: bytes) -> str:
    return f"{zlib.crc32(text):08x}"
