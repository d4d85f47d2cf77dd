"""Contents of the event files: exact tags, counts and sizes."""

import io
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import CPU, REPOSITORY, TINY, TINY_KWARGS, only, read_events, scalars, weights
from vit_finetune import ViTClassifier, main
from vit_finetune.callbacks.tensorboard import denormalize
from vit_finetune.data.decode import decode
from vit_finetune.model.preprocess import Preprocess

FLOAT16 = f"--config={REPOSITORY / 'configs' / 'precision' / '16-mixed-cpu.yaml'}"
EPOCH = ["epoch", "train/acc", "train/loss", "val/acc", "val/acc_macro", "val/loss"]
SPEED = ["train/data_time_fraction", "train/images_per_second", "train/peak_memory_gb", "train/tflops"]
STEPS = ["train/acc_step", "train/loss_step", "train/lr", *SPEED]
ALWAYS = {*EPOCH, *STEPS, "train/first_step_seconds", "train/seconds", "best/val/acc"}
FRACTIONS = {f"precision/{name}" for name in ("zero_in_fp16", "zero_in_fp16_scaled", "inf_in_fp16_scaled")}
IMAGES = ["train/batch", "val/confusion", "val/mistakes", "val/reliability"]


def events(run: Path) -> EventAccumulator:
    """Return all of the one event file in a folder."""
    found = read_events(only(run, "events.out.tfevents.*"))
    found.Reload()
    return found


class Inject(Callback):
    """Replace the gradients after the backward pass by known ones, or by infinite ones in chosen steps.

    Args:
        values: Values of all gradients, repeated, without the loss scale.
        infinite: Steps in which the gradients overflow.
    """

    def __init__(self, values: list[float] | None = None, infinite: list[int] | None = None) -> None:
        self.values, self.infinite = values, infinite or []

    def on_after_backward(self, trainer: Trainer, pl_module: Any) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = scaler.get_scale() if scaler else 1.0
        for parameter in pl_module.parameters():
            if self.values:
                repeated = torch.tensor(self.values).repeat(parameter.numel())[: parameter.numel()]
                parameter.grad = repeated.view_as(parameter) * scale
            if trainer.global_step in self.infinite:
                parameter.grad = torch.full_like(parameter, math.inf)


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ([], set()),
        (["--trainer.precision=bf16-mixed"], FRACTIONS),
        ([FLOAT16], FRACTIONS | {"precision/loss_scale", "precision/skipped_steps"}),
    ],
    ids=["32-true", "bf16-mixed", "16-mixed"],
)
def test_tags_counts_and_sizes(options: list[str], more: set[str], folder_args: list[str], tmp_path: Path) -> None:
    """Four epochs of five steps. Two validation images have two labels each, so that two predictions must be wrong."""
    for name in ("00", "01"):
        shutil.copy(tmp_path / f"images/val/c/{name}.png", tmp_path / f"images/val/a/again-{name}.png")
    every = ["--trainer.log_every_n_steps=2", "--tensorboard.images_every_n_epochs=2"]
    every += ["--tensorboard.precision_every_n_steps=6", "--tensorboard.images=2"]
    main(["fit", *folder_args, *every, *options, "--trainer.max_epochs=4", "--experiment=run"])
    found = events(tmp_path / "runs")
    assert set(found.Tags()["scalars"]) == ALWAYS | more | {"train/grad_norm", "train/lr_lowest"}
    logged = [5 * epoch + step for epoch in range(4) for step in (1, 3, 4)]
    for tag in [*STEPS, "train/grad_norm", *(more - FRACTIONS)]:
        assert [event.step for event in found.Scalars(tag)] == logged, tag
    for tag in more & FRACTIONS:
        assert [event.step for event in found.Scalars(tag)] == [0, 6, 12, 18], tag
        assert all(0 <= event.value < 1 for event in found.Scalars(tag))
    assert [event.step for event in found.Scalars("val/acc")] == [4, 9, 14, 19]
    assert sorted(found.Tags()["images"]) == IMAGES
    for tag in IMAGES:  # in epochs 0 and 2, and in the last, 3
        assert [e.step for e in found.Images(tag)] == ([0, 10, 15] if tag == "train/batch" else [4, 14, 19]), tag
    assert found.Images("train/batch")[0].width == found.Images("val/mistakes")[0].width == 270  # two images wide
    for epoch in (0, 2, 3):
        size = sum(
            len(image.encoded_image_string) for tag in IMAGES for image in found.Images(tag) if image.step // 5 == epoch
        )
        assert 0 < size < 1e6
    assert only(tmp_path / "runs", "events*").stat().st_size < 1e6
    assert not found.Tags()["graph"] and found.Tags()["tensors"] == ["custom_scalars__config__"]


