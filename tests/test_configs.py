"""Every file in configs/ runs through the real command line, shrunk."""

from pathlib import Path

import pytest
import yaml

from tests.conftest import CPU, REPOSITORY, TINY_MODEL, only, scalars
from vit_finetune import main

CONFIGS = sorted((REPOSITORY / "configs").rglob("*.yaml"))
SHRINK = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=2", "--trainer.limit_val_batches=1"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_config_runs(path: Path, cifar: Path, tmp_path: Path) -> None:
    text = path.read_text()
    shapes = "data: Shapes" in text
    data = ["--data.train_size=200"] if shapes else [f"--data.root={cifar}"]
    main(["fit", f"--config={path}", *CPU, *SHRINK, *([] if shapes else TINY_MODEL), *data, "--data.batch_size=4"])
    run = tmp_path / "runs" / path.stem
    assert only(run, "last.ckpt") and only(run, "best-*.ckpt")
    monitor = yaml.safe_load(only(run, "config.yaml").read_text())["best_checkpoint"]["monitor"]
    assert monitor in scalars(run)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_config_opens_with_what_a_reader_needs(path: Path) -> None:
    """Command, purpose, hardware, and what was measured or that nothing was."""
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert f"--config {path.relative_to(REPOSITORY)}" in header[0]
    for word in ("Shows:", "Hardware:", "Measured:"):
        assert any(word in line for line in header), word


def test_quickstart_precision_follows_the_processor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = REPOSITORY / "configs" / "quickstart.yaml"
    for units, precision in ((True, "bf16-mixed"), (False, "32-true")):
        monkeypatch.setattr("vit_finetune.preflight.has_bf16_units", lambda units=units: units)
        main(["fit", f"--config={config}", *CPU, *SHRINK, "--data.train_size=200", f"--experiment=units-{units}"])
        saved = yaml.safe_load(only(Path("runs") / f"units-{units}", "config.yaml").read_text())
        assert saved["trainer"]["precision"] == precision
