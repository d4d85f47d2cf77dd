"""``main([...])`` in the cells of a real Jupyter kernel."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, TINY_MODEL, make_tree

pytestmark = pytest.mark.slow
LIMIT = 120  # seconds


@pytest.fixture
def cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Runs code in a kernel; returns all that it printed and the error it ended with."""
    manager = pytest.importorskip("jupyter_client.manager", reason="pip install 'vit_finetune[notebooks]'")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    kernel, client = manager.start_new_kernel(cwd=str(tmp_path))
    tree = make_tree(tmp_path / "images", {"train": 6, "val": 3})
    fit = ["fit", *TINY_MODEL, "--data=ImageFolder", f"--data.root={tree}", "--data.batch_size=4"]

    def run(code: str, interrupt_when: Callable[[], bool] | None = None) -> str:
        printed: list[str] = []

        def hook(message: dict) -> None:  # type: ignore[type-arg]
            printed.append(message["content"].get("text", ""))

        done = threading.Event()
        if interrupt_when is not None:
            threading.Thread(target=lambda: _interrupt(kernel, interrupt_when, done), daemon=True).start()
        reply = client.execute_interactive(code, timeout=LIMIT, output_hook=hook)["content"]
        done.set()
        return "".join(printed) + (f"{reply['ename']}: {reply['evalue']}" if reply["status"] == "error" else "")

    run(f"from vit_finetune import ViTClassifier, main\nfit = {fit} + ['--trainer.accelerator=cpu']")
    yield run
    client.stop_channels()
    kernel.shutdown_kernel(now=True)


def _interrupt(kernel: object, when: Callable[[], bool], done: threading.Event) -> None:
    while not when() and not done.wait(0.2):
        pass
    kernel.interrupt_kernel()  # type: ignore[attr-defined]


def test_fit_then_load(cell: Callable[..., str]) -> None:
    out = cell("main(fit + ['--trainer.devices=1', '--trainer.max_epochs=1'])")
    assert "best  val/acc" in out and "Error" not in out and "args parameter" not in out
    assert cell("print(ViTClassifier.load().class_names)") == "['a', 'b', 'c']\n"


def test_processes_that_a_notebook_cannot_start_are_refused(cell: Callable[..., str], tmp_path: Path) -> None:
    for strategy in ("auto", "ddp", "ddp_spawn", "ddp_notebook"):
        out = cell(f"main(fit + ['--trainer.devices=2', '--trainer.strategy={strategy}'])")
        assert "!python -m vit_finetune fit ... or" in out and "SystemExit: 2" in out
        assert not list(tmp_path.rglob("version_*"))
    assert cell("print('alive')") == "alive\n"
    cell("import shlex, sys\nwords = shlex.join(fit)")
    out = cell("!{sys.executable} -m vit_finetune {words} --trainer.devices 2 --trainer.max_epochs 1")
    assert "global batch 8" in out and "best  val/acc" in out


def test_the_stop_button_saves_and_the_kernel_lives(cell: Callable[..., str], tmp_path: Path) -> None:
    out = cell(
        "main(fit + ['--trainer.devices=1', '--trainer.max_epochs=100000'])",
        interrupt_when=lambda: bool(list(tmp_path.rglob("last.ckpt"))),
    )
    assert "saved runs/imagefolder/version_0/checkpoints/last.ckpt" in out and "SystemExit: 130" in out
    assert cell("print(ViTClassifier.load('last').class_names)") == "['a', 'b', 'c']\n"
    code = "import pathlib, time; pathlib.Path('asleep').touch(); time.sleep(60)"
    assert "KeyboardInterrupt" in cell(code, interrupt_when=(tmp_path / "asleep").exists)  # as before
