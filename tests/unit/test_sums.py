"""Checksums that JSON carries with it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedselect.core import sums
from fedselect.core.errors import InputError, RunError
from fedselect.core.files import read_json, write_json
from fedselect.runs import config

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
TABLES = st.dictionaries(st.text(max_size=8).filter(lambda k: k != "crc32"), VALUES, min_size=1, max_size=4)


@given(TABLES)
def test_what_was_sealed_comes_back(value):
    assert sums.opened(json.loads(json.dumps(sums.sealed(value), indent=2))) == value
    assert sums.from_line(sums.to_line(value).encode()[:-1]) == value


@given(TABLES, st.data())
def test_a_changed_byte_is_seen_wherever_it_is(value, data):
    line = bytearray(sums.to_line(value).encode()[:-1])
    at = data.draw(st.integers(0, len(line) - 1))
    line[at] = data.draw(st.integers(0, 255).filter(lambda b: b != line[at]))
    with pytest.raises(ValueError):  # noqa: PT011 (of JSON, of UTF-8, or of the checksum)
        sums.from_line(bytes(line))


def test_what_earlier_versions_wrote_is_read_as_it_is(tmp_path):
    assert sums.from_line(b'{"round": 1, "share": "AAA="}') == {"round": 1, "share": "AAA="}
    (tmp_path / "a.json").write_text('{"b": "00000000"}')
    assert read_json(tmp_path / "a.json", "") == {"b": "00000000"}


def test_a_file_may_be_indented_otherwise(tmp_path):
    write_json(tmp_path / "a.json", {"b": [1, 2.5, None], "c": {"d": "é"}})
    (tmp_path / "a.json").write_text(json.dumps(json.loads((tmp_path / "a.json").read_text()), ensure_ascii=False))
    assert read_json(tmp_path / "a.json", "") == {"b": [1, 2.5, None], "c": {"d": "é"}}


def test_a_file_edited_by_hand_is_refused_until_its_checksum_is_deleted(tmp_path):
    path = tmp_path / "config.json"
    write_json(path, {"seed": 1, "rounds": 2})
    path.write_text(path.read_text().replace('"seed": 1', '"seed": 3'))
    with pytest.raises(RunError, match=r'config.json cannot be used .* edited it by hand, delete its entry "crc32"'):
        read_json(path, "put it back.")
    with pytest.raises(InputError, match='delete its entry "crc32"'):
        config.read(path)
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "crc32"}))
    assert read_json(path, "") == config.read(path) == {"seed": 3, "rounds": 2}


def test_of_a_growing_file_half_a_line_is_left_out_and_a_whole_one_is_not():
    one, two = ({"round": i, "x": "y" * 9} for i in (1, 2))
    whole = (sums.to_line(one) + sums.to_line(two)).encode()
    for cut in range(len(whole)):
        found = sums.lines(whole[:cut])
        assert [sums.from_line(line) for line in found] == [one, two][: len(found)]
        assert len(found) == (cut >= len(sums.to_line(one)) - 1) + (cut >= len(whole) - 1)
