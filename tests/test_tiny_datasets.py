"""The smallest datasets: one image, one class, batches that are larger than the data."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import CPU, TINY, TINY_MODEL, make_tree, only, run_command, weights
from vit_finetune import main


def keep(tree: Path, split: str, count: int) -> None:
    """Delete all but the first images of a split."""
    for file in sorted((tree / split).rglob("*.png"))[count:]:
        file.unlink()


def keep_class_a(tree: Path, *splits: str) -> Path:
    """Delete the folders of the other classes."""
    for split in splits:
        for name in "bc":
            shutil.rmtree(tree / split / name)
    return tree


def run(*args: str) -> None:
    """Run a command without a warning about NaN, means of nothing or degrees of freedom."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=RuntimeWarning)
        warnings.filterwarnings("error", message=".*(nan|NaN|degrees of freedom|empty).*")
        main(list(args))


def test_one_image_to_validate_test_and_predict(folder_args: list[str], tree: Path, tmp_path: Path) -> None:
    """Every command runs, with all of its files; from one image no temperature is fitted."""
    for split in ("val", "test"):
        keep(tree, split, 1)
    run("fit", *folder_args)
    best = only(tmp_path, "best-*.ckpt")
    for command in ("validate", "test", "predict", "export"):
        more = {"test": ["--projector.images=5"], "export": ["--format=timm"]}.get(command, [])
        run(command, f"--ckpt_path={best}", *CPU, *more)
    report = json.loads(only(tmp_path, "report.json").read_text())
    assert report["images"] == 1 and report["temperature"] == 1
    charts = {path.name for path in only(tmp_path, "report.json").parent.glob("*.png")}
    assert charts - {"mistakes.png"} == {"confusion.png", "reliability.png"}
    assert len(only(tmp_path, "predictions.csv").read_text().splitlines()) == 2


def test_part_of_one_image(folder_args: list[str], tree: Path, tmp_path: Path) -> None:
    """A limit of one batch with one image."""
    run("fit", *folder_args, "--data.batch_size=1", "--trainer.limit_val_batches=1", "--trainer.limit_train_batches=1")
    run("test", f"--ckpt_path={only(tmp_path, 'last.ckpt')}", *CPU, "--trainer.limit_test_batches=1")
    assert json.loads(only(tmp_path, "report.json").read_text())["images"] == 1


def test_one_training_image_per_class_in_one_batch(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "images", {"train": 1, "val": 1, "test": 1})
    run("fit", *TINY, "--data=ImageFolder", f"--data.root={tree}", "--data.batch_size=1000")
    run("test", f"--ckpt_path={only(tmp_path, 'best-*.ckpt')}", *CPU)
    assert json.loads(only(tmp_path, "report.json").read_text())["images"] == 3


def test_validation_images_of_one_class(folder_args: list[str], tree: Path, tmp_path: Path) -> None:
    keep_class_a(tree, "val")
    run("fit", *folder_args)
    run("validate", f"--ckpt_path={only(tmp_path, 'best-*.ckpt')}", *CPU)


def test_one_class_can_be_tested_but_not_trained(
    folder_args: list[str], tmp_path: Path, fails: Callable[..., str]
) -> None:
    single = keep_class_a(make_tree(tmp_path / "single", {"train": 6, "val": 3, "test": 3}), "train", "val", "test")
    message = fails("fit", *folder_args, f"--data.root={single}")
    assert "The dataset has one class (a); expected at least two" in message
    assert not list(tmp_path.rglob("config.yaml"))
    run("fit", *folder_args, "--experiment=three")
    best = only(tmp_path / "runs" / "three", "best-*.ckpt")
    for command in ("validate", "test", "predict"):
        run(command, f"--ckpt_path={best}", f"--data.root={single}", *CPU)
    report = json.loads(only(tmp_path, "report.json").read_text())
    assert [row["support"] for row in report["classes"]] == [3, 0, 0]
    assert report["classes"][1]["recall"] is None


@pytest.mark.parametrize("names", ["[a]", "[]"])
def test_class_names_are_at_least_two(names: str, folder_args: list[str], fails: Callable[..., str]) -> None:
    assert "expected at least two classes, or null" in fails("fit", *folder_args, f"--model.class_names={names}")
    assert not Path("runs").exists()


@pytest.mark.slow
def test_one_image_on_two_processes(tmp_path: Path) -> None:
    """One process has no image: equal metrics and one report."""
    tree = make_tree(tmp_path / "images", {"train": 6, "val": 3, "test": 3})
    for split in ("val", "test"):
        keep(tree, split, 1)
    options = [*TINY_MODEL, "--data=ImageFolder", f"--data.root={tree}", "--data.batch_size=3"]
    two = ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.strategy=ddp"]
    run_command("fit", *options, *two, "--trainer.max_epochs=1", folder=tmp_path)
    best = only(tmp_path, "best-*.ckpt")
    assert weights(best)
    run_command("test", f"--ckpt_path={best}", *two, folder=tmp_path)
    run_command("predict", f"--ckpt_path={best}", *two, folder=tmp_path)
    assert json.loads(only(tmp_path, "report.json").read_text())["images"] == 1
    assert len(only(tmp_path, "predictions.csv").read_text().splitlines()) == 2
