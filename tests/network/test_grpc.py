"""The gRPC engine over real connections on loopback: letters in pieces, who is let in, and callers that die, hang or lie."""

import shutil
import threading
import time
from contextlib import contextmanager
from io import BytesIO

import grpc
import pytest
import torch
from calls import SHAPE, call, connected, make_site, opened
from children import until
from hypothesis import given
from hypothesis import strategies as st

from fedselect.core.errors import DataError, InputError, RunError
from fedselect.core.files import locked
from fedselect.network.desk import Desk
from fedselect.network.grpc import line, requests, wire
from fedselect.network.grpc.hub import HubNodes
from fedselect.network.grpc.launch import _logged
from fedselect.network.grpc.line import Caller, dialled
from fedselect.network.grpc.wire import HEAD, Parcel
from fedselect.network.home import Home
from fedselect.network.identity import node_identity
from fedselect.network.letters import Letter, refusal
from fedselect.network.plan import Plan, plan
from fedselect.network.reach import check_server
from fedselect.network.rounds import Limits
from fedselect.network.site import Site
from fedselect.runs.config import Config

LONG = 120.0  # seconds for replies that come, or whose lack is noticed, long before
QUESTION = Letter({"kind": "anything"}, {"x": torch.arange(6.0)})


class Echo(Desk):
    """Sends back what it gets, and counts the plans."""

    plans = 0

    def take(self, flat):
        self.plans += 1

    def answer(self, letter):
        return letter


def echo(folder, i):
    return Echo(Home(i, folder / f"vault-{i}"))


def nodes(switch, go_on=lambda: None):
    return HubNodes(switch, Letter({"plan": {}}), go_on)


def same(a, b):
    return a.head == b.head and list(a.parts) == list(b.parts) and all(torch.equal(a.parts[n], b.parts[n]) for n in a.parts)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_site(tmp_path_factory.mktemp("made") / "site", 2)


@pytest.fixture
def root(made, tmp_path):
    return shutil.copytree(made, tmp_path / "site")


# ---- letters as frames


@given(sizes=st.lists(st.integers(0, 40), max_size=4), piece=st.integers(1, 50), note=st.text(max_size=20))
def test_a_letter_arrives_as_it_was_sent_in_pieces_of_any_size(tmp_path_factory, sizes, piece, note):
    letter = Letter({"note": note}, {f"t{i}": torch.arange(n, dtype=torch.int64) for i, n in enumerate(sizes)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "PIECE", piece)
        frames = list(Parcel.of(7, letter, BytesIO()).frames())
    assert all(len(f) <= piece for f in frames[1:])
    stream = iter([*frames, *frames])  # one letter after the other
    for _ in range(2):
        parcel = Parcel.take(stream, lambda number: BytesIO(), 10_000)
        assert parcel.number == 7
        assert same(parcel.open(), letter)
    assert Parcel.take(stream, None, 0) is None


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ([b"x"], "has no fedselect content"),
        ([HEAD.pack(1, 10, 91)], "a message has 101 bytes; at most 100 are allowed"),
        ([HEAD.pack(1, 2**63, 2**63)], "at most 100"),
        ([HEAD.pack(1, 2, 8), b"{}"], "does not have the 10 bytes that it announced"),
        ([HEAD.pack(1, 2, 8), b""], "does not have the 10 bytes that it announced"),
        ([HEAD.pack(1, 2, 8), b"0123456789x"], "does not have the 10 bytes that it announced"),
        ([HEAD.pack(1, 2, 0), b"\xff\xff"], "cannot be read"),
        ([HEAD.pack(1, 2, 0), b"{}"], "cannot be read"),
        ([HEAD.pack(1, 0, 0)], "cannot be read"),
    ],
)
def test_frames_that_are_no_letter(frames, text):
    with pytest.raises(DataError, match=text):
        Parcel.take(iter(frames), lambda number: BytesIO(), 100).open()


# ---- carrying letters


def test_each_client_gets_its_letter_and_its_reply_is_its_own(root, tmp_path):
    """Of any kind, larger than a piece, and in several rounds over one connection."""
    with connected(root, desks := [echo(tmp_path, i) for i in (0, 1)]) as switch:
        one_run = nodes(switch)
        assert one_run.present() == [0, 1]
        assert requests.CONNECTED in {p.name for p in (root / "server").iterdir()}
        for turn in range(3):
            sent = {i: Letter({"kind": f"kind {turn}"}, {"x": torch.full((500_000,), i + turn)}) for i in (0, 1)}
            found = dict(one_run.ask(iter(sent.items()), LONG))
            assert all(same(found[i], sent[i]) for i in (0, 1))
        assert [desk.plans for desk in desks] == [1, 1]
        assert not [p for p in (root / "server").iterdir() if p.name.startswith("tmp")]


