"""What only a GPU can show: ``pytest -m gpu``, a few minutes on one CUDA device. Skipped without one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from tests.conftest import REPOSITORY, TINY_KWARGS, make_tree, only, scalars, weights
from vit_finetune import environment, main
from vit_finetune.benchmark.frameworks.task import Task, execute
from vit_finetune.data.random_crop import crop_and_resize, crop_batch
from vit_finetune.model.flops import peak_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
CONFIGS = REPOSITORY / "configs"


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    """The tiny model on generated images, twenty-one steps on the GPU."""
    tree = make_tree(tmp_path / "images", {"train": 54, "val": 6}, side=32)
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


def test_mixed_precision_keeps_32_bits_under_fsdp(options: list[str], tmp_path: Path) -> None:
    main(["fit", *options, "--trainer.strategy=fsdp", "--trainer.precision=bf16-mixed"])
    assert {value.dtype for value in weights(only(tmp_path, "last.ckpt")).values() if value.is_floating_point()} == {
        torch.float32
    }


def test_deterministic_runs_agree(options: list[str], tmp_path: Path) -> None:
    for name in ("one", "two"):
        main(["fit", *options, "--trainer.deterministic=true", f"--experiment={name}"])
    left, right = (weights(only(tmp_path / "runs" / name, "last.ckpt")) for name in ("one", "two"))
    assert all(torch.equal(left[key], right[key]) for key in left)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_clipping_by_norm(precision: str, options: list[str], tmp_path: Path) -> None:
    main(["fit", *options, f"--trainer.precision={precision}", "--trainer.gradient_clip_val=1"])
    assert all(value.isfinite().all() for value in weights(only(tmp_path, "last.ckpt")).values())


def test_loss_scale_is_in_the_checkpoint(options: list[str], tmp_path: Path) -> None:
    main(["fit", *options, "--trainer.precision=16-mixed"])
    assert torch.load(only(tmp_path, "last.ckpt"), weights_only=True)["MixedPrecision"]["scale"] > 0


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_memory_forecast_is_near_what_is_allocated(precision: str, tmp_path: Path) -> None:
    """ViT-S at 224 pixels, batch 32: the rest is what kernels need for a moment, and the batch itself."""
    torch.cuda.reset_peak_memory_stats()
    model = ["--model.name=vit_small_patch16_224", "--model.pretrained=false"]
    data = ["--data=Shapes", "--data.train_size=400", "--data.batch_size=32"]
    trainer = ["--trainer.accelerator=gpu", "--trainer.devices=1", "--trainer.max_steps=5"]
    forecast = ["--trainer.callbacks+=vit_finetune.callbacks.MemoryForecast", f"--trainer.precision={precision}"]
    main(["fit", *model, *data, *trainer, *forecast, "--trainer.log_every_n_steps=1"])
    tags = scalars(tmp_path / "runs")
    predicted, measured = tags["memory/forecast_gb"][0][1], tags["train/peak_memory_gb"][-1][1]
    assert 0.7 < predicted / measured < 1.1


def test_mfu_is_logged_for_a_known_device(options: list[str], tmp_path: Path) -> None:
    main(["fit", *options, "--trainer.precision=bf16-mixed"])
    values = scalars(tmp_path / "runs").get("train/mfu")
    known = peak_of(torch.cuda.get_device_name(), "bf16-mixed") is not None
    assert (values is not None) == known
    assert not known or all(0 < value < 1 for _, value in values or [])


def test_hardware_is_described() -> None:
    assert environment.facts()["gpu"].startswith(torch.cuda.get_device_name())


def test_random_crops_equal_those_of_a_cpu() -> None:
    """At most one step of 255 from the same products on a CPU in float32, and 0.1 on average."""
    images = torch.randint(0, 256, (4, 3, 48, 48), dtype=torch.uint8)
    boxes = torch.tensor([[0, 0, 48, 48], [3, 5, 30, 22], [10, 1, 20, 40], [7, 7, 33, 33]])
    flipped = torch.tensor([False, True, False, True])
    expected = crop_batch(images, boxes, (32, 32), flipped).int()
    crops = crop_and_resize(images.cuda(), boxes.cuda(), (32, 32), flipped.cuda()).cpu().int()
    assert (crops - expected).abs().max() <= 1 and (crops - expected).abs().float().mean() < 0.1


def test_device_stats_without_psutil(options: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("vit_finetune.cli.callback_conflicts.find_spec", lambda name: None)
    main(["fit", *options, "--trainer.callbacks+=DeviceStatsMonitor"])
    assert any("DeviceStatsMonitor" in tag for tag in scalars(tmp_path / "runs"))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("framework", ["fabric", "lightning_trainer", "this_project"])
def test_frameworks_agree(framework: Any, precision: Any, tmp_path: Path) -> None:
    """The losses of plain PyTorch, within the differences of kernels that are not deterministic."""
    shape = {"patch_size": 16, "embed_dim": 16, "depth": 2, "num_heads": 1}
    task = Task(
        "learning", shape, steps=20, precision=precision, device="cuda", weights=str(tmp_path / "initial.safetensors")
    )
    task.write_weights()
    plain, other = (execute(name, task).losses for name in ("plain", framework))
    assert other == pytest.approx(plain, abs=0.02)


def test_no_synchronization_in_steady_state(options: list[str]) -> None:
    """Steps between two logging intervals never wait for the device: PyTorch raises where one does."""
    steady = ["--trainer.log_every_n_steps=1000", "--trainer.limit_val_batches=0", "--trainer.num_sanity_val_steps=0"]
    try:
        main(["fit", *options, *steady, "--trainer.callbacks=tests.gpu.test_gpu.RefuseSync"])
    finally:
        torch.cuda.set_sync_debug_mode("default")


class RefuseSync(Callback):
    """Forbids synchronization from the third to the fifteenth step."""

    def on_train_batch_start(self, trainer: object, module: object, batch: object, batch_idx: int) -> None:
        torch.cuda.set_sync_debug_mode("error" if 3 <= batch_idx <= 15 else "default")