def test_everything_can_be_switched_off(folder_args: list[str], tmp_path: Path) -> None:
    off = ["--tensorboard.gradient_norm=false", "--tensorboard.precision_every_n_steps=0"]
    off += ["--tensorboard.images_every_n_epochs=0", "--trainer.precision=bf16-mixed"]
    main(["fit", *folder_args, *off, "--model.layer_decay=null"])
    found = events(tmp_path / "runs")
    assert set(found.Tags()["scalars"]) == ALWAYS
    assert not found.Tags()["images"]
    assert only(tmp_path / "runs", "events*").stat().st_size < 10_000
    main(["fit", *folder_args, "--trainer.logger=false", "--experiment=none"])
    assert len(list(tmp_path.rglob("events*"))) == 1


@pytest.mark.parametrize(
    ("name", "value"), [("images", 17), ("images_every_n_epochs", -1), ("precision_every_n_steps", -1)]
)
def test_options_out_of_range_are_refused(folder_args: list[str], fails: Any, name: str, value: int) -> None:
    assert f"--tensorboard.{name} is {value}; expected" in fails("fit", *folder_args, f"--tensorboard.{name}={value}")
    assert "--projector.images is -1" in fails("fit", *folder_args, "--projector.images=-1")


# Gradients


@pytest.mark.parametrize("clip", [[], ["--trainer.gradient_clip_val=0.001"]], ids=["fused", "unscaled, clipped"])
@pytest.mark.parametrize("precision", [["--trainer.precision=32-true"], ["--trainer.precision=bf16-mixed"], [FLOAT16]])
def test_norm_and_underflow_of_known_gradients(
    precision: list[str], clip: list[str], folder_args: list[str], tmp_path: Path
) -> None:
    """Of four values, one underflows even with a loss scale of 65536, one only without, and one overflows with it."""
    values = [2.0**-50, 2.0**-30, 2.0**-10, 2.0]
    known = [f"--trainer.callbacks+={__name__}.Inject", f"--trainer.callbacks.values={values}"]
    main(["fit", *folder_args, *precision, *clip, *known, "--experiment=run", "--trainer.log_every_n_steps=1"])
    tags = scalars(tmp_path / "runs")
    net = weights(only(tmp_path / "runs", "last.ckpt"))
    held = torch.cat([torch.tensor(values).repeat(p.numel())[: p.numel()] for p in net.values()])
    assert tags["train/grad_norm"][0] == (0, pytest.approx(float(held.norm())))
    if precision != ["--trainer.precision=32-true"]:
        for name, fraction in (
            ("zero_in_fp16", (held < 2**-25).float().mean()),
            ("zero_in_fp16_scaled", (held < 2**-41).float().mean()),
            ("inf_in_fp16_scaled", (held == 2).float().mean()),
        ):
            assert tags[f"precision/{name}"] == [(0, pytest.approx(float(fraction)))], name


