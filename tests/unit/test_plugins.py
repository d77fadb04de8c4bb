"""Plugins: what they add is known by name, what they must not do is refused in a sentence, and no file loads one."""

import os
import sys

import pytest

import fedselect as fs
from fedselect.cli.flags import take_plugins
from fedselect.core import plugins
from fedselect.core.errors import InputError
from fedselect.network.plan import Plan, Shape, need_plugins
from fedselect.runs.config import TABLES, Config, load_plugins
from fedselect.runs.rundir import identity

ROWS = """
import fedselect as fs

def mine(lr: float = 0.1) -> fs.Method:
    return fs.FedAvg(lr=lr)

def few(clients: int = 3, seed: int = 0) -> fs.Federation:
    return fs.load("digits", clients=clients, train=20, test=10, seed=seed)

fs.METHODS["mine"], fs.DATA["few"] = mine, few
"""
DIGITS = Shape((1, 8, 8), tuple("0123456789"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current directory; plugins that a test loads are gone after it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plugins, "_LOADED", {})
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv(plugins.VARIABLE, "")
    modules, before = set(sys.modules), [dict(table) for _, table in TABLES.values()]
    yield tmp_path
    for name in set(sys.modules) - modules:
        del sys.modules[name]
    for (_, table), rows in zip(TABLES.values(), before, strict=True):
        table.clear()
        table.update(rows)


@pytest.fixture
def write(folder):
    def put(name, text):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)

    return put


def test_rows_are_known_by_the_plugin_that_added_them(write):
    write("own.py", ROWS)
    load_plugins(["own"])
    assert plugins.loaded() == {"own": plugins.Plugin("own", frozenset({("method", "mine"), ("data", "few")}))}
    assert plugins.used([("method", "mine"), ("model", "mlp")]) == ["own"]
    assert plugins.used([("method", "fedavg"), ("model", "mine")]) == []


@pytest.mark.parametrize("said", ["own", "own.py", "{folder}/own.py"])
def test_other_processes_get_the_full_path_of_a_file(write, folder, said, monkeypatch):
    write("own.py", ROWS)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])  # as the console script has it
    load_plugins([said.format(folder=folder)])
    assert os.environ[plugins.VARIABLE] == str(folder / "own.py")
    assert "mine" in fs.METHODS


def test_a_package_here_and_a_module_on_the_path_are_found(write, folder, monkeypatch):
    write("here/__init__.py", "from here.rows import few\nimport fedselect as fs\nfs.DATA['few'] = few")
    write("here/rows.py", "import fedselect as fs\nfew = fs.DATA['digits']")
    write("there/some/thing.py", "import fedselect as fs\nfs.METHODS['other'] = fs.FedAvg")
    monkeypatch.syspath_prepend(folder / "there")
    load_plugins(["here,some.thing"])
    assert os.environ[plugins.VARIABLE] == f"{folder}/here/__init__.py,some.thing"
    assert plugins.used([("data", "few"), ("method", "other")]) == ["here", "some.thing"]


def test_one_that_is_loaded_is_not_loaded_again(write):
    write("own.py", ROWS)
    load_plugins(["own", "own.py"])
    load_plugins()
    assert os.environ[plugins.VARIABLE].count("own.py") == 1


def test_a_configuration_names_the_plugins_it_uses(write):
    plain = Config().complete()
    write("own.py", ROWS)
    load_plugins(["own"])
    made = Config(method={"name": "mine"}).complete()
    assert made.plugins == ["own"]
    assert Config.from_dict(made.to_json(), "test") == made
    assert Config().complete() == plain
    assert plain.plugins == []
    assert Config.from_dict({**made.to_json(), "method": {"name": "fedavg"}}, "test").plugins == []


def test_an_identity_shows_a_plugin_only_where_there_is_one(write):
    said = Config().complete().to_json()
    without = {k: v for k, v in said.items() if k != "plugins"}
    assert identity(Config.from_dict(said, "test")) == identity(Config.from_dict(without, "test"))


def test_a_configuration_loads_no_code(write, folder):
    write("own.py", "open('ran', 'w')\n" + ROWS)
    said = "c.json: this run needs the plugin 'own', which is not loaded here; install it, or add --plugin own."
    with pytest.raises(InputError) as refused:
        Config.from_dict({"plugins": ["own"], "method": {"name": "mine"}}, "c.json")
    assert str(refused.value) == said
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("given", ["own", [1], {"own": 1}])
def test_plugins_of_a_file_are_a_list_of_names(given):
    with pytest.raises(InputError, match="plugins must be a list of names"):
        Config.from_dict({"plugins": given}, "test")


