"""Downloads from a server of our own that cuts, lies and refuses."""

import hashlib
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fedselect.core.errors import DataError, InputError
from fedselect.data import fetch as module
from fedselect.data.fetch import BY_HAND, REMOTE, Remote, fetch
from fedselect.data.places import find, places

CONTENT = bytes(range(256)) * 4000  # 1 MB
FILE = "set.tar.gz"


class Server:
    """Serves CONTENT; `ranges` honours Range, `cut` ends each answer after that many bytes, `code` refuses."""

    def __init__(self):
        self.ranges, self.cut, self.code, self.content, self.length, self.asked = True, None, None, CONTENT, True, []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.answer(self)

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()

    def answer(self, request):
        wanted = request.headers.get("Range")
        self.asked.append(wanted)
        if self.code:
            request.send_error(self.code)
            return
        start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1]) if wanted and self.ranges else 0
        if start >= len(self.content):
            request.send_response(416)
            request.send_header("Content-Range", f"bytes */{len(self.content)}")
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        body = self.content[start:]
        request.send_response(206 if start else 200)
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(self.content) - 1}/{len(self.content)}")
        if self.length:
            request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body[: self.cut])

    def close(self):
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def server(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "PAUSE_S", 0.0)
    monkeypatch.setattr(module, "CHUNK", 1 << 16)
    running = Server()
    url = f"http://127.0.0.1:{running.http.server_port}/{FILE}"
    monkeypatch.setitem(REMOTE, "cifar10", Remote(url, hashlib.md5(CONTENT).hexdigest(), "1 MB"))
    yield running
    running.close()


def there(folder):
    return sorted(p.name for p in folder.iterdir() if not p.name.endswith(".lock"))


def test_downloads_checks_and_reports(server, tmp_path):
    seen = []
    got = fetch("cifar10", tmp_path / "new", lambda done, total: seen.append((done, total)))
    assert got == tmp_path / "new" / FILE
    assert got.read_bytes() == CONTENT
    assert seen[0] == (0, len(CONTENT))
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert there(tmp_path / "new") == [FILE]


def test_a_server_that_does_not_say_how_long(server, tmp_path):
    server.length = False
    seen = []
    assert fetch("cifar10", tmp_path, lambda done, total: seen.append(total)).read_bytes() == CONTENT
    assert set(seen) == {None}


def test_what_is_there_is_checked_not_fetched(server, tmp_path):
    (tmp_path / FILE).write_bytes(CONTENT)
    fetch("cifar10", tmp_path)
    assert server.asked == []


def test_a_damaged_file_that_is_there_is_named_and_kept(server, tmp_path):
    (tmp_path / FILE).write_bytes(b"mine")
    with pytest.raises(DataError, match=rf"{FILE} is damaged.*delete it, then fetch again"):
        fetch("cifar10", tmp_path)
    assert (tmp_path / FILE).read_bytes() == b"mine"


@pytest.mark.parametrize("ranges", [True, False])
def test_goes_on_where_it_stopped_or_starts_again(server, tmp_path, ranges):
    server.ranges = ranges
    (tmp_path / f"{FILE}.part").write_bytes(CONTENT[:300_000])
    seen = []
    assert fetch("cifar10", tmp_path, lambda done, total: seen.append(done)).read_bytes() == CONTENT
    assert server.asked == ["bytes=300000-"]
    assert seen[0] == (300_000 if ranges else 0)
    assert there(tmp_path) == [FILE]


def test_cut_connections_are_taken_up_again(server, tmp_path):
    server.cut = 300_000
    assert fetch("cifar10", tmp_path).read_bytes() == CONTENT
    assert server.asked == [None, "bytes=300000-", "bytes=600000-", "bytes=900000-"]


def test_a_server_that_always_cuts_and_cannot_resume_is_given_up(server, tmp_path):
    server.cut, server.ranges = 300_000, False
    with pytest.raises(DataError, match="the 300,000 bytes that came are kept"):
        fetch("cifar10", tmp_path)
    assert there(tmp_path) == [f"{FILE}.part"]
    server.cut, server.ranges = None, True
    assert fetch("cifar10", tmp_path).read_bytes() == CONTENT


def test_a_whole_part_is_only_checked(server, tmp_path):
    (tmp_path / f"{FILE}.part").write_bytes(CONTENT)
    assert fetch("cifar10", tmp_path).read_bytes() == CONTENT
    assert len(server.asked) == 1


@pytest.mark.parametrize("part", [b"x" * 1000, b"x" * (len(CONTENT) + 5)], ids=["foreign", "too long"])
def test_a_part_of_something_else_costs_one_more_download(server, tmp_path, part):
    (tmp_path / f"{FILE}.part").write_bytes(part)
    assert fetch("cifar10", tmp_path).read_bytes() == CONTENT
    assert len(server.asked) == 2


