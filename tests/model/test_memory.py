"""The memory forecast against what a run really holds, and what an image costs by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer

from tests.conftest import TINY_KWARGS, scalars
from vit_finetune import ViTClassifier, main
from vit_finetune.data.datasets import InMemoryDataset
from vit_finetune.data.samplers import ResumableDataLoader, ResumableDistributedSampler
from vit_finetune.model import flops, memory, vit
from vit_finetune.model.memory import Layout, forecast

seen: list[dict[str, int]] = []


class Measure(Callback):
    """Adds up the bytes that are there after a backward pass and an optimizer step."""

    def on_before_optimizer_step(self, trainer: Trainer, module: Any, optimizer: Any) -> None:
        self.gradients = sum(p.grad.nbytes for p in module.parameters() if p.grad is not None)

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        states = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
        seen.append(
            {
                "parameters": sum(parameter.nbytes for parameter in module.parameters()),
                "gradients": self.gradients,
                "optimizer": sum(value.nbytes for value in states if isinstance(value, torch.Tensor)),
                "average": sum(value.nbytes for value in module.average._average.values()) if module.average else 0,
            }
        )


@pytest.mark.parametrize(
    "options",
    [
        ["--trainer.precision=32-true"],
        ["--trainer.precision=bf16-mixed", "--model.optimizer=sgd"],
        ["--trainer.precision=bf16-true", "--model.freeze_backbone=true"],
        ["--trainer.precision=bf16-true", "--model.ema=0.9"],
        ["--trainer.precision=32-true", "--model.lora_rank=4", "--model.ema=0.9"],
    ],
    ids=["full", "mixed, sgd", "half, frozen", "half, averaged", "low rank, averaged"],
)
def test_forecast_equals_what_a_run_holds(options: list[str], folder_args: list[str], tmp_path: Path) -> None:
    """To the byte; and it is logged beside the measured memory."""
    if "--model.lora_rank=4" in options:
        pytest.importorskip("peft")
    seen.clear()
    added = ["--trainer.callbacks+=tests.test_memory.Measure"]
    added += ["--trainer.callbacks+=vit_finetune.callbacks.MemoryForecast", "--trainer.limit_train_batches=2"]
    main(["fit", *folder_args, *options, *added])
    tags = scalars(tmp_path / "runs")
    for part, size in seen[0].items():
        assert tags[f"memory/{part}_gb"][0][1] * 1e9 == pytest.approx(size, rel=1e-6), part
    total = sum(tags[f"memory/{part}_gb"][0][1] for part in (*seen[0], "activations"))
    assert tags["memory/forecast_gb"][0][1] == pytest.approx(total)
    # What else is logged about speed.
    for name in ("train/seconds", "train/first_step_seconds"):
        assert len(tags[name]) == 1 and tags[name][0][1] > 0
    assert 0 < tags["train/data_time_fraction"][0][1] < 1
    per_image = tags["train/tflops"][0][1] * 1e12 / tags["train/images_per_second"][0][1]
    chosen = {"freeze_backbone": "--model.freeze_backbone=true" in options}
    chosen |= {"lora_rank": 4} if "--model.lora_rank=4" in options else {}
    assert per_image == pytest.approx(flops.flops_per_image(hparams(**chosen), 3), rel=1e-5)
    assert "train/mfu" not in tags


def hparams(**options: Any) -> Any:
    """The tiny model's."""
    return ViTClassifier("vit_tiny_patch16_224", 32, False, timm_kwargs=TINY_KWARGS, **options).hparams


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("options", [{}, {"grad_checkpointing": True}, {"freeze_backbone": True}, {"drop_path": 0.2}])
def test_activations_equal_those_of_a_real_pass(options: dict[str, Any], precision: str) -> None:
    h = hparams(**options)
    net = vit.build(h["name"], 10, 32, h["drop_path"], TINY_KWARGS)
    net.set_grad_checkpointing(h["grad_checkpointing"])  # type: ignore[operator]
    if h["freeze_backbone"]:
        vit.freeze_backbone(net)
    if precision == "bf16-true":
        net.bfloat16()
    vit.choose_attention(net, torch.device("cpu"), precision)
    real = memory.saved_bytes(net, torch.rand(16, 3, 32, 32), precision)
    assert forecast(h, 10, 16, precision).activations == pytest.approx(real, rel=0.02)