def test_who_is_not_connected_could_not_be_reached(root, tmp_path):
    with connected(root, [echo(tmp_path, 1)]) as switch:
        found = dict(nodes(switch).ask([(0, QUESTION), (1, QUESTION)], LONG))
    assert found[0] == "could not be reached"
    assert same(found[1], QUESTION)


def test_a_run_that_is_to_stop_stops_while_it_waits(root, tmp_path):
    answered = threading.Event()

    class Slow(Echo):
        def answer(self, letter):
            answered.wait()
            return letter

    looks = iter(range(3))

    def go_on():
        if next(looks, None) is None:
            raise KeyboardInterrupt

    with connected(root, [Slow(Home(0, tmp_path))]) as switch:
        with pytest.raises(KeyboardInterrupt):
            list(nodes(switch, go_on).ask([(0, QUESTION)], LONG))
        answered.set()  # too late: nobody waits for it, and the next question is answered
        assert same(dict(nodes(switch).ask([(0, QUESTION)], LONG))[0], QUESTION)


def test_a_client_that_fails_says_so_and_stays(root, tmp_path):
    class Failing(Echo):
        def answer(self, letter):
            raise ZeroDivisionError("no samples")

    with connected(root, [Failing(Home(0, tmp_path))]) as switch:
        for _ in range(2):
            assert dict(nodes(switch).ask([(0, QUESTION)], LONG)) == {0: "raised an error: ZeroDivisionError: no samples"}


# ---- callers that die, hang or lie


@contextmanager
def caller(root, i, act):
    """A client in a thread that does something of its own with the first letter it gets: act(line, number)."""
    failed = []

    def work():
        with dialled(root / f"client-{i}", Site.read(root), i) as phone:
            for number, _letter in phone.letters():
                if number:
                    try:
                        act(phone, number)
                    except grpc.RpcError as e:
                        failed.append(e.code())
                    return

    thread = threading.Thread(target=work)
    thread.start()
    yield failed
    thread.join()


def half(number):
    """The beginning of a reply."""
    yield HEAD.pack(number, 10, 10)
    yield b"12345"


@pytest.mark.parametrize("sent", [False, True], ids=["in training", "in its upload"])
def test_a_client_that_dies_is_noticed_at_once(root, sent):
    never, uploads = threading.Event(), []

    def hanging(number):
        yield from half(number)
        never.wait()

    def die(phone, number):
        if sent:
            uploads.append(phone._answer.future(hanging(number), metadata=phone._who))
            until(lambda: switch._uploads)

    with opened(root) as switch, caller(root, 0, die):
        until(lambda: switch.present() == [0])
        assert dict(nodes(switch).ask([(0, QUESTION)], LONG)) == {0: "is disconnected"}
        assert switch.present() == []
        never.set()


def test_an_upload_that_does_not_end_is_cut_off_when_time_is_up(root):
    never = threading.Event()

    def hang(phone, number):
        def frames():
            yield from half(number)
            never.wait()

        phone.send(frames())

    with opened(root) as switch, caller(root, 0, hang) as failed:
        until(lambda: switch.present() == [0])
        assert dict(nodes(switch).ask([(0, QUESTION)], 0.5)) == {0: "no reply within 0.5 s"}
        until(lambda: failed)
        never.set()
    assert failed == [grpc.StatusCode.CANCELLED]


def test_a_reply_to_anothers_letter_is_not_taken(root, tmp_path):
    def lie(phone, number):
        for other in (number - 1, number + 1, 10**9):
            with pytest.raises(grpc.RpcError, match="no longer waits for this reply"):
                phone.send(iter([HEAD.pack(other, 0, 0)]))

    wait = threading.Event()

    class Slow(Echo):
        def answer(self, letter):
            wait.wait()
            return letter

    with connected(root, [Slow(Home(0, tmp_path))]) as switch:
        with caller(root, 1, lie):
            until(lambda: switch.present() == [0, 1])
            replies = nodes(switch).ask([(0, QUESTION), (1, QUESTION)], LONG)
            assert next(replies) == (1, "is disconnected")
        wait.set()
        assert same(dict(replies)[0], QUESTION)


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ([], "the reply is not a fedselect message"),
        ([lambda n: b"hello"], "the message has no fedselect content"),
        ([lambda n: HEAD.pack(n, 1, 1 << 40)], "bytes; at most"),
        ([lambda n: HEAD.pack(n, 2, 0), lambda n: b"[]"], "a message cannot be read"),
        ([lambda n: HEAD.pack(n, 5, 0), lambda n: b"123"], "does not have the 5 bytes"),
    ],
)
def test_a_reply_that_is_no_letter_is_turned_away(root, frames, text):
    with opened(root) as switch, caller(root, 0, lambda phone, number: phone.send(iter([f(number) for f in frames]))):
        until(lambda: switch.present() == [0])
        ((client, reply),) = nodes(switch).ask([(0, QUESTION)], LONG)
        assert client == 0
        assert isinstance(reply, DataError)
        assert text in str(reply)


