"""The notebooks have no output, explain their code, run offline and twice in one kernel; their README is correct."""

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY, TINY_KWARGS

FOLDER = REPOSITORY / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
README = (FOLDER / "README.md").read_text(encoding="utf-8")
KERNEL = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    notebook: Path = request.param
    return notebook


@pytest.fixture
def notebook(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def sources(notebook: dict[str, Any], kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


def test_names() -> None:
    names = ["01_data", "02_run", "03_error_analysis", "04_mixed_precision", "05_scaling"]
    assert [path.stem for path in NOTEBOOKS] == names


def test_no_output(notebook: dict[str, Any]) -> None:
    assert notebook["metadata"] == KERNEL
    for number, cell in enumerate(notebook["cells"]):
        assert cell["id"] == str(number) and cell["metadata"] == {}
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None


def test_format(path: Path, notebook: dict[str, Any]) -> None:
    nbformat = pytest.importorskip("nbformat", reason="pip install 'vit_finetune[notebooks]'")
    nbformat.validate(nbformat.from_dict(notebook))
    assert path.read_text(encoding="utf-8") == json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def test_explains_code(notebook: dict[str, Any]) -> None:
    prose, code = sources(notebook, "markdown"), sources(notebook, "code")
    title, opening = prose[0].split("\n\n")[:2]
    assert title.startswith("# ") and opening.count(".") >= 3
    assert "CPU cores" in opening and "pip install -e '.[notebooks]'" in prose[0].replace("\n", " ")
    headings = [line for text in prose for line in text.splitlines() if line.startswith("## ")]
    assert len(headings) >= 6 and all(heading.endswith("?") for heading in headings)
    assert len(prose) >= len(code) / 2
    assert all(text.count("\n") < 40 or text.startswith("%%writefile") for text in code)
    assert any("assert" in text for text in code) and sum("subplots(" in text for text in code) >= 3


def test_no_absolute_path_or_download(notebook: dict[str, Any]) -> None:
    for text in sources(notebook, "code"):
        assert not re.search(r"""["' (=]/\w|[A-Za-z]:\\|~/""", text), "an absolute path"
        assert not re.search(r"https?:|urlopen|wget|curl|pip install|pretrained=True", text), "a download"


@pytest.mark.slow
def test_runs_twice_in_one_kernel(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="pip install 'vit_finetune[notebooks]'")
    client = pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # nothing listens on this port
    before = set(REPOSITORY.glob("*")) | set(path.parent.rglob("*"))
    notebook = nbformat.read(path, as_version=4)
    notebook["cells"] += deepcopy(notebook["cells"])
    resources = {"metadata": {"path": str(path.parent)}}
    client.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    assert set(REPOSITORY.glob("*")) | set(path.parent.rglob("*")) == before


def test_readme_lists_notebooks_and_links_exist() -> None:
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert [link for link in links if link.endswith(".ipynb")] == [path.name for path in NOTEBOOKS]
    for link in links:
        assert 0 < (FOLDER / link).stat().st_size < 500_000


def test_readme_python_blocks(tmp_path: Path) -> None:
    """The blocks run as printed, with fewer batches, a tiny model and generated images."""
    pytest.importorskip("pandas", reason="pip install 'vit_finetune[notebooks]'")
    first, second = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    recipe = REPOSITORY / "configs" / "quickstart.yaml"
    short = [
        "--trainer.max_epochs=1",
        "--trainer.limit_train_batches=2",
        "--data.train_size=100",
        "--data.test_size=10",
    ]
    names: dict[str, Any] = {}
    exec(substitute(first, '"configs/quickstart.yaml"', ", ".join(map(repr, [str(recipe), *short]))), names)
    assert names["probabilities"].shape == (8, 10) and set(names["labels"]) <= set(names["model"].class_names)
    assert list(names["scalars"]) == ["run", "tag", "step", "value", "time"]
    assert names["table"].index.tolist() == ["quickstart/version_0"] and names["table"]["model.lr"].tolist() == [1e-3]

    tiny = f'ViTClassifier("vit_tiny_patch16_224", img_size=32, pretrained=False, timm_kwargs={TINY_KWARGS})'
    second = substitute(second, "ViTClassifier(img_size=96)", tiny)
    second = substitute(second, 'CIFAR10("data")', "Shapes(train_size=100)")
    exec(substitute(second, "import CIFAR10", "import Shapes"), names)
    assert names["trainer"].state.finished


def substitute(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1
    return text.replace(old, new)
