"""The wheel as a user gets it: what is inside, and its program in an empty folder, without the checkout."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from children import call

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "src")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that nothing of the build stays in the checkout."""
    checkout, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / name, checkout / name)
    build = f"import setuptools.build_meta as b; b.build_wheel({str(out)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=checkout, check=True, capture_output=True)
    (made,) = out.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The wheel in a fresh environment that sees the packages it needs, but not the checkout; its program."""
    home = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    (packages / "needs.pth").write_text(sysconfig.get_path("purelib"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    program = home / "bin" / "fedselect"
    program.write_text(f"#!{home / 'bin' / 'python'}\nfrom fedselect.cli import main\nmain()\n")
    program.chmod(0o755)
    return program


@pytest.fixture
def program(installed, tmp_path):
    """What the program prints, started in an empty folder."""

    def run(*args: str, **variables: str) -> str:
        quiet = {"PATH": "", "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]}
        done = call(installed, *args, cwd=tmp_path, env={**quiet, **variables})
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_everything_beside_the_code_is_in_the_wheel(wheel):
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if name.startswith("fedselect/")}
    package = ROOT / "src"
    ours = {
        str(p.relative_to(package)) for p in (package / "fedselect").rglob("*") if p.is_file() and "__pycache__" not in p.parts
    }
    assert inside == ours


def test_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = archive.read(name).decode()
        entry = archive.read(name.replace("METADATA", "entry_points.txt")).decode()
    assert "fedselect = fedselect.cli:main" in entry
    (version,) = re.findall(r"^Version: (.+)$", metadata, re.M)
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    documented = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "install.md").read_text(), re.M))
    assert documented == set(re.findall(r"^Provides-Extra: (\w+)$", metadata, re.M)) - {"test", "docs"}


def test_version_and_demo_from_the_wheel(program, wheel, tmp_path):
    version = wheel.name.split("-")[1]
    assert program("--version").strip() == version
    said = program("demo", "--rounds", "1", "--seeds", "0", "--methods", "local,fedalike", "--quiet")
    assert "fedalike" in said
    assert (tmp_path / "runs/demo/report.html").is_file()
    assert version in (tmp_path / "runs/demo/fedalike-seed0/summary.json").read_text()


def test_the_shell_completes_commands_and_names(program):
    def complete(line: str) -> set[str]:
        words = line.split(" ")
        return set(program(_FEDSELECT_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(len(words) - 1)).split())

    assert complete("fedselect de") == {"demo", "deploy"}
    assert complete("fedselect compare --methods fedavg,fedb") == {"fedavg,fedbn", "fedavg,fedbabu"}
