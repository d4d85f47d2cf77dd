"""The notebooks: stripped, written as prose, at home anywhere, and they run twice in one kernel."""

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY

NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
KERNEL = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


@pytest.fixture
def notebook(path: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return read


def sources(notebook: dict[str, Any], kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


def test_all_are_here() -> None:
    names = ["01_data", "02_run", "03_error_analysis", "04_mixed_precision", "05_scaling"]
    assert [path.stem for path in NOTEBOOKS] == names


def test_nothing_of_a_run_is_kept(notebook: dict[str, Any]) -> None:
    assert notebook["metadata"] == KERNEL
    for number, cell in enumerate(notebook["cells"]):
        assert cell["id"] == str(number) and cell["metadata"] == {}
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None


def test_reads_as_prose(notebook: dict[str, Any]) -> None:
    prose, code = sources(notebook, "markdown"), sources(notebook, "code")
    title, opening = prose[0].split("\n\n")[:2]
    assert title.startswith("# ") and opening.count(".") >= 3
    assert "CPU cores" in opening and "pip install -e '.[notebooks]'" in prose[0].replace("\n", " ")
    headings = [line for text in prose for line in text.splitlines() if line.startswith("## ")]
    assert len(headings) >= 6 and all(heading.endswith("?") for heading in headings)
    assert len(prose) >= len(code) / 2
    assert all(text.count("\n") < 40 or text.startswith("%%writefile") for text in code)
    assert any("assert" in text for text in code) and sum("subplots(" in text for text in code) >= 3


def test_at_home_on_any_machine(notebook: dict[str, Any]) -> None:
    for text in sources(notebook, "code"):
        assert not re.search(r"""["' (=]/\w|[A-Za-z]:\\|~/""", text), "an absolute path"
        assert not re.search(r"https?:|urlopen|wget|curl|pip install|pretrained=True", text), "a download"


@pytest.mark.slow
def test_runs_twice_in_one_kernel(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="pip install 'vit_finetune[notebooks]'")
    client = pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # nobody listens there
    before = set(REPOSITORY.glob("*")) | set(path.parent.rglob("*"))
    notebook = nbformat.read(path, as_version=4)
    notebook["cells"] += deepcopy(notebook["cells"])
    place = {"metadata": {"path": str(path.parent)}}
    client.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=place).execute()  # raises on errors
    assert set(REPOSITORY.glob("*")) | set(path.parent.rglob("*")) == before
