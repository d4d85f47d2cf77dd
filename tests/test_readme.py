"""The README's commands are real: options parse, files exist, modules import."""

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import CPU, REPOSITORY, TINY_MODEL
from vit_finetune import main
from vit_finetune.benchmark import suite
from vit_finetune.benchmark.__main__ import parser as benchmark_parser

README = (REPOSITORY / "README.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if line]
OURS = [line[line.index("python -m vit_finetune") :] for line in COMMANDS if "python -m vit_finetune " in line]
BENCHMARKS = [line for line in OURS if " benchmark " in line]
OURS = [line for line in OURS if line not in BENCHMARKS]
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
    monkeypatch.setattr("vit_finetune.checkpoint.read_header", lambda path: {})
    for name in ("best-epoch00-acc1.0000.ckpt", "last.ckpt"):
        (checkpoint / name).touch()
    if "--config" in words:
        words[words.index("--config") + 1] = str(REPOSITORY / words[words.index("--config") + 1])
    with pytest.raises(SystemExit) as stop:
        main([*words, "--print_config"])
    assert stop.value.code in (0, None)


@pytest.mark.parametrize("command", BENCHMARKS)
def test_benchmark_parses(command: str) -> None:
    options = benchmark_parser().parse_args(shlex.split(command, comments=True)[4:])
    assert options.frameworks or suite.read(REPOSITORY / options.suite)


def test_benchmarks_exist() -> None:
    modules = set(re.findall(r"python -m (vit_finetune\.benchmark\.\w+)", README))
    assert len(modules) == 4
    for module in modules:
        assert callable(importlib.import_module(module).measure)


@pytest.mark.skipif(not (REPOSITORY / ".git").exists() or not shutil.which("perl"), reason="needs git and perl")
def test_package_can_be_renamed(tmp_path: Path) -> None:
    """The README's command, in a clone: no old name is left, and the command line runs under the new one."""
    command = next(line for line in COMMANDS if line.startswith("git mv"))
    subprocess.run(["git", "clone", "-q", str(REPOSITORY), "clone"], check=True)
    subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], check=True, cwd="clone")
    old = ["git", "grep", "-iIl", "vit[-_]finetune"]
    assert subprocess.run(old, check=False, cwd="clone", capture_output=True, text=True).stdout == ""
    fit = ["fit", *TINY_MODEL, *CPU, "--data=Shapes", "--data.train_size=100", "--trainer.fast_dev_run=true"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "clone")}
    subprocess.run([sys.executable, "-m", "my_project", *fit], check=True, cwd="clone", env=environment)


def test_data_set_of_your_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's class works as it stands, given the function that reads the images."""
    code = next(block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "class MyData" in block)
    read = "def read(stage):\n    return torch.randint(256, (20, 3, 32, 32), dtype=torch.uint8), torch.arange(20) % 2\n"
    (tmp_path / "readme_data.py").write_text(f"import torch\n{code}\n\n{read}")
    monkeypatch.syspath_prepend(tmp_path)
    main(["fit", *TINY_MODEL, *CPU, "--data=readme_data.MyData", "--data.batch_size=4", "--trainer.max_epochs=1"])
    main(["test", "--ckpt_path=last", *CPU])
    main(["predict", "--ckpt_path=last", *CPU])


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


def test_image_exists() -> None:
    for image in re.findall(r"!\[[^]]*\]\(([^)]+)\)", README):
        assert (REPOSITORY / image).stat().st_size < 500_000
