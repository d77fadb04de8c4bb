"""Replies that do not come to their end hold up nobody else: Flower waits for them longer than a run may."""

import threading
import time

import pytest
from grid import LocalGrid

from fedselect.network.flower.apps import GridNodes, to_record
from fedselect.network.flower.pulls import ABREAST, MOST, Pulls
from fedselect.network.letters import Letter


class Stuck:
    """Replies by number; pulling one of `stuck` waits until it is let go, as for a node that died as it sent it."""

    def __init__(self, replies, stuck=()):
        self.replies, self.stuck, self.free = dict(replies), set(stuck), threading.Event()
        self.most, self._now, self._lock = 0, 0, threading.Lock()

    def pull(self, numbers):
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        if self.stuck & set(numbers):
            self.free.wait(20)
        with self._lock:
            self._now -= 1
        return [self.replies.pop(n) for n in numbers if n in self.replies]


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr("fedselect.network.flower.pulls.MOMENT", 0.02)
    monkeypatch.setattr("fedselect.network.flower.pulls.POLL", 0.01)


def test_others_come_while_one_is_stuck_and_it_is_left_when_its_time_is_over(quick):
    grid, left = Stuck({str(i): i for i in range(5)}, stuck={"0"}), {str(i) for i in range(5)}
    assert list(Pulls(grid.pull).until(time.monotonic() + 0.5, left)) == [(str(i), i) for i in range(1, 5)]
    assert left == {"0"}
    grid.free.set()


def test_a_slow_reply_is_not_lost(quick):
    grid, left = Stuck({"0": "slow", "1": "fast"}, stuck={"0"}), {"0", "1"}
    found = Pulls(grid.pull).until(time.monotonic() + 20, left)
    assert next(found) == ("1", "fast")
    grid.free.set()
    assert list(found) == [("0", "slow")]
    assert not left


def test_one_at_a_time_while_they_come_quickly_and_never_more_than_a_few():
    grid, left = Stuck({str(i): i for i in range(40)}), {str(i) for i in range(40)}
    assert len(list(Pulls(grid.pull).until(time.monotonic() + 20, left))) == 40
    assert grid.most == 1


def test_memory_is_bounded_where_many_are_stuck(quick):
    numbers = {str(i) for i in range(2 * ABREAST)}
    grid = Stuck({n: n for n in numbers}, stuck=numbers)
    assert not list(Pulls(grid.pull).until(time.monotonic() + 0.3, set(numbers)))
    assert grid.most == ABREAST
    grid.free.set()


def test_many_that_died_as_they_sent_keep_nobody_else_from_being_heard(quick, monkeypatch):
    """More than may be pulled at once, and first in line; those that are alive come, and the rest is left at the deadline."""
    monkeypatch.setattr("fedselect.network.flower.pulls.LONG", 0.2)
    dead, alive = {f"a{i}" for i in range(ABREAST + 3)}, {f"b{i}" for i in range(4)}
    grid, left = Stuck({n: n for n in dead | alive}, stuck=dead), dead | alive
    began = time.monotonic()
    assert {n for n, _ in Pulls(grid.pull).until(began + 2, left)} == alive
    assert left == dead
    assert time.monotonic() < began + 2 + 5
    assert grid.most <= MOST
    grid.free.set()


def test_an_error_while_pulling_is_raised_where_it_is_waited_for(quick):
    def fails(numbers):
        raise ConnectionError("the SuperLink is gone")

    with pytest.raises(ConnectionError, match="the SuperLink is gone"):
        list(Pulls(fails).until(time.monotonic() + 20, {"0"}))


def test_a_node_that_dies_while_it_sends_misses_the_round_alone(quick, monkeypatch):
    """Over Flower's messages: the first node's reply has begun to come, and never ends."""
    free = threading.Event()

    class Half(LocalGrid):
        def push_messages(self, messages):
            (message,) = messages
            message.metadata.__dict__["_message_id"] = message.object_id
            self.replies[message.object_id] = message
            return [message.object_id]

        def pull_messages(self, message_ids):
            if any(self.replies[i].metadata.dst_node_id == 100 for i in message_ids):
                free.wait(20)
            return [self.replies[i] for i in message_ids]

    monkeypatch.setattr("fedselect.network.flower.apps._read", lambda message: message.metadata.dst_node_id)
    nodes = GridNodes(Half({100 + i: {} for i in range(3)}, {}))
    letters = [(100 + i, Letter({"kind": "hello"})) for i in range(3)]
    assert to_record(letters[0][1])
    found = list(nodes.ask(letters, 0.5))
    assert sorted(found[:2]) == [(101, 101), (102, 102)]
    assert found[2:] == [(100, "no reply within 0.5 s")]
    free.set()