@pytest.mark.parametrize("clip", [[], ["--trainer.gradient_clip_val=1"]], ids=["fused", "unscaled, clipped"])
def test_skipped_steps_are_counted(clip: list[str], folder_args: list[str], tmp_path: Path) -> None:
    scaler = "{class_path: torch.amp.GradScaler, init_args: {device: cpu, init_scale: 64}}"
    plugin = "{class_path: lightning.pytorch.plugins.MixedPrecision, init_args: {precision: 16-mixed, device: cpu, "
    options = [f"--trainer.plugins={plugin}scaler: {scaler}}}}}", "--trainer.log_every_n_steps=1"]
    options += [f"--trainer.callbacks+={__name__}.Inject", "--trainer.callbacks.infinite=[0,2]"]
    main(["fit", *folder_args, *options, *clip])
    tags = scalars(tmp_path / "runs")
    assert [value for _, value in tags["precision/skipped_steps"]] == [0, 1, 1, 2, 2]
    assert [value for _, value in tags["precision/loss_scale"]] == [64, 32, 32, 16, 16]
    assert [math.isfinite(value) for _, value in tags["train/grad_norm"]] == [False, True, False, True, True]


@pytest.mark.parametrize(("accumulate", "steps"), [(1, [3, 7, 11, 15, 17]), (3, [1, 2, 3, 5])])
def test_every_interval_is_logged_once(
    accumulate: int, steps: list[int], folder_args: list[str], tmp_path: Path
) -> None:
    """Intervals of 4 batches: with accumulation, logged at the step that contains the last batch of the interval."""
    options = [
        "--data.batch_size=1",
        "--trainer.log_every_n_steps=4",
        f"--trainer.accumulate_grad_batches={accumulate}",
    ]
    main(["fit", *folder_args, *options])
    assert [step for step, _ in scalars(tmp_path / "runs")["train/grad_norm"]] == steps


def test_lowest_learning_rate_under_layer_decay(folder_args: list[str], tmp_path: Path) -> None:
    main(["fit", *folder_args, "--model.layer_decay=0.5", "--trainer.log_every_n_steps=1"])
    tags = scalars(tmp_path / "runs")
    for (_, head), (_, lowest) in zip(tags["train/lr"], tags["train/lr_lowest"], strict=True):
        assert lowest == pytest.approx(head * 0.5**3)  # two blocks and the embedding below the head


# Images


def test_batch_is_shown_as_the_network_sees_it(folder_args: list[str], tmp_path: Path) -> None:
    """Red, green and blue images under their labels a, b and c, after augmentation, normalization and resizing."""
    main(["fit", *folder_args, "--trainer.accumulate_grad_batches=2"])
    (shown,) = events(tmp_path / "runs").Images("train/batch")
    pixels = torch.tensor(list(Image.open(io.BytesIO(shown.encoded_image_string)).convert("RGB").tobytes()))
    pixels = pixels.view(shown.height, shown.width, 3)
    assert (shown.width, shown.height, shown.step) == (540, 155, 0)
    centers = pixels[60:120].float().unflatten(1, (4, 135))[:, :, 30:100].mean((0, 2))
    assert ((centers.max(1).values > 150) & (centers.sum(1) < 260)).all()  # four images, each of one color