def test_what_devices_share() -> None:
    """By hand for AdamW: two states like the parameter and a step count of 4 bytes for each parameter tensor."""
    h = hparams()
    sizes = {name: p.shape for name, p in vit.build_meta(h, 10).named_parameters()}
    whole = 4 * sum(shape.numel() for shape in sizes.values())
    one = forecast(h, 10, 4)
    assert (one.parameters, one.gradients, one.optimizer) == (whole, whole, 2 * whole + 4 * len(sizes))
    assert forecast(h, 10, 4, layout=Layout(buckets=True)).buckets == whole
    assert forecast(h, 10, 4, layout=Layout(buckets=True)).total == one.total + whole

    eighth = 4 * sum(-(-shape[0] // 8) * shape[1:].numel() for shape in sizes.values())
    sharded = forecast(h, 10, 4, layout=Layout(shards=8))
    assert sharded.parameters == sharded.gradients == eighth and sharded.optimizer == 2 * eighth + 4 * len(sizes)
    assert sharded.activations == one.activations

    # Per block of width 24: 24*24 of the projection, 2 * 24*96 of the MLP's matrices and 96 of its bias are halved.
    halved = 4 * 2 * (24 * 24 + 2 * 24 * 96 + 96)
    assert forecast(h, 10, 4, layout=Layout(tensor_parallel=2)).parameters == whole - halved // 2


def test_an_optimizer_that_decides_by_values_is_unknown() -> None:
    unknown = forecast(hparams(optimizer="sgdp"), 10, 4)
    assert unknown.optimizer is None and str(unknown).startswith("at least ") and "optimizer unknown" in str(unknown)


def test_doctor_prints_the_forecast(
    folder_args: list[str], capsys: pytest.CaptureFixture[str], fails: Callable[..., str]
) -> None:
    main(["doctor", *folder_args, "--trainer.strategy=ddp"])
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("memory"))
    assert line == f"{'memory':13s} forecast for each device: {forecast(hparams(), 10, 4, layout=Layout(buckets=True))}"
    assert "Similar: adamw" in fails("doctor", *folder_args, "--model.optimizer=adamww")


def test_flops_by_hand() -> None:
    """Tiny ViT with 17 tokens of width 24, two heads, two blocks: products forward, twice that backward.

    The images need no gradient, which saves the patch embedding's half of the backward pass.
    """
    tokens, width, depth, classes = 17, 24, 2, 10
    patches = 2 * 16 * (8 * 8 * 3) * width
    block = 2 * tokens * width * (3 * width + width + 8 * width) + 2 * 2 * tokens * tokens * width
    head = 2 * width * classes
    assert flops.flops_per_image(hparams(), classes) == 2 * patches + 3 * (depth * block + head)
    assert flops.flops_per_image(hparams(freeze_backbone=True), classes) == patches + depth * block + 2 * head


def test_flops_of_low_rank_updates_by_hand() -> None:
    """Frozen products lose a third, but for the projection whose input needs no gradient either; updates have all."""
    pytest.importorskip("peft")
    tokens, width, rank, classes = 17, 24, 4, 10
    patches = 2 * 16 * (8 * 8 * 3) * width
    frozen = 2 * tokens * width * (3 * width + width + 8 * width)
    attention = 2 * 2 * tokens * tokens * width
    updates = 2 * tokens * rank * ((width + 3 * width) + (width + width))
    first_input = 2 * tokens * width * 3 * width + 2 * tokens * width * rank  # nothing below it is trained
    expected = patches + 2 * (2 * frozen + 3 * attention + 3 * updates) - first_input + 3 * 2 * width * classes
    assert flops.flops_per_image(hparams(lora_rank=rank), classes) == expected


def test_no_flops_where_their_number_changes_by_epoch(folder_args: list[str], tmp_path: Path) -> None:
    main(["fit", *folder_args, "--model.unfreeze_by=2", "--trainer.limit_train_batches=2"])
    tags = scalars(tmp_path / "runs")
    assert "train/images_per_second" in tags and "train/tflops" not in tags


@pytest.mark.parametrize(
    ("name", "precision", "matmul", "peak"),
    [
        ("NVIDIA H200", "bf16-mixed", "highest", 989e12),
        ("NVIDIA H200", "32-true", "high", 494e12),
        ("NVIDIA H200", "32-true", "highest", 67e12),
        ("NVIDIA H200 NVL", "bf16-mixed", "highest", 835e12),
        ("NVIDIA GB200", "bf16-mixed", "highest", None),
        ("NVIDIA H100 PCIe", "16-mixed", "highest", 756e12),
        ("NVIDIA H100 80GB HBM3", "bf16-true", "highest", 989e12),
        ("NVIDIA A100-SXM4-80GB", "bf16-mixed", "highest", 312e12),
        ("Tesla T4", "16-mixed", "highest", 65e12),
        ("Tesla T4", "bf16-mixed", "highest", None),
        ("Tesla T4", "32-true", "high", 8.1e12),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16-mixed", "highest", None),
        ("NVIDIA H200", "64-true", "highest", None),
        ("NVIDIA RTX A1000 Laptop GPU", "bf16-mixed", "highest", None),
        ("NVIDIA T400 4GB", "16-mixed", "highest", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16-mixed", "highest", None),
        ("Some other card", "bf16-mixed", "highest", None),
    ],
)
def test_peak_of_known_devices(name: str, precision: str, matmul: str, peak: float | None) -> None:
    assert flops.peak_of(name, precision, matmul) == peak


def test_the_wait_for_batches_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch takes a second of a made-up clock to fetch and ten to work on: only the former counts."""
    now = [0.0]

    class Slow(InMemoryDataset):
        def images_at(self, positions: torch.Tensor) -> torch.Tensor:
            now[0] += 1
            return super().images_at(positions)

    monkeypatch.setattr("vit_finetune.data.datasets.time.perf_counter", lambda: now[0])
    images = Slow(torch.zeros(6, 3, 4, 4, dtype=torch.uint8), torch.zeros(6, dtype=torch.long), list("abcdef"))
    sampler = ResumableDistributedSampler(images, num_replicas=1, rank=0)
    loader = ResumableDataLoader(images, sampler=sampler, batch_size=2, collate_fn=lambda batch: batch)
    for _ in loader:
        now[0] += 10
    assert loader.waited == 3
