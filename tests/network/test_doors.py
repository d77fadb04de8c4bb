"""The SuperLink's two doors: nodes at the public address, control from this machine alone."""

import json
import threading
import urllib.error
import urllib.request

import pytest
from children import until

from fedselect.network.flower import superlink
from fedselect.network.site import free_port

uvicorn = pytest.importorskip("uvicorn")


async def everything(scope, receive, send):
    """An application that answers every path with its name."""
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(scope["path"]).encode()})


@pytest.fixture(scope="module")
def ports():
    """Of the public and the private door."""
    public, private, started = free_port(), free_port(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.Server, "__init__", _noted(uvicorn.Server.__init__, started))
        options = {"log_config": None, "lifespan": "off", "ws": "none"}
        doors = (f"127.0.0.1:{public}", everything, "127.0.0.1", private)
        work = threading.Thread(target=superlink.serve, args=doors, kwargs=options, daemon=True)
        work.start()
        until(lambda: (started and started[0].started) or not work.is_alive())
        yield public, private
        started[0].should_exit = True
        work.join()


def _noted(init, started):
    def init_noted(self, config):
        init(self, config)
        started.append(self)

    return init_noted


def ask(port, path):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
            return answer.status
    except urllib.error.HTTPError as e:
        with e:
            return e.code


@pytest.mark.parametrize("path", ["/health", "/v1/fleet/activate-node", "/v1/fleet/push-object"])
def test_nodes_come_in_at_either(ports, path):
    assert [ask(port, path) for port in ports] == [200, 200]


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/control/start-run", "/v1/control/stop-run", "/v1/control/register-node", "/v1/runtime/acquire-task", "/docs"),
        *(
            "/openapi.json",
            "/",
            "/v1/fleet",
            "/v1/fleetx",
            "//v1/fleet/a",
            "/health/",
            "/V1/FLEET/a",
            "/v1/%63ontrol/list-runs",
        ),
    ],
)
def test_everything_else_is_for_this_machine(ports, path):
    assert [ask(port, path) for port in ports] == [403, 200]


def test_a_superlink_without_its_public_address_says_so(monkeypatch):
    monkeypatch.setattr("sys.argv", ["superlink", "--insecure"])
    with pytest.raises(SystemExit, match="--public HOST:PORT"):
        superlink.main()
