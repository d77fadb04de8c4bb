"""The public list, and imports that flow downwards only."""

import ast
from pathlib import Path

import pytest

import fedselect as fs

PUBLIC = [
    "CheckpointError", "ClientData", "DataError", "DeltaSelect", "Ditto", "Down", "FedAvg", "FedAvgFT", "FedBABU", "FedBN",
    "FedPAC", "FedPer", "FedProx", "FedRep", "FedSelect", "Federation", "FedselectError", "Fixed", "Images", "InputError",
    "LGFedAvg",
    "Local", "LotteryFL", "Method", "Model", "Partial", "Pass", "PersonalLayers", "RandomSelect", "Received", "Result",
    "RunError", "Simulation", "Training", "TrainingError", "Up", "Work", "deal_images", "from_datasets",
    "layers", "load", "models", "run",
]  # fmt: skip

# who may import whom: a part imports parts of its own layer's left neighbours and below, never beside or above
LAYERS = [
    {"errors"},
    {"kernels"},
    {"tree", "random", "options", "files", "rules"},
    {"stacked", "transforms", "room", "checks", "generations"},
    {"models"},
    {"objectives", "split"},
    {"step"},
    {"program"},
    {"work"},
    {"select", "method", "data"},
    {"methods", "deploy"},
    {"simulate"},
    {"experiments"},
    {"deploy.flower"},
    {"cli"},
]
ROOT = Path(fs.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


def imports(path):
    """Every module a file imports, wherever in it, by full name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def named(parts):
    """The part of the package that a path or a module lies in; the network engine is one of its own."""
    return "deploy.flower" if tuple(parts[:2]) == ("deploy", "flower") else parts[0]


def part(path):
    return named(path.relative_to(ROOT).with_suffix("").parts)


def own_parts(path):
    """The parts of fedselect that a file imports, its own aside."""
    found = {named(name.split(".")[1:]) for name in imports(path) if name.startswith("fedselect.")}
    return found - {part(path)}


def layer(name):
    return next(i for i, names in enumerate(LAYERS) if name in names)


def test_the_public_list_is_sorted_and_as_expected():
    assert fs.__all__ == sorted(fs.__all__) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there(name):
    assert getattr(fs, name) is not None


def test_every_error_is_one_of_ours():
    errors = [getattr(fs, n) for n in PUBLIC if n.endswith("Error")]
    assert all(issubclass(e, fs.FedselectError) for e in errors)
    assert issubclass(fs.CheckpointError, fs.RunError)


def test_every_part_has_its_layer():
    assert {part(p) for p in FILES} - {"__init__", "__main__"} == set().union(*LAYERS)


@pytest.mark.parametrize(
    "path", [p for p in FILES if part(p) not in ("__init__", "__main__")], ids=lambda p: str(p.relative_to(ROOT))
)
def test_imports_flow_downwards(path):
    assert {name for name in own_parts(path) if layer(name) >= layer(part(path))} == set()


@pytest.mark.parametrize("path", [p for p in FILES if part(p) == "methods"], ids=lambda p: p.name)
def test_methods_know_neither_engine_nor_network_nor_data(path):
    assert not own_parts(path) & {"simulate", "deploy", "data", "experiments", "cli"}
    assert not any(name.split(".")[0] == "flwr" for name in imports(path))


def test_nothing_but_the_command_line_knows_the_command_line():
    assert {part(p) for p in FILES if "cli" in own_parts(p)} <= {"__main__"}
    assert {part(p) for p in FILES if "experiments" in own_parts(p)} <= {"cli", "deploy.flower"}


def test_only_the_seam_imports_flower():
    seam = {ROOT / "deploy" / "flower" / "apps.py"}
    assert {p for p in FILES if any(name.split(".")[0] == "flwr" for name in imports(p))} == seam


def test_nothing_imports_other_peoples_models():
    assert not {name for p in FILES for name in imports(p) if name.split(".")[0] in ("torchvision", "timm")}


def test_the_version_is_not_an_import_of_the_command_line():
    assert not own_parts(ROOT / "__init__.py") & {"experiments", "cli"}
