"""Folders of images: layouts, class names, broken files, in memory or decoded by workers."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from PIL import Image

from tests.conftest import TINY, make_tree, noise_image, only
from vit_finetune import ImageFolder, main
from vit_finetune.data.datasets import ImageFileDataset, InMemoryDataset


def sizes(data: ImageFolder) -> dict[str, int]:
    return {name: len(dataset) for name, dataset in data.datasets.items()}


def test_three_splits(tree: Path) -> None:
    data = ImageFolder(str(tree))
    for stage in ("fit", "test", "predict"):
        data.setup(stage)
    assert sizes(data) == {"train": 18, "val": 9, "test": 9, "predict": 9}
    assert data.class_names == ["a", "b", "c"]
    assert data.datasets["val"].names == [str(tree / "val" / c / f"{i:02d}.png") for c in "abc" for i in range(3)]
    assert data.datasets["val"].labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_missing_val_is_split_from_train(tmp_path: Path) -> None:
    data = ImageFolder(str(make_tree(tmp_path / "p", {"train": 10, "test": 2})), val_fraction=0.2)
    data.setup("fit")
    data.setup("test")
    assert sizes(data) == {"train": 24, "val": 6, "test": 6}


def test_fraction_of_the_training_images_leaves_other_splits(tmp_path: Path) -> None:
    """A single image of a class is kept."""
    tree = make_tree(tmp_path / "p", {"train": 10, "val": 3, "test": 2})
    for path in sorted((tree / "train" / "a").iterdir())[1:]:
        path.unlink()
    data = ImageFolder(str(tree), train_fraction=0.2)
    data.setup("fit")
    data.setup("test")
    assert sizes(data) == {"train": 5, "val": 9, "test": 6}
    assert data.class_counts["train"] == [1, 2, 2]


def test_missing_test_is_val_and_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = ImageFolder(str(make_tree(tmp_path / "p", {"train": 2, "val": 3})))
    with caplog.at_level("INFO"):
        data.setup("test")
    assert len(data.datasets["test"]) == 9 and "has no test split: testing on the validation images" in caplog.text


def test_train_alone_is_tested_on_its_validation_split(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tree = make_tree(tmp_path / "p", {"train": 10})
    fitted, tested = (ImageFolder(str(tree), val_fraction=0.2) for _ in range(2))
    fitted.setup("fit")
    with caplog.at_level("INFO"):
        tested.setup("test")
    assert sizes(fitted) == {"train": 24, "val": 6}
    assert tested.datasets["test"].names == fitted.datasets["val"].names
    assert "testing on the validation images" in caplog.text


@pytest.mark.parametrize(
    ("data", "option"),
    [
        ("ImageFolder", "test_fraction=-0.1"),
        ("ImageFolder", "test_fraction=1.5"),
        ("ImageFolder", "size=0"),
        ("ImageFolder", "cache_gb=-0.5"),
        ("Shapes", "train_size=-1"),
        ("Shapes", "test_size=0"),
        ("Shapes", "noise=-0.1"),
        ("Contours", "outlines=-1"),
        ("Contours", "train_size=0"),
    ],
)
def test_values_out_of_range_are_named(data: str, option: str, fails: Callable[..., str]) -> None:
    name, value = option.split("=")
    assert f"--data.{name} is {value}; expected " in fails("fit", f"--data={data}", f"--data.{option}")


def test_single_tree_is_split_by_seed(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "p", {"": 20})
    data = ImageFolder(str(tree), test_fraction=0.2, val_fraction=0.25)
    data.setup("fit")
    data.setup("test")
    assert sizes(data) == {"train": 36, "val": 12, "test": 12}
    names = [set(dataset.names) for dataset in data.datasets.values()]
    assert len(set.union(*names)) == 60 == sum(map(len, names))
    again = ImageFolder(str(tree), test_fraction=0.2, val_fraction=0.25)
    again.setup("fit")
    assert again.split_fingerprint == data.split_fingerprint
    everything = ImageFolder(str(tree), test_fraction=1.0)
    everything.setup("test")
    assert len(everything.datasets["test"]) == 60


def test_predict_takes_any_folder(tmp_path: Path) -> None:
    flat = tmp_path / "flat"
    (flat / "deeper").mkdir(parents=True)
    generator = np.random.default_rng(0)
    for name in ("b.png", "a.JPG", "deeper/c.png"):
        noise_image(0, generator).save(flat / name)
    data = ImageFolder(str(flat))
    data.setup("predict")
    assert [Path(name).name for name in data.datasets["predict"].names] == ["a.JPG", "b.png", "c.png"]
    assert data.datasets["predict"].labels.tolist() == [-1] * 3


def test_hidden_and_foreign_files_are_left_out(tree: Path) -> None:
    hidden = tree / "train" / ".ipynb_checkpoints"
    shutil.copytree(tree / "train" / "a", hidden)
    (tree / "train" / "a" / "._01.png").write_bytes(b"")
    (tree / "train" / "b" / "notes.txt").write_text("not an image")
    (tree / "train" / "loose.png").write_bytes(b"")
    data = ImageFolder(str(tree))
    data.setup("fit")
    assert data.class_names == ["a", "b", "c"] and len(data.datasets["train"]) == 18


@pytest.mark.parametrize("left", [None, "image.heic"])
def test_empty_training_class_is_refused(tree: Path, left: str | None) -> None:
    for path in (tree / "train" / "b").iterdir():
        path.unlink()
    if left:
        (tree / "train" / "b" / left).write_bytes(b"x")
    with pytest.raises(MisconfigurationException, match=r"no images of the class b; accepted types are .*\.png"):
        ImageFolder(str(tree)).setup("fit")


def test_class_missing_from_val_keeps_the_labels(tree: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.rmtree(tree / "val" / "b")
    data = ImageFolder(str(tree))
    with caplog.at_level(logging.INFO):
        data.setup("fit")
    assert caplog.messages == [f"--data.root {tree}, val: no images of b. The labels of other classes do not change."]
    assert data.datasets["val"].labels.tolist() == [0, 0, 0, 2, 2, 2]


def test_numbers_as_class_names_are_in_order(tmp_path: Path) -> None:
    """Folders 1, 2 and 10 are sorted by value, and images have the label of their folder."""
    tree = make_tree(tmp_path / "p", {"train": 2, "val": 1})
    for split in ("train", "val"):
        for old, new in zip("abc", ("10", "2", "1"), strict=True):
            (tree / split / old).rename(tree / split / new)
    data = ImageFolder(str(tree))
    data.setup("fit")
    assert data.class_names == ["1", "2", "10"]
    train = data.datasets["train"]
    assert [data.class_names[label] for label in train.labels] == [Path(name).parent.name for name in train.names]


def test_no_class_folders_are_explained(tmp_path: Path, fails: Callable[..., str]) -> None:
    tree = make_tree(tmp_path / "p", {"": 1})
    assert "has no class folders. Expected root/<class>/ or root/train/<class>/" in fails(
        "fit", *TINY, "--data=ImageFolder", f"--data.root={tree / 'a'}"
    )


def test_unknown_class_is_refused_by_name(tree: Path) -> None:
    (tree / "val" / "b").rename(tree / "val" / "zebra")
    with pytest.raises(MisconfigurationException, match=r"val: unknown class: zebra. The classes are a, b, c"):
        ImageFolder(str(tree)).setup("fit")


def test_later_folders_use_the_classes_of_the_checkpoint(
    folder_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], fails: Callable[..., str]
) -> None:
    """A class missing from a later folder does not change the other labels; an added one is refused by name."""
    main(["fit", *folder_args, "--trainer.max_epochs=8", "--model.lr=0.01"])
    options = [f"--ckpt_path={only(tmp_path / 'runs', 'best-*.ckpt')}", "--trainer.accelerator=cpu"]
    later = tmp_path / "later"
    shutil.copytree(tmp_path / "images" / "test", later)
    shutil.rmtree(later / "b")
    capsys.readouterr()
    main(["test", *options, f"--data.root={later}", "--data.test_fraction=1"])
    assert "1.0" in next(line for line in capsys.readouterr().out.splitlines() if "test/acc" in line)
    (later / "c").rename(later / "d")
    assert "unknown class: d. The classes are a, b, c" in fails("test", *options, f"--data.root={later}")


def add_broken_files(folder: Path) -> None:
    """Add an empty file, an HTML page named like an image, and a truncated image with a complete header."""
    (folder / "empty.png").write_bytes(b"")
    (folder / "page.jpg").write_text("<html>")
    noise_image(0, np.random.default_rng(0), side=200).save(folder / "cut.jpg")
    (folder / "cut.jpg").write_bytes((folder / "cut.jpg").read_bytes()[:2000])


def test_all_broken_files_are_listed_in_one_error(tree: Path, fails: Callable[..., str]) -> None:
    add_broken_files(tree / "train" / "a")
    message = fails("fit", *TINY, "--data=ImageFolder", f"--data.root={tree}")
    assert "3 images cannot be read" in message and "--data.skip_broken true" in message
    lines = [line.rsplit("/", 1)[1] for line in message.splitlines()[1:]]
    assert lines[0].startswith("cut.jpg': image file is truncated") and lines[1] == "empty.png': the file is empty"
    assert lines[2].startswith("page.jpg': damaged, or not an image") and len(lines) == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_file_that_fails_during_training_is_named_in_one_line(
    folder_args: list[str], tree: Path, workers: int, fails: Callable[..., str]
) -> None:
    """If the images do not fit into memory, only the headers are read before training."""
    add_broken_files(tree / "train" / "a")
    for name in ("empty.png", "page.jpg"):
        (tree / "train" / "a" / name).unlink()
    message = fails("fit", *folder_args, "--data.cache_gb=0", f"--data.num_workers={workers}")
    assert message.startswith(f"error: '{tree}/train/a/cut.jpg': image file is truncated")
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize("cache_gb", [2.0, 0.0])
def test_broken_files_are_skipped_and_listed(
    folder_args: list[str], tree: Path, tmp_path: Path, cache_gb: float, recwarn: pytest.WarningsRecorder
) -> None:
    add_broken_files(tree / "train" / "a")
    options = [f"--data.cache_gb={cache_gb}", "--data.skip_broken=true", "--data.num_workers=0"]
    main(["fit", *folder_args, *options, "--trainer.limit_train_batches=1"])
    warning = next(str(w.message) for w in recwarn if "cannot be read" in str(w.message))
    assert "Skipped 3 images that cannot be read" in warning and f"{tree}/train/a/cut.jpg" in warning
    lines = only(tmp_path / "runs", "skipped-fit.txt").read_text(encoding="utf-8").splitlines()
    assert [Path(line.split("'")[1]).name for line in lines] == ["cut.jpg", "empty.png", "page.jpg"]


@pytest.mark.parametrize(("split", "stage"), [("train", "fit"), ("val", "validate")])
def test_nothing_left_after_skipping_is_refused(tree: Path, split: str, stage: str) -> None:
    for path in (tree / split).rglob("*.png"):
        if split == "val" or path.parent.name == "b":
            path.write_bytes(b"")
    names = "a, b, c" if split == "val" else "b"
    with pytest.raises(MisconfigurationException, match=f"{split}: none of the images of {names} can be read"):
        ImageFolder(str(tree), skip_broken=True).setup(stage)


@pytest.mark.parametrize("cache_gb", [2.0, 0.0])
def test_size_rule_in_memory_and_from_files(tmp_path: Path, cache_gb: float) -> None:
    kind = InMemoryDataset if cache_gb else ImageFileDataset
    small = ImageFolder(str(make_tree(tmp_path / "small", {"train": 2, "val": 1}, side=40)), cache_gb=cache_gb)
    small.setup("fit")
    batch = next(iter(small.val_dataloader()))
    assert isinstance(small.datasets["val"], kind) and batch["image"].shape == (3, 3, 40, 40)
    mixed = make_tree(tmp_path / "mixed", {"train": 2, "val": 1}, side=300)
    noise_image(0, np.random.default_rng(0), side=500).resize((500, 320)).save(mixed / "val" / "a" / "wide.png")
    large = ImageFolder(str(mixed), cache_gb=cache_gb)
    large.setup("fit")
    assert next(iter(large.val_dataloader()))["image"].shape == (4, 3, 224, 224)
    own = ImageFolder(str(mixed), size=48, cache_gb=cache_gb)
    own.setup("fit")
    assert next(iter(own.val_dataloader()))["image"].shape == (4, 3, 48, 48)


@pytest.mark.parametrize(("side", "size"), [(40, 32), (20, 20)])
def test_size_rule_uses_the_models_input_size(tmp_path: Path, side: int, size: int) -> None:
    data = ImageFolder(str(make_tree(tmp_path / "p", {"train": 2, "val": 1}, side=side)))
    data.input_size = (32, 32)
    data.setup("fit")
    assert data.datasets["val"].__getitems__([0])["image"].shape == (1, 3, size, size)


def test_known_classes_decide_the_labels(tree: Path) -> None:
    data = ImageFolder(str(tree))
    data.known_classes = ["c", "unseen", "b", "a"]
    data.setup("test")
    assert data.class_names == ["c", "unseen", "b", "a"]
    assert data.datasets["test"].labels.tolist() == [3, 3, 3, 2, 2, 2, 0, 0, 0]
    data.known_classes = ["a", "b"]
    with pytest.raises(MisconfigurationException, match=r"unknown class: c. The classes are a, b"):
        data.setup("test")


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_give_the_same_batches(tree: Path, workers: int) -> None:
    batches = []
    for cache_gb, num_workers in ((2.0, 0), (0.0, workers)):
        data = ImageFolder(str(tree), cache_gb=cache_gb, num_workers=num_workers, batch_size=4)
        data.setup("fit")
        batches.append(torch.cat([batch["image"] for batch in data.val_dataloader()]))
    assert torch.equal(*batches)


def test_missing_folder_is_refused(fails: Callable[..., str]) -> None:
    assert "--data.root nowhere is not a folder" in fails("fit", *TINY, "--data=ImageFolder", "--data.root=nowhere")


@pytest.mark.parametrize(
    ("train", "val", "test"),
    [("Training", "valid", "Testing"), ("TRAIN", "validation", "Test"), ("train", "dev", "test")],
)
def test_usual_spellings_of_split_folders(tree: Path, train: str, val: str, test: str) -> None:
    for old, new in (("train", train), ("val", val), ("test", test)):
        (tree / old).rename(tree / f"{old}-moved").rename(tree / new)
    data = ImageFolder(str(tree))
    for stage in ("fit", "test", "predict"):
        data.setup(stage)
    assert {name: len(dataset) for name, dataset in data.datasets.items()} == {
        "train": 18,
        "val": 9,
        "test": 9,
        "predict": 9,
    }
    assert data.class_names == ["a", "b", "c"]


def test_two_folders_of_one_split_are_refused(tree: Path, fails: Callable[..., str]) -> None:
    shutil.copytree(tree / "val", tree / "valid")
    message = fails("fit", *TINY, "--data=ImageFolder", f"--data.root={tree}")
    assert "val and valid both name the val split" in message


def test_other_folders_next_to_the_splits_are_named(tree: Path, recwarn: pytest.WarningsRecorder) -> None:
    (tree / "val").rename(tree / "holdout")
    (tree / "annotations").mkdir()
    ImageFolder(str(tree)).setup("fit")
    (warning,) = [str(entry.message) for entry in recwarn if "not read" in str(entry.message)]
    assert "the folders holdout are not read" in warning and "val: val, valid, validation, dev" in warning


def test_folders_that_look_like_splits_are_not_taken_for_classes(tree: Path, fails: Callable[..., str]) -> None:
    for name in ("train", "val", "test"):
        (tree / name).rename(tree / f"set_{name}")
    message = fails("check-data", "--data=ImageFolder", f"--data.root={tree}")
    assert "the folders set_test, set_train, set_val hold folders of the same names" in message and "Rename" in message


@pytest.mark.parametrize("split", ["", "train"])
def test_one_folder_around_the_data_is_skipped(tmp_path: Path, split: str, caplog: pytest.LogCaptureFixture) -> None:
    make_tree(tmp_path / "root" / "photos", {split: 5})
    data = ImageFolder(str(tmp_path / "root"), val_fraction=0.2)
    with caplog.at_level(logging.INFO):
        data.setup("fit")
    assert data.class_names == ["a", "b", "c"] and "reading its only folder, photos" in caplog.text


def test_a_repeated_split_folder_is_skipped(tmp_path: Path) -> None:
    make_tree(tmp_path / "root" / "train", {"train": 4})
    data = ImageFolder(str(tmp_path / "root"), val_fraction=0.25)
    data.setup("fit")
    assert data.class_names == ["a", "b", "c"] and len(data.datasets["train"]) == 9


def test_folders_below_class_folders_are_read_too(tmp_path: Path) -> None:
    """Images sorted by class and year are still images of the class."""
    generator = np.random.default_rng(0)
    for channel, name in enumerate("abc"):
        for year in ("2023", "2024"):
            (tmp_path / "root" / name / year).mkdir(parents=True)
            noise_image(channel, generator).save(tmp_path / "root" / name / year / "0.png")
    data = ImageFolder(str(tmp_path / "root"), val_fraction=0.5, test_fraction=0)
    data.setup("fit")
    assert data.class_names == ["a", "b", "c"]
    assert data.datasets["train"].labels.tolist() == data.datasets["val"].labels.tolist() == [0, 1, 2]


def test_stretching_keeps_the_edges_and_cropping_does_not(tmp_path: Path) -> None:
    """A red frame around a gray image of 40 by 80 pixels, for a model of 32 by 32 and one of 32 by 64."""
    for name in "ab":
        folder = tmp_path / "p" / "val" / name
        folder.mkdir(parents=True)
        image = Image.new("RGB", (80, 40), "red")
        image.paste((128, 128, 128), (10, 0, 70, 40))
        image.save(folder / "0.png")

    def pixels(size: tuple[int, int], **options: Any) -> torch.Tensor:
        data = ImageFolder(str(tmp_path / "p"), **options)
        data.input_size = size
        data.setup("validate")
        return data.datasets["val"].images_at(torch.tensor([0]))[0]

    cropped, stretched, wide = pixels((32, 32)), pixels((32, 32), resize="stretch"), pixels((32, 64))
    assert cropped.shape == stretched.shape == (3, 32, 32) and wide.shape == (3, 32, 64)
    assert cropped[:, 16, 0].tolist() == [128, 128, 128]
    assert stretched[:, 16, 0].tolist() == wide[:, 16, 0].tolist() == [255, 0, 0]


def test_sizes_out_of_range_are_refused(fails: Callable[..., str]) -> None:
    for size in ("0", "[32]", "[32, -1]"):
        assert "--data.size is" in fails("fit", *TINY, "--data=ImageFolder", f"--data.size={size}")


def test_center_of_the_weights_is_evaluated(tmp_path: Path) -> None:
    """With crop_pct 0.8, a tenth of each side is cut off; small images that stay as they are lose nothing."""
    folder = tmp_path / "p" / "val" / "a"
    folder.mkdir(parents=True)
    (tmp_path / "p" / "val" / "b").mkdir()
    image = Image.new("RGB", (40, 40), "red")
    image.paste((128, 128, 128), (4, 4, 36, 36))
    image.save(folder / "0.png")
    for side, corner in ((32, [128, 128, 128]), (40, [255, 0, 0])):
        data = ImageFolder(str(tmp_path / "p"))
        data.input_size, data.crop_pct = (side, side), 0.8
        data.setup("validate")
        assert data.datasets["val"].images_at(torch.tensor([0]))[0, :, 0, 0].tolist() == corner
        assert data.eval_crop == ("crop", 0.8 if side == 32 else 1.0)
