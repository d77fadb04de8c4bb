"""The public list, and imports that flow downwards only."""

import ast
import re
from importlib.metadata import version
from pathlib import Path

import pytest

import fedselect as fs

PUBLIC = [
    "ADAPTERS", "AGGREGATORS", "APFL", "Adam", "AdamW", "Adapted", "Aggregator", "Binary", "CheckpointError",
    "Classification", "ClientData", "ClippedMean", "DATA", "DataError", "DeltaSelect", "Diagnosis", "Disagreement",
    "Ditto", "Down", "FedAdam", "FedAlike", "FedAvg", "FedAvgFT", "FedBABU", "FedBN", "FedPAC", "FedPer", "FedPersist",
    "FedProx", "FedRep", "FedSelect", "Federation", "FedselectError", "Fixed", "Fold", "Images", "InputError", "LGFedAvg",
    "Local", "LotteryFL", "METHODS", "MODELS", "Mask", "Mean", "Median", "Method", "Metric", "Model", "Multilabel",
    "OPTIMIZERS", "Optimizer", "Partial", "Pass", "PersonalLayers", "Private", "Products", "RandomSelect", "Reading",
    "Received", "Regression", "Result", "RunError", "SCHEDULES", "SGD", "Scaffold", "Schedule", "Schema", "Selector",
    "Sequences", "Simulation", "Spread", "State", "TASKS", "Task", "Training", "TrainingError", "Tree", "TrimmedMean",
    "Tuned", "Up", "Work", "__version__", "adapt", "bias_only", "compare", "deal_images", "diagnose", "from_datasets",
    "head_only", "layers", "layers_only", "load", "load_model", "load_result", "lora", "merge", "models", "negate",
    "norm_only", "run", "shifted", "tune",
]  # fmt: skip

# who may import whom: a room imports rooms that stand before it, as docs/design.md draws them
ROOMS = [
    "kernels", "core", "models", "tasks", "training", "methods", "aggregate", "secret", "private", "data", "simulate", "serve",
    "diagnosis", "runs", "network", "network.flower", "network.grpc", "report", "results", "tuning", "adaptation", "paper",
    "cli",
]  # fmt: skip
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
    """The room that a path or a module lies in; what knows a network engine is one of its own."""
    return ".".join(parts[:2]) if tuple(parts[:2]) in (("network", "flower"), ("network", "grpc")) else parts[0]


def room(path):
    return named(path.relative_to(ROOT).with_suffix("").parts)


def other_rooms(path):
    """The rooms that a file imports from, its own aside."""
    found = {named(name.split(".")[1:]) for name in imports(path) if name.startswith("fedselect.")}
    return found - {room(path)}


def test_the_public_list_is_as_expected():
    assert sorted(fs.__all__) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there(name):
    assert getattr(fs, name) is not None


def test_every_error_is_one_of_ours():
    errors = [getattr(fs, n) for n in PUBLIC if n.endswith("Error")]
    assert all(issubclass(e, fs.FedselectError) for e in errors)
    assert issubclass(fs.CheckpointError, fs.RunError)


def test_every_file_stands_in_a_room():
    assert {room(p) for p in FILES} - {"__init__", "__main__", "public"} == set(ROOMS)


def test_the_map_in_the_docs_draws_every_room_in_this_order():
    drawn = (ROOT.parents[1] / "docs" / "design.md").read_text().split("## Map")[1].split("```")[1]
    rooms = [line.split("/ ")[0] for line in drawn.splitlines() if re.match(r"[a-z/]+/ ", line)]
    assert [r.replace("/", ".") for r in rooms] == ROOMS


@pytest.mark.parametrize(
    "path", [p for p in FILES if room(p) not in ("__init__", "__main__", "public")], ids=lambda p: str(p.relative_to(ROOT))
)
def test_imports_flow_downwards(path):
    assert {name for name in other_rooms(path) if ROOMS.index(name) > ROOMS.index(room(path))} == set()


@pytest.mark.parametrize("path", [p for p in FILES if room(p) == "methods"], ids=lambda p: p.name)
def test_methods_know_neither_engine_nor_network_nor_data(path):
    assert not other_rooms(path) & {"simulate", "network", "data", "runs", "cli"}
    assert not any(name.split(".")[0] == "flwr" for name in imports(path))


def test_nothing_but_the_command_line_knows_the_command_line():
    assert {room(p) for p in FILES if "cli" in other_rooms(p)} <= {"__main__"}


@pytest.mark.parametrize(("engine", "seam"), [("flwr", {"flower/apps.py"}), ("grpc", {"grpc/hub.py", "grpc/line.py"})])
def test_only_the_seam_imports_a_network_engine(engine, seam):
    found = {p for p in FILES if any(name.split(".")[0] == engine for name in imports(p))}
    assert found == {ROOT / "network" / p for p in seam}


def test_network_engines_do_not_know_each_other():
    assert not {p for p in FILES if {room(p), *other_rooms(p)} >= {"network.flower", "network.grpc"}} - set(ROOT.glob("cli/*"))


def test_nothing_imports_other_peoples_models():
    assert not {name for p in FILES for name in imports(p) if name.split(".")[0] in ("torchvision", "timm")}


def test_the_version_is_that_of_the_package_and_no_import_of_the_command_line():
    assert fs.__version__ == version("fedselect")
    assert not other_rooms(ROOT / "public.py") & {"runs", "cli"}


TORCHS = {  # with the arguments of torch's own functions, in their order
    "models/adapters.py": {"forward"},
    "training/convolution.py": {"forward", "shared"},
    "training/layers.py": {"forward"},
    "training/stacked.py": {"_embedding", "_max_pool2d", "_conv2d", "_conv1d", "_batch_norm", "_attend"},
}


def positional(path):
    """(name, how many arguments can be given by place) of every function in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            names = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
            yield node.name, len(names) - (names[:1] in (["self"], ["cls"], ["ctx"]))


@pytest.mark.parametrize("path", [f for f in FILES if room(f) != "kernels"], ids=lambda f: str(f.relative_to(ROOT)))
def test_no_function_takes_more_than_six_arguments_by_place(path):
    """Kernels aside: a GPU is given its arguments in a row."""
    theirs = TORCHS.get(str(path.relative_to(ROOT)), set())
    assert [name for name, count in positional(path) if count > 6 and name not in theirs] == []
