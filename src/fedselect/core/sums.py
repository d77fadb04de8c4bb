"""Checksums that JSON carries with it: a bit that flipped on a disk is named when the text is read, and never used.

The last entry of a file or of a line is "crc32", the checksum of all before it. Text of earlier versions has none and is
taken as it is. Of a file the checksum is over its values, so that it may be indented otherwise; of a line over its bytes,
which is as fast as reading. Whoever edits a file by hand deletes the entry.
"""

import json
import re
import zlib
from collections.abc import Mapping
from typing import Any

KEY = "crc32"
_SEAL = re.compile(rb', "' + KEY.encode() + rb'": "[0-9a-f]{8}"}')
_LENGTH = len(f', "{KEY}": "00000000"}}')
EDITED = f'it does not match its checksum, so it is damaged, or was edited by hand: then delete its entry "{KEY}"'


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """A table of fields with its checksum."""
    return {**value, KEY: _of(json.dumps(value).encode())}


def opened(found: Mapping[str, Any]) -> dict[str, Any]:
    """A table of fields without its checksum, if it has one; ValueError where they do not match."""
    said = dict(found)
    key = KEY if KEY in said else next(reversed(said), KEY)
    told = said.pop(key, None)
    right = told == _of(json.dumps(said).encode())
    if key == KEY and told is not None and not right:
        raise ValueError(EDITED)
    if key != KEY and right:  # what flipped is the name of the checksum
        raise ValueError(EDITED)
    return said if key == KEY else dict(found)


def to_line(record: Mapping[str, Any]) -> str:
    """A record as a line of a file, its checksum last."""
    text = json.dumps(record)
    return f'{text[:-1]}, "{KEY}": "{_of(text.encode())}"}}\n'


def from_line(line: bytes) -> Any:
    """What a line holds, without its checksum; ValueError where they do not match."""
    found = json.loads(line)
    right = line[-10:-2].decode(errors="replace") == _of(line[:-_LENGTH] + b"}")
    if _SEAL.fullmatch(line[-_LENGTH:]) and right:
        del found[KEY]
    elif right or (isinstance(found, dict) and KEY in found):
        raise ValueError("it does not match its checksum")
    return found


def lines(content: bytes) -> list[bytes]:
    """The lines of a file that is being written: half a line at its end is left out, one that only lacks its end is not."""
    *whole, rest = content.split(b"\n")
    return [*whole, rest] if _SEAL.search(rest) else whole


def _of(text: bytes) -> str:
    return f"{zlib.crc32(text):08x}"