def test_a_name_that_nobody_knows_may_be_a_plugins():
    with pytest.raises(
        InputError, match=r"did you mean 'fedavg'.*\? If a plugin provides it, add --plugin, or in Python import it\.$"
    ):
        Config.from_dict({"method": {"name": "fedvg"}}, "test")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("x = 1\nundefined", r"plugin 'bad' cannot be imported \(NameError: name 'undefined' .*bad.py line 2\)"),
        ("def", r"the plugin 'bad' cannot be imported \(SyntaxError: .*bad.py, line 1\)"),
        ("raise ValueError('a\\nb')", r"\(ValueError: a b, "),
        ("import sys; sys.exit(3)", r"\(SystemExit: 3, "),
        ("import nowhere", r"cannot be imported \(ModuleNotFoundError: No module named 'nowhere'"),
        ("fs.METHODS['fedavg'] = fs.FedPer", "the plugin 'bad' replaces the method 'fedavg' of fedselect; rename its own"),
        ("del fs.MODELS['mlp']", "the plugin 'bad' replaces the model 'mlp' of fedselect"),
        ("fs.METHODS['new'] = fs.FedAvg()", "the plugin 'bad' adds the method 'new', which is not a function or a class"),
    ],
)  # fmt: skip
def test_what_a_plugin_may_not_do(write, code, said):
    write("bad.py", f"import fedselect as fs; fs.DATA['half'] = print; {code}")
    before = [list(table.items()) for _, table in TABLES.values()]
    with pytest.raises(InputError, match=said) as refused:
        load_plugins(["bad"])
    assert "\n" not in str(refused.value)
    assert [list(table.items()) for _, table in TABLES.values()] == before
    assert plugins.loaded() == {}


def test_a_plugin_may_not_replace_a_row_of_another(write):
    write("own.py", ROWS)
    write("other.py", ROWS)
    with pytest.raises(InputError, match="the plugin 'other' replaces the method 'mine' of the plugin 'own'"):
        load_plugins(["own", "other"])
    assert list(plugins.loaded()) == ["own"]


@pytest.mark.parametrize(
    ("named", "said"),
    [
        (["nope"], "there is no plugin 'nope': no module of that name is installed or in the current directory"),
        (["no.pe"], "there is no plugin 'no.pe'"),
        (["nope.py"], r"there is no plugin nope.py: no such file"),
        (["json.py"], r"json.py has the same name as the module .*json/__init__.py; rename it"),
        (["own.py", "a/own.py"], r"a/own.py has the same name as the module .*/own.py; rename it"),
        (["comma"], "cannot be passed to other processes because of the comma in its path; rename it"),
    ],
)
def test_a_plugin_that_is_not_there_or_not_the_one_that_was_meant(write, folder, monkeypatch, named, said):
    for name in ("own.py", "a/own.py", "json.py", "a,b/comma.py"):
        write(name, ROWS)
    if named == ["comma"]:
        monkeypatch.chdir(folder / "a,b")
    with pytest.raises(InputError, match=said):
        load_plugins(named)


def test_one_that_adds_nothing_is_noted(write):
    write("nothing.py", "")
    with pytest.warns(UserWarning, match="the plugin 'nothing' adds no method or data or model"):
        load_plugins(["nothing"])


@pytest.mark.parametrize(
    ("args", "rest", "named"),
    [
        (["run", "--plugin", "a", "--seed", "1"], ["run", "--seed", "1"], ["a"]),
        (["--plugin=a", "deploy", "run", "--plugin", "b"], ["deploy", "run"], ["a", "b"]),
        (["run", "--name", "plugin"], ["run", "--name", "plugin"], []),
    ],
)
def test_the_flag_may_stand_anywhere(args, rest, named):
    assert take_plugins(args) == (rest, named)


@pytest.mark.parametrize("args", [["--plugin"], ["--plugin="], ["--plugin", "--seed", "1"]])
def test_the_flag_needs_a_module(args):
    with pytest.raises(InputError, match="--plugin needs a module"):
        take_plugins(args)


def test_a_plan_carries_its_plugins(write, monkeypatch):
    assert "plugins" not in Plan(Config().complete(), "site", "r", 2, DIGITS).to_flat()
    write("own.py", ROWS)
    load_plugins(["own"])
    made = Plan(Config(method={"name": "mine"}, data={"name": "few"}).complete(), "site", "r", 2, DIGITS)
    flat = made.to_flat()
    assert flat["plugins"] == "own"
    assert Plan.from_flat(flat, "r") == made
    monkeypatch.setattr(plugins, "_LOADED", {})
    with pytest.raises(InputError, match="install it, or start the client with --plugin own"):
        need_plugins(flat, "client")
    with pytest.raises(InputError, match="needs the plugin 'own'"):
        Plan.from_flat(flat, "r")
