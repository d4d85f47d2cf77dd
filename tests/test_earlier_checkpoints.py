"""A checkpoint of version 0.1.0, written before the package was reorganized, still serves every command.

``assets/version_0.1.0.ckpt`` was written within an epoch, at step 9, by a run on ``Shapes`` with an EMA of the weights;
``assets/version_0.1.0.csv`` holds what ``predict`` returned for it.
"""

import csv
import shutil
from pathlib import Path

import pytest
import torch

from tests.conftest import CPU, only, scalars
from vit_finetune import ViTClassifier, main

ASSETS = Path(__file__).parent / "assets"
STATE_SUM = -0.10405312282091472  # of the head's weights, where version 0.1.0 itself resumed the run to step 12


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copy(ASSETS / "version_0.1.0.ckpt", tmp_path / "old.ckpt"))


def test_is_small() -> None:
    assert (ASSETS / "version_0.1.0.ckpt").stat().st_size < 200_000


def test_loads(checkpoint: Path) -> None:
    model = ViTClassifier.load(checkpoint)
    assert model.class_names is not None and model.class_names[:2] == ["bar", "crescent"]
    assert model.temperature == pytest.approx(4.0)


def test_predicts_as_before(checkpoint: Path) -> None:
    main(["predict", f"--ckpt_path={checkpoint}", *CPU, "--predictions.top_k=1", "--predictions.path=new.csv"])
    old, new = (list(csv.DictReader(path.open())) for path in (ASSETS / "version_0.1.0.csv", Path("new.csv")))
    assert [row["path"] for row in new] == [row["path"] for row in old]
    assert [row["class"] for row in new] == [row["class"] for row in old]
    assert [float(row["probability"]) for row in new] == pytest.approx([float(r["probability"]) for r in old], abs=1e-5)


def test_tests_as_before(checkpoint: Path, tmp_path: Path) -> None:
    main(["test", f"--ckpt_path={checkpoint}", *CPU, "--experiment=old"])
    metrics = scalars(tmp_path / "runs" / "old")
    assert metrics["test/acc"][0][1] == pytest.approx(0.1) and metrics["test/loss"][0][1] == pytest.approx(
        2.3088, abs=1e-4
    )


def test_exports(checkpoint: Path) -> None:
    main(["export", f"--ckpt_path={checkpoint}", "--format=timm", "--output=exported", *CPU])
    assert Path("exported/model.safetensors").exists()


def test_resumes_within_its_epoch(checkpoint: Path, tmp_path: Path) -> None:
    """The position in the data, the EMA and the optimizer state are those of the checkpoint."""
    main(["fit", f"--ckpt_path={checkpoint}", *CPU, "--trainer.max_steps=12", "--experiment=resumed"])
    state = torch.load(only(tmp_path / "runs" / "resumed", "last.ckpt"), weights_only=True)
    assert state["global_step"] == 12
    assert float(state["state_dict"]["net.head.weight"].double().sum()) == pytest.approx(STATE_SUM, abs=1e-4)
