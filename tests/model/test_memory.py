"""Memory forecast compared with the memory of real runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer

from tests.conftest import TINY_KWARGS, scalars
from vit_finetune import main
from vit_finetune.data.datasets import InMemoryDataset
from vit_finetune.data.samplers import ResumableDataLoader, ResumableDistributedSampler
from vit_finetune.model import flops, memory, vit
from vit_finetune.model.config import ViTConfig
from vit_finetune.model.memory import Layout, forecast
from vit_finetune.model.precision import compute_dtype

SEEN: list[dict[str, int]] = []


class Measure(Callback):
    """Add up the bytes after a backward pass and an optimizer step."""

    def on_before_optimizer_step(self, trainer: Trainer, module: Any, optimizer: Any) -> None:
        self.gradients = sum(p.grad.nbytes for p in module.parameters() if p.grad is not None)

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        ema = module.ema_callback
        states = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
        SEEN.append(
            {
                "parameters": sum(parameter.nbytes for parameter in module.parameters()),
                "gradients": self.gradients,
                "optimizer": sum(value.nbytes for value in states if isinstance(value, torch.Tensor)),
                "average": sum(value.nbytes for value in ema.average.values()) if ema else 0,
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
    ids=["full", "mixed, sgd", "half, frozen", "half, EMA", "LoRA, EMA"],
)
def test_forecast_equals_the_memory_of_a_run(options: list[str], folder_args: list[str], tmp_path: Path) -> None:
    """To the byte; the forecast is logged next to the measured memory."""
    if "--model.lora_rank=4" in options:
        pytest.importorskip("peft")
    SEEN.clear()
    added = ["--trainer.callbacks+=tests.model.test_memory.Measure"]
    added += ["--trainer.callbacks+=vit_finetune.callbacks.MemoryForecast", "--trainer.limit_train_batches=2"]
    main(["fit", *folder_args, *options, *added])
    tags = scalars(tmp_path / "runs")
    for part, size in SEEN[0].items():
        assert tags[f"memory/{part}_gb"][0][1] * 1e9 == pytest.approx(size, rel=1e-6), part
    total = sum(tags[f"memory/{part}_gb"][0][1] for part in (*SEEN[0], "activations"))
    assert tags["memory/forecast_gb"][0][1] == pytest.approx(total)
    width = 2 if "--trainer.precision=bf16-true" in options else 4
    assert tags["memory/trainable_parameters"][0][1] * width == pytest.approx(SEEN[0]["gradients"], rel=1e-6)
    # Throughput is logged too.
    for name in ("train/seconds", "train/first_step_seconds"):
        assert len(tags[name]) == 1 and tags[name][0][1] > 0
    assert 0 < tags["train/data_time_fraction"][0][1] < 1
    per_image = tags["train/tflops"][0][1] * 1e12 / tags["train/images_per_second"][0][1]
    chosen = {"freeze_backbone": "--model.freeze_backbone=true" in options}
    chosen |= {"lora_rank": 4} if "--model.lora_rank=4" in options else {}
    assert per_image == pytest.approx(flops.flops_per_image(config(**chosen), 3), rel=1e-5)
    assert "train/mfu" not in tags


def config(**options: Any) -> ViTConfig:
    return ViTConfig("vit_tiny_patch16_224", 32, TINY_KWARGS, **options)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("options", [{}, {"grad_checkpointing": True}, {"freeze_backbone": True}, {"drop_path": 0.2}])
def test_activations_equal_those_of_a_real_pass(options: dict[str, Any], precision: str) -> None:
    chosen = config(**options)
    net: Any = vit.build(chosen, 10)
    net.set_grad_checkpointing(chosen.grad_checkpointing)
    if chosen.freeze_backbone:
        vit.freeze_backbone(net)
    if precision == "bf16-true":
        net.bfloat16()
    vit.set_attention_kernel(net, torch.device("cpu"), compute_dtype(precision))
    real = memory.saved_bytes(net, torch.rand(16, 3, 32, 32), precision)
    assert forecast(chosen, 10, 16, precision=precision).activations == pytest.approx(real, rel=0.02)


def test_memory_of_a_sharded_network() -> None:
    """By hand for AdamW: two states like the parameter and a step count of 4 bytes per parameter tensor."""
    tiny = config()
    sizes = {name: p.shape for name, p in vit.build_meta(tiny, 10).named_parameters()}
    whole = 4 * sum(shape.numel() for shape in sizes.values())
    one = forecast(tiny, 10, 4)
    assert (one.parameters, one.gradients, one.optimizer) == (whole, whole, 2 * whole + 4 * len(sizes))
    assert forecast(tiny, 10, 4, layout=Layout(buckets=True)).buckets == whole
    assert forecast(tiny, 10, 4, layout=Layout(buckets=True)).total == one.total + whole

    eighth = 4 * sum(-(-shape[0] // 8) * shape[1:].numel() for shape in sizes.values())
    sharded = forecast(tiny, 10, 4, layout=Layout(shards=8))
    assert sharded.parameters == sharded.gradients == eighth and sharded.optimizer == 2 * eighth + 4 * len(sizes)
    assert sharded.activations == one.activations

    # Per block of width 24: 24*24 of the projection, 2 * 24*96 of the MLP's matrices and 96 of its bias are split.
    split = 4 * 2 * (24 * 24 + 2 * 24 * 96 + 96)
    assert forecast(tiny, 10, 4, layout=Layout(tensor_parallel=2)).parameters == whole - split // 2


def test_optimizer_whose_step_depends_on_values_is_unknown() -> None:
    unknown = forecast(config(optimizer="sgdp"), 10, 4)
    assert unknown.optimizer is None and str(unknown).startswith("at least ") and "optimizer unknown" in str(unknown)


def test_doctor_prints_the_forecast(
    folder_args: list[str], capsys: pytest.CaptureFixture[str], fails: Callable[..., str]
) -> None:
    main(["doctor", *folder_args, "--trainer.strategy=ddp"])
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("memory"))
    assert line == f"{'memory':13s} forecast per device: {forecast(config(), 10, 4, layout=Layout(buckets=True))}"
    assert "Similar: adamw" in fails("doctor", *folder_args, "--model.optimizer=adamww")


def test_time_spent_waiting_for_batches_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a fake clock, each batch takes one second to load and ten to train on: only the former counts."""
    now = [0.0]

    class Slow(InMemoryDataset):
        def images_at(self, positions: torch.Tensor) -> torch.Tensor:
            now[0] += 1
            return super().images_at(positions)

    monkeypatch.setattr("vit_finetune.data.samplers.time.perf_counter", lambda: now[0])
    images = Slow(torch.zeros(6, 3, 4, 4, dtype=torch.uint8), torch.zeros(6, dtype=torch.long), list("abcdef"))
    sampler = ResumableDistributedSampler(images, num_replicas=1, rank=0)
    loader = ResumableDataLoader(images, sampler=sampler, batch_size=2, collate_fn=lambda batch: batch)
    for _ in loader:
        now[0] += 10
    assert loader.waited == 3