def test_normalization_is_undone() -> None:
    preprocess = Preprocess((8, 8), (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    images = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    assert torch.equal(denormalize(preprocess(images), preprocess), images)


def test_images_of_an_epoch_stay_below_a_megabyte_whatever_they_show(tmp_path: Path) -> None:
    """Noise of 224 pixels, which PNG cannot compress: eight images of the batch and eight mistakes."""
    generator = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in "abc":
            (tmp_path / "noise" / split / name).mkdir(parents=True)
            for number in range(8):
                pixels = generator.integers(0, 256, (224, 224, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "noise" / split / name / f"{number}.png")
    kwargs = TINY_KWARGS | {"patch_size": 32}
    model = ["--model.name=vit_tiny_patch16_224", "--model.pretrained=false", f"--model.timm_kwargs={kwargs}"]
    data = ["--data=ImageFolder", f"--data.root={tmp_path / 'noise'}", "--data.batch_size=8"]
    main(["fit", *model, *data, *CPU, "--trainer.max_epochs=1", "--model.img_size=224"])
    found = events(tmp_path / "runs")
    assert found.Images("train/batch")[0].height > 300 and found.Images("val/mistakes")[0].height > 300  # two rows
    assert 0.5e6 < only(tmp_path / "runs", "events*").stat().st_size < 1e6


# Other commands


def test_projector_and_no_empty_files(folder_args: list[str], tmp_path: Path) -> None:
    main(["fit", *folder_args])
    for _ in range(2):
        main(["test", "--ckpt_path=best", "--projector.images=5"])
    main(["predict", "--ckpt_path=best", f"--data.root={tmp_path / 'images' / 'test'}"])
    run = only(tmp_path / "runs", "version_*")  # test and predict add to the run
    features = head_inputs(run, tmp_path / "images" / "test")
    for tag in ("test", "test-1"):  # the earlier points are kept
        folder = run / "00000" / tag
        rows = [line.split("\t") for line in (folder / "metadata.tsv").read_text().splitlines()]
        assert rows[0] == ["true", "predicted", "path"]
        assert [row[2].rpartition("test/")[2] for row in rows[1:]] == [
            "a/00.png", "a/02.png", "b/01.png", "c/00.png", "c/02.png"
        ]  # fmt: skip
        points = [[float(x) for x in line.split("\t")] for line in (folder / "tensors.tsv").read_text().splitlines()]
        assert len(points) == 5 and len(points[0]) == 5
        distances = [torch.cdist(values, values) for values in (torch.tensor(points), features)]
        assert torch.allclose(*distances, atol=1e-3)
        with Image.open(folder / "sprite.png") as sprite:
            assert sprite.size == (96, 96)  # three by three thumbnails
    config = (run / "projector_config.pbtxt").read_text()
    assert 'tensor_path: "00000/test-1/tensors.tsv"' in config and "single_image_dim: 32" in config
    for file in run.glob("events*"):
        found = read_events(file)
        found.Reload()
        assert any(found.Tags().values()), file


def head_inputs(run: Path, images: Path) -> torch.Tensor:
    """Return what the head of the best checkpoint receives for the five images that the projector shows."""
    model = ViTClassifier.load(run)
    paths = [images / name for name in ("a/00.png", "a/02.png", "b/01.png", "c/00.png", "c/02.png")]
    pixels = torch.stack([decode(path, size=(32, 32), crop_pct=model.crop_pct) for path in paths])
    net: Any = model.net
    with torch.no_grad():
        features: torch.Tensor = net.forward_head(net.forward_features(model.preprocess(pixels)), pre_logits=True)
    return features


def test_table_of_runs_sorts_by_numbers(tmp_path: Path) -> None:
    """The tab HPARAMS has options and the best metric as numbers, and no placeholder metric."""
    from tensorboard.plugins.hparams import plugin_data_pb2

    main(["fit", *TINY, "--data=Shapes", "--data.train_size=100", "--model.lr=0.002"])
    found = read_events(only(tmp_path / "runs", "events*"))
    found.Reload()
    contents = found.summary_metadata
    parsed = {
        tag: plugin_data_pb2.HParamsPluginData.FromString(data.plugin_data.content)
        for tag, data in contents.items()
        if data.plugin_data.plugin_name == "hparams"
    }
    session = parsed["_hparams_/session_start_info"].session_start_info.hparams
    assert session["model/lr"].number_value == pytest.approx(0.002)
    assert session["data/batch_size"].number_value == 4
    metrics = [info.name.tag for info in parsed["_hparams_/experiment"].experiment.metric_infos]
    assert metrics == ["best/val/acc"]
    best = scalars(tmp_path / "runs")
    assert best["best/val/acc"] == [(0, max(value for _, value in best["val/acc"]))] and "hp_metric" not in best
