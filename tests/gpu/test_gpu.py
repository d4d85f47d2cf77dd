"""What only a GPU can show: ``pytest -m gpu``, a few minutes on one CUDA device. Skipped without one."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback

from tests.conftest import REPOSITORY, TINY_KWARGS, make_tree, only, scalars, weights
from vit_finetune import main

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
CONFIGS = REPOSITORY / "configs"


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    """The tiny model on generated pictures, twenty-one steps on the GPU."""
    tree = make_tree(tmp_path / "pictures", {"train": 54, "val": 6}, side=32)
    model = ["--model.name=vit_tiny_patch16_224", "--model.pretrained=false", "--model.img_size=32"]
    model += [f"--model.timm_kwargs={TINY_KWARGS}", "--model.lr=1e-3"]
    data = ["--data=ImageFolder", f"--data.root={tree}", "--data.batch_size=8"]
    trainer = ["--trainer.accelerator=gpu", "--trainer.devices=1", "--trainer.max_epochs=1"]
    return [*model, *data, *trainer, "--trainer.log_every_n_steps=1"]


@pytest.mark.parametrize(
    "overlay",
    ["precision/32-true", "precision/tf32", "precision/bf16-mixed", "precision/16-mixed", "precision/bf16-true"]
    + ["strategy/fsdp", "speed/compile", "speed/grad_checkpointing"],
)
def test_overlay_trains_and_its_file_loads_on_a_cpu(overlay: str, options: list[str], tmp_path: Path) -> None:
    """The loss falls; the full-state file gives the same score on one CPU process."""
    main(["fit", *options, f"--config={CONFIGS / overlay}.yaml"])
    tags = scalars(tmp_path / "runs")
    losses = [value for _, value in tags["train/loss_step"]]
    assert losses[-1] < losses[0]
    last = only(tmp_path, "last.ckpt")
    assert all(value.device.type == "cpu" or value.is_cuda for value in weights(last).values())
    main(["validate", f"--ckpt_path={last}", "--trainer.accelerator=cpu", "--experiment=cpu"])


def test_deterministic_runs_agree(options: list[str], tmp_path: Path) -> None:
    for name in ("one", "two"):
        main(["fit", *options, "--trainer.deterministic=true", f"--experiment={name}"])
    left, right = (weights(only(tmp_path / "runs" / name, "last.ckpt")) for name in ("one", "two"))
    assert all(torch.equal(left[key], right[key]) for key in left)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_clipping_by_norm(precision: str, options: list[str]) -> None:
    main(["fit", *options, f"--trainer.precision={precision}", "--trainer.gradient_clip_val=1"])


def test_loss_scale_is_in_the_checkpoint(options: list[str], tmp_path: Path) -> None:
    main(["fit", *options, "--trainer.precision=16-mixed"])
    assert torch.load(only(tmp_path, "last.ckpt"), weights_only=True)["MixedPrecision"]["scale"] > 0


def test_no_synchronisation_in_steady_state(options: list[str]) -> None:
    """Steps between two logging intervals never wait for the device: PyTorch raises where one does."""
    steady = ["--trainer.log_every_n_steps=1000", "--trainer.limit_val_batches=0", "--trainer.num_sanity_val_steps=0"]
    try:
        main(["fit", *options, *steady, "--trainer.callbacks=tests.gpu.test_gpu.RefuseSync"])
    finally:
        torch.cuda.set_sync_debug_mode("default")


class RefuseSync(Callback):
    """Forbids synchronisation from the third to the fifteenth step."""

    def on_train_batch_start(self, trainer: object, module: object, batch: object, batch_idx: int) -> None:
        torch.cuda.set_sync_debug_mode("error" if 3 <= batch_idx <= 15 else "default")
