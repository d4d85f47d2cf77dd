"""The README's commands are real: options parse, files exist, modules import."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from vit_finetune import main

README = (REPOSITORY / "README.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if line]
OURS = [line[line.index("python -m vit_finetune") :] for line in COMMANDS if "python -m vit_finetune " in line]
ROWS = re.findall(r"^\|[^|]*\| `(--[^`]*)`", README, re.MULTILINE)
OURS += [f"python -m vit_finetune fit {options}" for options in ROWS]


def test_opens_with_the_two_commands() -> None:
    assert COMMANDS[0] == (
        "python -m venv .venv && . .venv/bin/activate && pip install -e '.[dev]' "
        "&& python -m vit_finetune fit --config configs/quickstart.yaml"
    )
    assert COMMANDS[1] == "pytest"
    assert len(ROWS) >= 3
    assert "pytest" in (REPOSITORY / ".ci" / "run").read_text().splitlines()


@pytest.mark.parametrize("command", OURS)
def test_command_parses(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(command, comments=True)[3:]
    checkpoint = tmp_path / "runs" / "x" / "version_0" / "checkpoints"
    checkpoint.mkdir(parents=True)
    monkeypatch.setattr("vit_finetune.checkpoints.read_header", lambda path: {})
    for name in ("best-epoch00-acc1.0000.ckpt", "last.ckpt"):
        (checkpoint / name).touch()
    if "--config" in words:
        words[words.index("--config") + 1] = str(REPOSITORY / words[words.index("--config") + 1])
    with pytest.raises(SystemExit) as stop:
        main([*words, "--print_config"])
    assert stop.value.code in (0, None)


def test_benchmarks_exist() -> None:
    modules = set(re.findall(r"python -m (vit_finetune\.benchmark\.\w+)", README))
    assert len(modules) == 3
    for module in modules:
        assert callable(importlib.import_module(module).measure)


def test_map_names_every_module() -> None:
    code = re.search(r"## Map of the code\n\n```\n(.*?)```", README, re.DOTALL)
    assert code is not None
    for path in (REPOSITORY / "vit_finetune").glob("*.py"):
        assert path.name.startswith("__") or path.name in code.group(1), path.name
    for path in (REPOSITORY / "vit_finetune" / "data").glob("*.py"):
        assert path.name == "__init__.py" or path.name in code.group(1), path.name
    assert {f"{p.name}/" for p in (REPOSITORY / "vit_finetune").iterdir() if (p / "__init__.py").exists()} <= set(
        code.group(1).split()
    )


def test_picture_exists() -> None:
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", README):
        assert (REPOSITORY / picture).stat().st_size < 500_000
