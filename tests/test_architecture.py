"""The shape of the package: rooms in order, files that can be read in one sitting, rooms that can be deleted."""

import ast
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

PACKAGE = REPOSITORY / "vit_finetune"
# A room imports only from rooms before it in this list.
ROOMS = ["errors", "formatting", "environment", "checkpoint", "data", "model", "evaluation", "module"]
ROOMS += ["callbacks", "export", "cli", "benchmark"]
OPTIONAL = ["benchmark", "export"]
FILES = {
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def imports(module: str) -> set[str]:
    """Modules of the package that a module imports, anywhere in its file."""
    found = set()
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    known = {name if name in FILES else name.rpartition(".")[0] for name in found if name.startswith("vit_finetune")}
    return {name for name in known if name in FILES} - {module, "vit_finetune"}


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_rooms_are_known_and_few() -> None:
    entries = {path.name.removesuffix(".py") for path in PACKAGE.iterdir()} - {"__pycache__"}
    assert entries == {*ROOMS, "__init__", "__main__", "py.typed", "README.md"}
    assert len(entries) <= 16 and len(list(PACKAGE.glob("*.py"))) <= 8


@pytest.mark.parametrize("module", [module for module in FILES if room(module) in ROOMS])
def test_imports_follow_the_room_order(module: str) -> None:
    later = ROOMS[ROOMS.index(room(module)) + 1 :]
    assert not [name for name in imports(module) if room(name) in later]


def test_no_import_circles() -> None:
    edges = {module: imports(module) for module in FILES if module != "vit_finetune"}  # its names are imported lazily

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [*edges[start]]
        while todo:
            module = todo.pop()
            if module not in seen:
                seen.add(module)
                todo += edges.get(module, ())
        return seen

    assert [module for module in edges if module in reachable(module)] == []


def test_files_are_short_and_have_names_of_their_own() -> None:
    lengths = {module: len(path.read_text().splitlines()) for module, path in FILES.items()}
    assert {module for module, lines in lengths.items() if lines > 250} <= {"vit_finetune.module"}
    names = Counter(path.name for path in FILES.values() if not path.name.startswith("__"))
    assert [name for name, count in names.items() if count > 1] == []


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the project without its optional rooms."""
    ignore = shutil.ignore_patterns("__pycache__", *OPTIONAL)
    shutil.copytree(PACKAGE, tmp_path / "copy" / "vit_finetune", ignore=ignore)
    shutil.copytree(REPOSITORY / "configs", tmp_path / "copy" / "configs")
    return tmp_path / "copy"


def test_optional_rooms_can_be_deleted(copy: Path) -> None:
    def run(*args: str) -> str:
        command = [sys.executable, "-m", "vit_finetune", *args]
        environment = {**os.environ, "PYTHONPATH": str(copy), "COLUMNS": "200"}
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    small = ["--data.train_size=200", "--data.val_fraction=0.1", "--trainer.max_epochs=1"]
    run("fit", "--config=configs/quickstart.yaml", "--data=Shapes", *small)
    cpu = ["--ckpt_path=best", "--trainer.accelerator=cpu", "--data.test_size=20"]
    assert "test/acc" in run("test", *cpu)
    assert "20 images" in run("predict", *cpu)
    listed = run("--help")
    assert all(command in listed for command in ("fit", "validate", "test", "predict", "doctor", "check-data", "tune"))
    assert "benchmark" not in listed and "export" not in listed
