"""FSDP (version 1) on two processes over gloo, with the options of configs/strategy/fsdp.yaml.

Lightning refuses FSDPStrategy without CUDA; a subclass passes the check, which compares the class. PyTorch refuses a
CPU only where no device is given ("FSDP needs a non-CPU accelerator device").
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy
from torch.distributed.fsdp import FullyShardedDataParallel

from tests.conftest import CPU, REPOSITORY, TINY_MODEL, make_tree, only, run_command, scalars, weights
from vit_finetune import ViTClassifier, main

CONFIG = REPOSITORY / "configs" / "strategy" / "fsdp.yaml"
STOP = "--trainer.callbacks+=tests.model.test_ema.StopAfterOne"


class FSDPOnCPU(FSDPStrategy):
    """FSDPStrategy with gloo on a CPU.

    Lightning passes the index of the device, which a CPU does not have. PyTorch accepts the device itself.
    """

    def _setup_model(self, model: torch.nn.Module) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(
            model,
            mixed_precision=self.mixed_precision_config,
            sharding_strategy=self.sharding_strategy,
            device_id=self.root_device,
            **self.kwargs,
        )


class Units(Callback):
    """Write what FSDP has wrapped, and the number of parameters that each process holds."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        units = [m for m in trainer.strategy.model.modules() if isinstance(m, FullyShardedDataParallel)]  # type: ignore[union-attr]
        inner = [type(unit.module).__name__ for unit in units]
        held = sum(parameter.numel() for parameter in pl_module.parameters())
        Path(f"units-{trainer.global_rank}.json").write_text(json.dumps({"inner": inner, "held": held}))


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    """Twelve steps on fixed images with clipping by norm, every step logged."""
    tree = make_tree(tmp_path / "images", {"train": 8, "val": 3})
    options = [*TINY_MODEL, "--data=ImageFolder", f"--data.root={tree}", "--trainer.max_epochs=3", "--model.lr=1e-3"]
    options += ["--trainer.log_every_n_steps=1", "--trainer.gradient_clip_val=0.1"]
    return [*options, "--data.shift=0", "--data.crop_scale=0", "--data.flip=false"]


@pytest.fixture
def sharded(tmp_path: Path) -> list[str]:
    """The overlay, for two processes on a CPU."""
    overlay: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    overlay["trainer"]["strategy"]["class_path"] = f"{__name__}.FSDPOnCPU"
    overlay["trainer"] |= {"accelerator": "cpu", "devices": 2}
    (tmp_path / "fsdp_on_cpu.yaml").write_text(yaml.safe_dump(overlay))
    return ["--config=fsdp_on_cpu.yaml", "--data.batch_size=3", "--experiment=many"]


def assert_equal_runs(folder: Path, tags: tuple[str, ...] = ("train/loss", "val/loss", "val/acc")) -> None:
    """Losses and weights of the runs ``one`` and ``many`` are equal within 1e-4."""
    one, many = (scalars(folder / "runs" / name) for name in ("one", "many"))
    for tag in tags:
        assert [value for _, value in one[tag]] == pytest.approx([value for _, value in many[tag]], abs=1e-4), tag
    left, right = (weights(only(folder / "runs" / name, "last.ckpt")) for name in ("one", "many"))
    assert left.keys() == right.keys()
    for key, value in left.items():
        torch.testing.assert_close(value, right[key], atol=1e-4, rtol=1e-3, msg=key)


def test_equals_one_process(options: list[str], sharded: list[str], tmp_path: Path) -> None:
    """Each block is a unit, each process holds half of the parameters, and the checkpoint is one ordinary file."""
    main(["fit", *options, *CPU, "--data.batch_size=6", "--experiment=one"])
    run_command("fit", *options, *sharded, f"--trainer.callbacks+={__name__}.Units", folder=tmp_path)
    assert_equal_runs(tmp_path)
    last = only(tmp_path / "runs" / "many", "last.ckpt")
    model = ViTClassifier.load(last)
    total = sum(parameter.numel() for parameter in model.parameters())
    units = [json.loads((tmp_path / f"units-{rank}.json").read_text()) for rank in (0, 1)]
    for unit in units:
        assert unit["inner"] == ["ViTClassifier", *["Block"] * len(model.net.blocks)]  # type: ignore[union-attr, arg-type]
        assert unit["held"] == pytest.approx(total / 2, rel=0.02)  # flattened blocks are padded
    main(["test", f"--ckpt_path={last}", *CPU])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "optimizer"), [("full", "sgd"), ("sharded", "adamw")])
def test_resumes_and_consolidates(
    kind: str, optimizer: str, options: list[str], sharded: list[str], tmp_path: Path
) -> None:
    """A run that was stopped and resumed equals one process, with both kinds of checkpoints.

    On a CPU, PyTorch gathers all tensors of the optimizer state of a full checkpoint into one buffer, and only the copy
    from a GPU keeps them apart. SGD has one tensor; AdamW's first moment would be overwritten by its second.
    """
    options = [*options, f"--model.optimizer={optimizer}", *(["--model.lr=0.1"] if optimizer == "sgd" else [])]
    main(["fit", *options, *CPU, "--data.batch_size=6", "--experiment=one"])
    sharded = [*sharded, f"--trainer.strategy.state_dict_type={kind}"]
    run_command("fit", *options, *sharded, STOP, folder=tmp_path)
    run_command("fit", *options, *sharded, "--ckpt_path=last", folder=tmp_path)
    last = only(tmp_path / "runs" / "many", "last.ckpt")
    assert last.is_dir() == (kind == "sharded")
    if last.is_dir():
        from vit_finetune.checkpoint import consolidate

        whole = consolidate(last)
        for file in sorted(last.iterdir()):
            file.unlink()
        last.rmdir()
        whole.rename(last)
    assert_equal_runs(tmp_path)


@pytest.mark.slow
def test_mixed_precision(options: list[str], sharded: list[str], tmp_path: Path) -> None:
    """In bf16-mixed, losses stay close to those of one process and the stored weights are float32."""
    half = ["--trainer.precision=bf16-mixed"]
    main(["fit", *options, *half, *CPU, "--data.batch_size=6", "--experiment=one"])
    run_command("fit", *options, *half, *sharded, folder=tmp_path)
    one, many = (scalars(tmp_path / "runs" / name)["train/loss"] for name in ("one", "many"))
    assert [value for _, value in one] == pytest.approx([value for _, value in many], abs=0.02)
    kinds = {value.dtype for value in weights(only(tmp_path / "runs" / "many", "last.ckpt")).values()}
    assert torch.bfloat16 not in kinds
