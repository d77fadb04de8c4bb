"""What starts quickly: help, versions and completion load neither torch nor numpy, and names are loaded when asked for."""

import subprocess
import sys

import pytest

HEAVY = "{'torch', 'numpy', 'scipy', 'sklearn', 'pandas', 'flwr', 'grpc'} & sys.modules.keys()"
HELP = [["--help"], ["--version"], *[[c, "--help"] for c in ("run", "compare", "tune", "adapt", "diagnose", "methods", "data")],
        ["deploy", "--help"], ["deploy", "run", "--help"]]  # fmt: skip


def python(code, **environment):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment or None)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_loads_neither_torch_nor_numpy():
    """In one process: what one of them loaded, the last would show."""
    out = python(f"""
import sys
from fedselect.cli import main
for args in {HELP}:
    sys.argv = ["fedselect", *args]
    try:
        main()
    except SystemExit as e:
        assert not e.code, args
print("loaded:", {HEAVY})
""")
    assert "Personalized federated learning" in out
    assert out.splitlines()[-1] == "loaded: set()"


@pytest.mark.parametrize(("typed", "found"), [("fedselect com", "compare"), ("fedselect run --dev", "--device")])
def test_completion_finds_commands_and_options_and_loads_neither(typed, found, monkeypatch):
    monkeypatch.setenv("_FEDSELECT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(typed.count(" ")))
    out = python(f"""
import sys
from fedselect.cli import main
sys.argv = ["fedselect"]
try:
    main()
finally:
    print("loaded:", {HEAVY})
""")
    assert out.splitlines() == [*filter(None, [found]), "loaded: set()"]


def test_the_package_is_loaded_when_one_of_its_names_is_asked_for():
    out = python(f"""
import sys
import fedselect as fs
print({HEAVY})
assert not hasattr(fs, "nothing")
import fedselect.adaptation  # a room is not the function beside it
assert callable(fs.adapt) and fs.FedAvg().__class__.__module__.startswith("fedselect.")
assert set(fs.__all__) <= set(dir(fs))
import fedselect.training.step
assert fs.training.step is fedselect.training.step
""")
    assert out == "set()\n"


def test_a_star_import_gives_the_public_names():
    assert python("from fedselect import *\nprint(FedAvg, Training, __version__)").startswith("<function FedAvg")


def test_tracing_a_step_does_not_load_the_compiler():
    out = python("""
import sys
import fedselect as fs
import torch
part = torch.randn(8, 5), torch.arange(8) % 2
data = fs.Federation([fs.ClientData(part, part)] * 2, 2)
run = fs.Simulation(fs.FedAvg(epochs=9), fs.models.mlp(data), data, training=fs.Training(batch_size=4), device="cpu")
run.step(evaluate=False)
print([type(made).__name__ for made in run._programs._recorded.values()])
print("loaded:", {"torch._dynamo", "torch._inductor", "sympy"} & sys.modules.keys())
""")
    assert out.splitlines() == ["['Traced']", "loaded: set()"]


@pytest.mark.parametrize("turns", ["", "except KeyboardInterrupt:\n    raise ImportError('partially imported')\n"])
def test_ctrl_c_while_the_commands_load_gets_one_sentence(tmp_path, turns):
    """A module that the commands import, replaced by one during whose import Ctrl-C is pressed."""
    (tmp_path / "typer.py").write_text(
        f"import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\n{turns or 'finally:'}\n    pass\n"
    )
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from fedselect.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped by Ctrl-C\n")


def test_before_ctrl_c_is_answered_little_is_loaded():
    out = python(
        "import sys\nbefore = set(sys.modules)\nimport fedselect.cli\n"
        "print({'typing', 'typer', 'rich'} & (sys.modules.keys() - before))"
    )
    assert out == "set()\n"
