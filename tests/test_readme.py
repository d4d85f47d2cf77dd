"""The documentation is correct: commands parse, links exist, Python examples run, and it stays short."""

import csv
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import CPU, REPOSITORY, TINY_MODEL, only
from vit_finetune import main

PACKAGE = REPOSITORY / "vit_finetune"
README = REPOSITORY / "README.md"
ROOMS = [folder / "README.md" for folder in (REPOSITORY / "configs", REPOSITORY / "notebooks", PACKAGE)]
ROOMS += [PACKAGE / room / "README.md" for room in ("benchmark", "callbacks", "data")]
GUIDES = sorted((REPOSITORY / ".github").glob("*.md"))
PAGES = [README, *ROOMS, *GUIDES]
LISTS = [REPOSITORY / "CHANGELOG.md", REPOSITORY / "tests" / "KNOWN_ISSUES.md"]
CONFIGS = sorted([*(REPOSITORY / "configs").rglob("*.yaml"), *(REPOSITORY / "configs").rglob("*.sh")])


def name(path: object) -> str:
    return str(path.relative_to(REPOSITORY)) if isinstance(path, Path) else str(path)


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


def shell_lines(path: Path) -> list[str]:
    """Lines of the code blocks of a page and its inline commands; for a config, its header and a script's lines."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    if path.suffix != ".md":
        return [line for line in text.splitlines() if "-m vit_finetune" in line]
    inline = [code for code in re.findall(r"`(python -m vit_finetune[^`\n]*)`", text) if "..." not in code]
    return [line for block in blocks(path, "bash") for line in block.splitlines() if line] + inline


def commands(path: Path) -> list[str]:
    """``vit_finetune fit ...`` and ``vit_finetune.module ...`` of a page, without comments."""
    found = [re.search(r"-m (vit_finetune.*)", line) for line in shell_lines(path)]
    lines = [match[1] for match in found if match]
    slurm = {'"$RECIPE"': "configs/cifar10.yaml", '"$@"': ""}  # variables of slurm.sh, with their default values
    lines = [re.sub(r'"\$(RECIPE|@)"', lambda variable: slurm[variable[0]], line) for line in lines]
    split = [shlex.split(line, comments=True) for line in lines]
    return [shlex.join(args[:-1] if args[-1] == "&" else args) for args in split]


# The second column of the table of results: options of fit.
RESULTS = re.findall(r"^\|[^|]*\| `(--[^`]*)`", README.read_text(encoding="utf-8"), re.MULTILINE)
ALL = dict.fromkeys([command for path in [*PAGES, *CONFIGS] for command in commands(path)])
ALL |= dict.fromkeys(f"vit_finetune fit {options}" for options in RESULTS)
BENCHMARKS = [command for command in ALL if command.startswith("vit_finetune benchmark")]
MODULES = sorted({command.split()[0] for command in ALL if command.startswith("vit_finetune.")})
OTHERS = [command for command in ALL if command.startswith("vit_finetune ") and command not in BENCHMARKS]


def test_opens_with_the_two_commands() -> None:
    lines = shell_lines(README)
    assert lines[0] == (
        "python -m venv .venv && . .venv/bin/activate && pip install -e '.[dev]' "
        "&& python -m vit_finetune fit --config configs/quickstart.yaml"
    )
    assert lines[1] == "pytest"
    assert "pytest" in (REPOSITORY / ".ci" / "run").read_text().splitlines()
    assert len(RESULTS) >= 4


def test_commands_are_found() -> None:
    """The patterns above find something."""
    assert len(OTHERS) > 40 and len(BENCHMARKS) >= 4 and len(MODULES) >= 4
    assert [name(path) for path in CONFIGS if not commands(path)] == []


@pytest.mark.parametrize("command", OTHERS)
def test_command_parses(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = shlex.split(command)[1:]
    checkpoints = tmp_path / "runs" / "x" / "version_0" / "checkpoints"
    checkpoints.mkdir(parents=True)
    monkeypatch.setattr("vit_finetune.cli.lightning_cli.read_header", lambda path: {})
    for file in ("best-epoch00-acc1.0000.ckpt", "last.ckpt"):
        (checkpoints / file).touch()
    args = [str(REPOSITORY / arg) if arg.startswith("configs/") else arg for arg in args]
    with pytest.raises(SystemExit) as stop:
        main(args if "--help" in args else [*args, "--print_config"])
    assert stop.value.code in (0, None)


@pytest.mark.parametrize("command", BENCHMARKS)
def test_benchmark_parses(command: str) -> None:
    program, suite = (pytest.importorskip(f"vit_finetune.benchmark.{module}") for module in ("__main__", "suite"))
    options = program.parser().parse_args(shlex.split(command)[2:])
    assert options.frameworks or suite.read(REPOSITORY / options.suite)


@pytest.mark.parametrize("module", MODULES)
def test_module_is_a_program(module: str) -> None:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    assert 'if __name__ == "__main__":' in Path(spec.origin).read_text(encoding="utf-8")


@pytest.mark.skipif(not (REPOSITORY / ".git").exists() or not shutil.which("perl"), reason="needs git and perl")
def test_package_can_be_renamed(tmp_path: Path) -> None:
    """The README's command, in a clone: no old name is left, and the command line runs under the new one."""
    command = next(line for line in shell_lines(README) if line.startswith("git mv"))
    subprocess.run(["git", "clone", "-q", str(REPOSITORY), "clone"], check=True)
    subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], check=True, cwd="clone")
    old = ["git", "grep", "-iIl", "vit[-_]finetune"]
    assert subprocess.run(old, check=False, cwd="clone", capture_output=True, text=True).stdout == ""
    fit = ["fit", *TINY_MODEL, *CPU, "--data=Shapes", "--data.train_size=100", "--trainer.fast_dev_run=true"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "clone")}
    subprocess.run([sys.executable, "-m", "my_project", *fit], check=True, cwd="clone", env=environment)


