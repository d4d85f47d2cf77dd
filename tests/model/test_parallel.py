"""FSDP2 and tensor parallel on two processes over gloo, compared with one process."""

from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from tests.conftest import CPU, REPOSITORY, TINY_MODEL, make_tree, only, read_events, run_command, scalars, weights
from vit_finetune import main
from vit_finetune.model import parallel, vit
from vit_finetune.model.config import ViTConfig

STRATEGIES = REPOSITORY / "configs" / "strategy"


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    """Twelve steps on fixed images, every step logged."""
    tree = make_tree(tmp_path / "images", {"train": 8, "val": 3})
    options = [*TINY_MODEL, "--data=ImageFolder", f"--data.root={tree}", "--trainer.max_epochs=3"]
    return [
        *options,
        "--model.lr=1e-3",
        "--trainer.log_every_n_steps=1",
        "--data.shift=0",
        "--data.crop_scale=0",
        "--data.flip=false",
    ]


@pytest.mark.parametrize(
    ("name", "batch_size"),
    [
        pytest.param("ddp_cpu", 3, marks=pytest.mark.slow),
        ("fsdp2", 3),
        ("tensor_parallel", 6),
        pytest.param("fsdp2_tensor_parallel", 3, marks=pytest.mark.slow),
    ],
)
def test_sharded_training_equals_one_process(name: str, batch_size: int, options: list[str], tmp_path: Path) -> None:
    """Same losses and weights within 1e-4; the full-state file loads on one process with the same metrics."""
    main(["fit", *options, *CPU, "--data.batch_size=6", "--experiment=one"])
    sharded = [f"--config={STRATEGIES / name}.yaml", "--trainer.accelerator=cpu", f"--data.batch_size={batch_size}"]
    run_command("fit", *options, *sharded, "--experiment=many", folder=tmp_path)
    runs = [tmp_path / "runs" / name for name in ("one", "many")]
    one, many = (scalars(path) for path in runs)
    for tag in ("train/loss", "train/grad_norm", "val/loss", "val/acc"):
        assert [v for _, v in one[tag]] == pytest.approx([v for _, v in many[tag]], abs=1e-4), tag
    left, right = (weights(only(path, "last.ckpt")) for path in runs)
    assert left.keys() == right.keys()
    for key, value in left.items():
        torch.testing.assert_close(value, right[key], atol=1e-4, rtol=1e-3, msg=key)
    main(["validate", f"--ckpt_path={only(runs[1], 'last.ckpt')}", *CPU])
    events = max(runs[1].rglob("events*"), key=lambda path: path.stat().st_mtime_ns)
    assert dict(scalars_of(events))["val/acc"] == pytest.approx(many["val/acc"][-1][1])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "batch_size"), [("fsdp2", 3), ("tensor_parallel", 6)])
def test_gradients_in_parts_are_counted_as_a_whole(
    name: str, batch_size: int, options: list[str], tmp_path: Path
) -> None:
    """The fractions that float16 would lose equal those of one process, up to the order of 16-bit sums."""
    half = ["--trainer.precision=bf16-mixed", "--trainer.max_epochs=1"]
    main(["fit", *options, *CPU, *half, "--data.batch_size=6", "--experiment=one"])
    sharded = [f"--config={STRATEGIES / name}.yaml", "--trainer.accelerator=cpu", f"--data.batch_size={batch_size}"]
    run_command("fit", *options, *sharded, *half, "--experiment=many", folder=tmp_path)
    one, many = (scalars(tmp_path / "runs" / experiment) for experiment in ("one", "many"))
    for tag in ("zero_in_fp16", "zero_in_fp16_scaled", "inf_in_fp16_scaled"):
        assert one[f"precision/{tag}"][0][1] == pytest.approx(many[f"precision/{tag}"][0][1], abs=2e-3), tag


def scalars_of(file: Path) -> list[tuple[str, float]]:
    events = read_events(file)
    events.Reload()
    return [(tag, events.Scalars(tag)[-1].value) for tag in events.Tags()["scalars"]]


def test_heads_that_do_not_divide_are_refused_with_both_numbers() -> None:
    kwargs = {"patch_size": 8, "num_heads": 3, "embed_dim": 24}
    net = vit.build(ViTConfig("vit_tiny_patch16_224", 32, kwargs), 3)
    with pytest.raises(MisconfigurationException, match=r"attention heads, 3, is not divisible by .* 2"):
        parallel.check_block(net.blocks[0], 2)


def test_other_blocks_are_refused() -> None:
    net = vit.build(ViTConfig("vit_tiny_patch16_224", 32, {"depth": 1, "qk_norm": True}), 3)
    with pytest.raises(MisconfigurationException, match="Use FSDP2 only"):
        parallel.check_block(net.blocks[0], 3)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "batch_size"), [("ddp_cpu", 3), ("fsdp2", 3), ("tensor_parallel", 6)])
def test_ema_unfreezing_and_clipping_on_two_processes(
    name: str, batch_size: int, options: list[str], tmp_path: Path
) -> None:
    """EMA and training weights equal those of one process within 1e-4, also after resuming."""
    options += ["--model.ema=0.5", "--model.head_lr_scale=2", "--trainer.gradient_clip_val=0.1"]
    stop = "--trainer.callbacks=tests.model.test_ema.StopAfterOne"
    unfreeze = ["--model.unfreeze_by=2"] if name == "ddp_cpu" else []
    main(["fit", *options, *unfreeze, *CPU, "--data.batch_size=6", "--experiment=one"])
    sharded = [f"--config={STRATEGIES / name}.yaml", "--trainer.accelerator=cpu", f"--data.batch_size={batch_size}"]
    sharded += [*unfreeze, "--trainer.strategy=ddp_find_unused_parameters_true"] if unfreeze else []
    run_command("fit", *options, *sharded, stop, "--experiment=many", folder=tmp_path)
    run_command("fit", *options, *sharded, "--experiment=many", "--ckpt_path=last", folder=tmp_path)
    left, right = (
        torch.load(only(tmp_path / "runs" / name, "last.ckpt"), weights_only=True) for name in ("one", "many")
    )
    assert left["global_step"] == right["global_step"] == 12
    for part in ("state_dict", "training_weights"):
        assert left[part].keys() == right[part].keys()
        for key, value in left[part].items():
            torch.testing.assert_close(value, right[part][key], atol=1e-4, rtol=1e-3, msg=f"{part} {key}")