def test_a_wrong_checksum_leaves_nothing(server, tmp_path):
    server.content = CONTENT[:-1] + b"?"
    with pytest.raises(DataError, match="is not the published file"):
        fetch("cifar10", tmp_path)
    assert there(tmp_path) == []


@pytest.mark.parametrize("code", [403, 404, 503])
def test_refused_says_what_to_place_where(server, tmp_path, code):
    server.code = code
    with pytest.raises(DataError, match=rf"{FILE} \(1 MB\).*{code}.*http://127.*place it in {tmp_path}"):
        fetch("cifar10", tmp_path)
    assert len(server.asked) == (5 if code == 503 else 1)


def test_offline_says_what_to_place_where(server, tmp_path):
    server.http.server_close()  # nobody listens
    with pytest.raises(DataError, match=rf"{FILE} \(1 MB\) could not be fetched \(.*refused.*place it in {tmp_path}"):
        fetch("cifar10", tmp_path)
    assert there(tmp_path) == []


def test_two_at_once_download_once(server, tmp_path):
    threads = [threading.Thread(target=fetch, args=("cifar10", tmp_path)) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert server.asked == [None]
    assert (tmp_path / FILE).read_bytes() == CONTENT


@pytest.mark.parametrize("name", sorted(BY_HAND))
def test_what_has_no_address_says_what_to_place_where(name, tmp_path):
    with pytest.raises(InputError, match=rf"{name} must be downloaded by hand; place in {tmp_path}: .+"):
        fetch(name, tmp_path)


def test_several_files_of_a_set_lie_in_a_folder_of_its_name(server, tmp_path, monkeypatch):
    one = REMOTE["cifar10"]
    monkeypatch.setitem(REMOTE, "mnist", tuple(Remote(one.url, one.md5, one.size, name) for name in ("a", "b")))
    assert fetch("MNIST", tmp_path) == tmp_path / "mnist"
    assert there(tmp_path / "mnist") == ["a", "b"]
    fetch("mnist", tmp_path)
    assert server.asked == [None, None]  # what is there is only checked


def test_what_needs_no_download_says_so(tmp_path):
    with pytest.raises(InputError, match="digits come with scikit-learn: there is nothing to fetch"):
        fetch("digits", tmp_path)


def test_a_mistyped_name(tmp_path):
    with pytest.raises(InputError, match="did you mean 'cifar10'"):
        fetch("cifar1O", tmp_path)


def test_published_checksums():
    assert {n: r.md5 if isinstance(r, Remote) else [one.md5 for one in r] for n, r in REMOTE.items()} == {
        "mnist": [
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ],
        "emnist": "58c8d27c78d21e728a6bc7b3cc06412e",
        "cifar10": "c58f30108f718f92721af3b95e74349a",
        "cifar100": "eb9058c3a382ffc7106e4002c42a8d85",
        "cifar10c": "56bf5dcef84df0e2308c6dcbcbbd8499",
    }


# --- where data is looked for


def test_folders_in_order(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSELECT_DATA", str(tmp_path / "env"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folders = [tmp_path / "given", tmp_path / "env", tmp_path / "cache" / "fedselect" / "data"]
    assert places(tmp_path / "given") == folders
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "b").write_text("")
    for i, folder in enumerate(folders):
        assert find(["a", "b"], folders[0] if i == 0 else None) == (folder if i != 2 else folders[1]) / "b"
    (folders[0] / "b").unlink()
    assert find(["a", "b"], folders[0]) == folders[1] / "b"
    (folders[1] / "b").unlink()
    assert find(["a", "b"], folders[0]) == folders[2] / "b"
    (folders[2] / "b").unlink()
    with pytest.raises(
        DataError, match=rf"place a or b in {folders[0]} \(also.*{folders[2]}\), or run: fedselect data fetch s$"
    ):
        find(["a", "b"], folders[0], fetch="s")


def test_without_settings_the_home_folder_is_used(tmp_path, monkeypatch):
    monkeypatch.delenv("FEDSELECT_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert places(None) == [tmp_path / ".cache" / "fedselect" / "data"]


def test_the_file_itself_may_be_given(tmp_path):
    (tmp_path / "any.npz").write_text("")
    (tmp_path / "a").mkdir()
    assert find(["a"], tmp_path / "any.npz") == tmp_path / "any.npz"
    assert find(["a"], tmp_path / "a") == tmp_path / "a"
    with pytest.raises(InputError, match="there is no folder"):
        find(["a"], tmp_path / "none")