def test_dataset_of_your_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example works as printed, given the function that reads the images."""
    code = next(block for block in blocks(PACKAGE / "data" / "README.md", "python") if "class MyData" in block)
    read = "def read(stage):\n    return torch.randint(256, (20, 3, 32, 32), dtype=torch.uint8), torch.arange(20) % 2\n"
    (tmp_path / "readme_data.py").write_text(f"import torch\n{code}\n\n{read}")
    monkeypatch.syspath_prepend(tmp_path)
    data = "--data=readme_data.MyData"
    main(["fit", *TINY_MODEL, *CPU, data, "--data.batch_size=4", "--trainer.max_epochs=1"])
    main(["test", "--ckpt_path=last", data, *CPU])
    assert only(tmp_path, "report.json")
    main(["predict", "--ckpt_path=last", data, *CPU])
    rows = list(csv.DictReader(only(tmp_path, "predictions.csv").read_text().splitlines()))
    assert [row["path"] for row in rows] == [f"predict/{i}" for i in range(20)]
    assert {row["class"] for row in rows} <= {"cat", "dog"}


@pytest.mark.parametrize("path", [path for path in PAGES if blocks(path, "python")], ids=name)
def test_python_examples_compile(path: Path) -> None:
    """Those of the notebooks' README run in test_notebooks.py."""
    for code in blocks(path, "python"):
        compile(code, str(path), "exec")


@pytest.mark.parametrize("path", [*PAGES, *LISTS], ids=name)
def test_links_and_images_exist(path: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        file, _, anchor = link.partition("#")
        if file.startswith(("http://", "https://")):
            continue
        target = path.parent / file if file else path
        assert target.exists(), link
        if target.suffix == ".png":
            assert 0 < target.stat().st_size < 500_000, link
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}, link


def test_readme_links_every_page() -> None:
    links = set(re.findall(r"\]\(([^)#]+)", README.read_text(encoding="utf-8")))
    pages = {name(path) for path in [*ROOMS, *GUIDES] if "TEMPLATE" not in path.name}
    assert pages <= links


@pytest.mark.parametrize("path", [README, *ROOMS], ids=name)
def test_page_is_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    lines = len(text.splitlines())
    if path == README:
        assert lines <= 150 and len(text.split()) <= 1200
    else:
        assert 30 <= lines <= 120
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL).splitlines()
    assert [line for line in prose if len(line) > 120 and not line.startswith(("|", "!["))] == []


def test_list_of_files_is_complete() -> None:
    """Callbacks and frameworks are listed in READMEs of their own."""
    listed = set(re.findall(r"\b(\w+\.py)\b", (PACKAGE / "README.md").read_text(encoding="utf-8")))
    files = {path.name for path in PACKAGE.rglob("*.py") if path.parent.name not in ("callbacks", "frameworks")}
    assert {file for file in files if not file.startswith("__")} <= listed
    assert listed - {"test_architecture.py"} <= files