def test_a_client_sends_one_reply_at_a_time(root):
    never = threading.Event()

    def twice(phone, number):
        def frames():
            yield from half(number)
            never.wait()

        first = phone._answer.future(frames(), metadata=phone._who)
        until(lambda: switch._uploads)
        with pytest.raises(grpc.RpcError, match="two replies at once"):
            phone.send(half(number))
        never.set()
        first.cancel()

    with opened(root) as switch, caller(root, 0, twice):
        until(lambda: switch.present() == [0])
        assert len(dict(nodes(switch).ask([(0, QUESTION)], LONG))) == 1


# ---- who is let in


def refused(root, i=0, sleep=lambda seconds: None):
    said = []
    with pytest.raises(RunError) as error:
        Caller(root / f"client-{i}", Site.read(root), Echo(Home(i, root / "vault")), said.append, sleep).work()
    return str(error.value), said


@pytest.mark.parametrize("key", ["another", "none"])
def test_a_key_that_the_server_does_not_know_is_refused_by_name(root, key):
    keys = root / "server" / "keys"
    (keys / "client-0.pub").write_bytes((keys / "client-1.pub").read_bytes() if key == "another" else b"")
    news = []
    with opened(root, news) as switch:
        assert "does not know the key of CN=client 0" in refused(root)[0]
        assert switch.present() == []
    assert any("refused a call from ipv4:127.0.0.1:" in text and "CN=client 0" in text for text in news)


def test_a_second_copy_is_refused_while_the_first_is_connected(root, tmp_path, monkeypatch):
    monkeypatch.setattr(line, "RETRY", 0.0)
    with connected(root, [echo(tmp_path, 0)]) as switch:
        why, said = refused(root)
        assert why == "another copy of this client is connected to the server; stop it."
        assert [text for text in said if "still counts this client as connected" in text]
        assert same(dict(nodes(switch).ask([(0, QUESTION)], LONG))[0], QUESTION)


def test_a_client_of_another_authority_is_refused(root, tmp_path):
    """Whatever it copied: the server's certificate shows whose site it is, and the server asks for the client's."""
    other = make_site(tmp_path / "other", 2)
    part, known = root / "client-0", Site.read(root)
    with opened(root) as switch:
        check_server(part, known, b"".join(node_identity(part)))
        with pytest.raises(InputError, match="shows a certificate that"):
            check_server(other / "client-0", known, b"".join(node_identity(other / "client-0")))
        with pytest.raises(InputError, match="refuses the certificate"):
            check_server(part, known, b"".join(node_identity(other / "client-0")))
        credentials = grpc.ssl_channel_credentials((part / "ca.crt").read_bytes())  # and no certificate of its own
        options = [("grpc.enable_http_proxy", 0)]
        with grpc.secure_channel(known.address, credentials, options) as channel, pytest.raises(grpc.RpcError) as error:
            next(line.Line(channel, 0).letters())
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert switch.present() == []
    shutil.copy(other / "client-0" / "node.key", part / "node.key")
    with pytest.raises(InputError, match=r"node\.crt does not match node\.key"):
        node_identity(part)


def test_another_version_is_refused(root, monkeypatch):
    with opened(root):
        monkeypatch.setattr(line, "PROTOCOL", 99)
        assert "the server runs another version of fedselect" in refused(root)[0]


@pytest.mark.parametrize("number", ["2", "-1", "x"])
def test_without_keys_a_client_must_be_one_of_the_sites(tmp_path, number):
    root = make_site(tmp_path / "site", 2, insecure=True)
    with opened(root), dialled(root / "client-0", Site.read(root), 0) as phone:
        phone._who = (*phone._who[:1], ("client", number))
        with pytest.raises(grpc.RpcError, match="does not know the key of client"):
            next(phone.letters())


