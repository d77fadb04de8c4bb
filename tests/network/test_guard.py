"""The guard: a node runs the installed package and no code that came over the network."""

import io
import tomllib
import zipfile

import pytest
from children import call
from flwr.cli.build import build_fab_from_disk
from flwr.common.config import flatten_dict

from fedselect.core.errors import InputError
from fedselect.network import site
from fedselect.network.flower import guard

pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # in Flower's own build


@pytest.fixture
def app(tmp_path):
    return site.write_app(tmp_path / "app", {"rounds": 3, "method.name": "fedselect"}, "0.1.0")


def test_our_own_app_is_a_configuration_and_passes(app):
    bundle = build_fab_from_disk(app)
    guard.check_bundle(bundle)
    with zipfile.ZipFile(io.BytesIO(bundle)) as content:
        assert not [n for n in content.namelist() if n.endswith(".py")]


def test_a_configuration_comes_through_as_it_was(tmp_path):
    flat = {"rounds": 3, "fraction": 1e-05, "shipped": True, "method.name": 'a "b" \\ c', "data.name": "Zürich 猫 😀"}
    app = site.write_app(tmp_path / "app", flat, "0.1.0")
    found = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert flatten_dict(found) == flat


def test_an_app_that_brings_code_is_refused(app):
    (app / "fedselect").mkdir()
    (app / "fedselect" / "evil.py").write_text("import os\n")
    with pytest.raises(InputError, match=r"the app contains fedselect/evil\.py, but this node runs installed code only"):
        guard.check_bundle(build_fab_from_disk(app))


def test_an_app_that_names_another_entry_is_refused(app):
    text = (app / "pyproject.toml").read_text().replace("apps:client_app", "apps:server_app")
    (app / "pyproject.toml").write_text(text)
    with pytest.raises(InputError, match="this node runs"):
        guard.check_bundle(build_fab_from_disk(app))


def test_an_app_that_grows_when_it_is_unpacked_is_refused():
    bundle = io.BytesIO()
    with zipfile.ZipFile(bundle, "w", zipfile.ZIP_DEFLATED) as content:
        content.writestr("pyproject.toml", "#" * (guard.LARGEST + 1))
    assert len(bundle.getvalue()) < guard.LARGEST / 100
    with pytest.raises(InputError, match="the app takes more than 16 MB; a configuration does not"):
        guard.check_bundle(bundle.getvalue())


def test_nothing_of_a_refused_app_is_installed(app):
    (app / "evil.py").write_text("import os\n")
    installed = []
    with pytest.raises(InputError):
        guard.checked(installed.append)(build_fab_from_disk(app))
    assert installed == []


@pytest.mark.parametrize("name", guard.COMMANDS)
def test_flowers_commands_start_through_the_guard(tmp_path, name):
    """What Flower finds first in PATH is a command of the same name, with the same options."""
    done = call(guard.commands(tmp_path / "bin") / name, "--help")
    assert done.returncode == 0, done.stderr
    assert "--token" in done.stdout
    assert name in done.stdout


@pytest.mark.parametrize("name", guard.COMMANDS)
def test_a_module_in_the_folder_where_a_node_runs_is_not_taken_for_an_installed_one(tmp_path, name):
    (tmp_path / "zipfile.py").write_text("raise SystemExit('code of another')\n")
    done = call(guard.commands(tmp_path / "bin") / name, "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
