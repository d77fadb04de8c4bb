"""The notebooks of examples/: their code cells run from top to bottom, each notebook in a process and a folder of its own."""

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb"))


def cells(path: Path, kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(path.read_text("utf-8"))["cells"] if cell["cell_type"] == kind]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, fork, tmp_path):
    process = fork("\n".join(cells(path, "code")), cwd=tmp_path)
    _, err = process.communicate()
    assert process.returncode == 0, err


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs_and_is_in_the_index(path):
    stored = json.loads(path.read_text("utf-8"))
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in stored["cells"])
    assert f"(notebooks/{path.name})" in (path.parents[1] / "README.md").read_text("utf-8")
    assert cells(path, "markdown")[0].startswith("# ")