def test_without_keys_letters_travel_too(tmp_path):
    root = make_site(tmp_path / "site", 2, insecure=True)
    with connected(root, [echo(tmp_path, i) for i in (0, 1)]) as switch:
        assert all(same(reply, QUESTION) for _, reply in nodes(switch).ask([(0, QUESTION), (1, QUESTION)], LONG))


# ---- calling again


def test_a_client_calls_again_and_says_when_the_server_is_gone_and_back(root, tmp_path):
    said, done = [], threading.Event()

    def sleep(seconds):
        if done.is_set():
            raise KeyboardInterrupt
        time.sleep(0.01)

    client = call(root, echo(tmp_path, 0), said, sleep)  # before the server is up
    until(lambda: said)
    for _ in range(2):
        with opened(root) as switch:
            until(lambda: switch.present() == [0])
            assert same(dict(nodes(switch).ask([(0, QUESTION)], LONG))[0], QUESTION)
    done.set()
    client.join()
    address = Site.read(root).address
    assert said[0] == f"waiting for the server at {address}"
    assert said[1] == "client 0 is connected to the server"
    assert said[2].startswith(f"the server at {address} no longer answers (")
    assert said[3] == f"the server at {address} answers again"


def test_a_client_makes_ready_for_a_run_once(tmp_path, monkeypatch):
    made, count = Plan.assignment, []
    monkeypatch.setattr(Plan, "assignment", lambda self, device: count.append(self.run) or made(self, device))
    data = {"name": "digits", "clients": 2, "train": 10, "test": 4, "val": 0}
    config = Config.from_dict({"data": data, "model": {"name": "mlp", "hidden": 4}}, "test")
    desk = Desk(Home(0, tmp_path / "vault", device="cpu"))
    for run, letters in (("a", 3), ("a", 1), ("b", 2)):  # the same plan again, as after a broken line, and another run's
        agreed = plan(config, "f", run, 2, SHAPE, Limits())
        desk.take(agreed.to_flat())
        count.clear()
        for _ in range(letters):
            hello = Letter({"kind": "hello", "federation": "f", "run": run, "plan": agreed.digest(), "accepted": [0, 0]})
            assert desk.answer(hello).head["kind"] == "hello"
        assert count == ([] if letters == 1 else [run])


# ---- runs that are asked for


def test_a_run_is_asked_for_and_taken_once(tmp_path):
    (tmp_path / "runs" / "a").mkdir(parents=True)
    assert requests.taken(tmp_path) is None
    requests.start(tmp_path, "a")
    assert requests.taken(tmp_path) == "a"
    assert requests.taken(tmp_path) is None
    assert not requests.stopped(tmp_path, "a")
    requests.stop(tmp_path, "a")
    assert requests.stopped(tmp_path, "a")
    assert not requests.stopped(tmp_path, "b")
    requests.start(tmp_path, "a")  # resumed
    assert not requests.stopped(tmp_path, "a")
    requests.stop(tmp_path, "a")  # before it was taken
    assert requests.taken(tmp_path) is None


def test_one_run_at_a_time(tmp_path):
    with locked(tmp_path / "runs" / "a"), pytest.raises(RunError, match="a is still running; wait for its end"):
        requests.start(tmp_path, "b")
    requests.start(tmp_path, "b")
    requests.clear(tmp_path)  # a server that starts anew
    assert requests.taken(tmp_path) is None


def test_what_cannot_be_logged_is_still_said(tmp_path):
    said = []
    tell = _logged(tmp_path / "log.txt", said.append)
    tell("one")
    (tmp_path / "log.txt").rename(tmp_path / "before")
    (tmp_path / "log.txt").mkdir()  # as on a full disk: opening it fails
    tell("two")
    assert said == ["one", "two"]
    assert (tmp_path / "before").read_text().endswith(" one\n")


def test_a_client_says_once_why_it_cannot_take_part(tmp_path):
    """The server tells its own operator; this one has only the client's output."""
    said, answers = [], iter([refusal("the disk is full"), refusal("the disk is full"), QUESTION, QUESTION])

    class Full(Echo):
        def answer(self, letter):
            return next(answers)

    caller = Caller(tmp_path, None, Full(Home(0, tmp_path)), said.append)
    for _ in range(4):
        caller._reply(QUESTION)
    assert said == ["this client cannot take part: the disk is full", "this client takes part again"]
