"""Datasets of the Hugging Face library: folders of Parquet files and images, saved datasets, the hub and its cache."""

import csv
import json
import pickle
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError
from lightning.fabric.utilities.exceptions import MisconfigurationException

from tests.conftest import CPU, TINY, equal, only, weights
from vit_finetune import HuggingFace, main
from vit_finetune.cli.check_data import check
from vit_finetune.data.decode import EncodedImage
from vit_finetune.data.hugging_face import RowReader

datasets = pytest.importorskip("datasets")
NAMES = {"train": "train", "val": "validation", "test": "test"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for each test, and no network."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)

    def refuse(self: object, *args: object, **kwargs: object) -> None:
        raise OfflineModeIsEnabled("Cannot reach the hub: offline mode is enabled.")

    monkeypatch.setattr(HfApi, "dataset_info", refuse)
    datasets.disable_progress_bars()
    return tmp_path / "cache"


def rows_of(files: Iterable[Path]) -> dict[str, list[Any]]:
    """Columns image and label; the label is the name of the folder."""
    files = list(files)
    images = [{"bytes": file.read_bytes(), "path": None} for file in files]
    return {"image": images, "label": [file.parent.name for file in files]}


def split_of(tree: Path, split: str, label: Any = None, **columns: Any) -> Any:
    """A split of a tree as a Dataset; ``label`` is the type of the labels."""
    rows = rows_of(sorted((tree / split).rglob("*.png")))
    label = label or datasets.ClassLabel(names=["a", "b", "c"])
    features = datasets.Features({"image": datasets.Image(), "label": label})
    dataset = datasets.Dataset.from_dict(rows, features=features)
    for name, values in columns.items():
        dataset = dataset.add_column(name, values)
    return dataset


def write_parquet(folder: Path, splits: dict[str, Any]) -> Path:
    folder.mkdir()
    for name, dataset in splits.items():
        dataset.to_parquet(folder / f"{name}.parquet")
    return folder


@pytest.fixture
def parquet(tree: Path, tmp_path: Path) -> Path:
    return write_parquet(tmp_path / "parquet", {name: split_of(tree, split) for split, name in NAMES.items()})


def load(path: Path, stage: str = "fit", **options: Any) -> HuggingFace:
    data = HuggingFace(str(path), **options)
    data.prepare_data()
    data.setup(stage)
    return data


def refused(path: Path | str, stage: str = "fit", **options: Any) -> str:
    with pytest.raises(MisconfigurationException) as error:
        load(Path(path), stage, **options)
    return str(error.value)


def sizes(data: HuggingFace) -> dict[str, int]:
    return {name: len(dataset) for name, dataset in data.datasets.items()}


def test_equals_the_folders(parquet: Path, tree: Path, tmp_path: Path) -> None:
    """Bit for bit the same weights, decoded by two workers or once into memory."""
    workers = ["--data.cache_gb=0", "--data.num_workers=2"]
    main(["fit", *TINY, "--data=HuggingFace", f"--data.path={parquet}", *workers, "--experiment=hub"])
    main(["fit", *TINY, "--data=ImageFolder", f"--data.root={tree}", "--experiment=folder"])
    left, right = (weights(only(tmp_path / "runs" / name, "last.ckpt")) for name in ("hub", "folder"))
    assert equal(left, right)


def test_from_fit_to_export(parquet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["fit", *TINY, "--data=HuggingFace", f"--data.path={parquet}"])
    main(["test", "--ckpt_path=last", *CPU])
    report = json.loads(only(tmp_path / "runs", "report.json").read_text())
    assert report["images"] == 9
    main(["predict", "--ckpt_path=last", *CPU])
    lines = only(tmp_path / "runs", "predictions.csv").read_text().splitlines()
    assert [row["path"] for row in csv.DictReader(lines)] == [f"test/{i:06d}" for i in range(9)]
    main(["check-data", "--ckpt_path=last", *CPU])
    printed = capsys.readouterr()
    assert "problems 0, notes 0" in printed.out and "Generating" not in printed.err
    pytest.importorskip("vit_finetune.export")
    main(["export", "--ckpt_path=last", "--format=timm", *CPU])
    assert "top-1 equal for 9 of 9 images" in capsys.readouterr().out


# Sources


@pytest.mark.parametrize("source", ["parquet", "saved", "folder"])
def test_the_three_kinds_of_folders(tree: Path, parquet: Path, tmp_path: Path, source: str) -> None:
    if source == "saved":
        splits = {name: split_of(tree, split) for split, name in NAMES.items()}
        datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    path = {"parquet": parquet, "saved": tmp_path / "saved", "folder": tree}[source]
    data = load(path, cache_gb=0)
    data.setup("test")
    data.setup("predict")
    assert sizes(data) == {"train": 18, "val": 9, "test": 9, "predict": 9} and data.class_names == ["a", "b", "c"]
    assert data.datasets["val"].names == [f"validation/{i:06d}" for i in range(9)]
    assert data.datasets["val"].labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    brightest = data.datasets["test"].images_at(torch.arange(9)).float().mean((2, 3)).argmax(1)
    assert brightest.tolist() == data.datasets["test"].labels.tolist()


def test_images_stay_encoded_on_the_disk(parquet: Path, tree: Path) -> None:
    """What a worker process receives is a path, not the images."""
    source = load(parquet, cache_gb=0).reader.source
    assert isinstance(source, RowReader) and source.rows["train"].cache_files
    copy = pickle.loads(pickle.dumps(source))
    content = (tree / "train" / "b" / "00.png").read_bytes()
    assert copy("train/000006") == EncodedImage("train/000006", content)
    assert len(pickle.dumps(source)) < 3 * len(content)


def test_order_of_the_classes_is_that_of_the_dataset(tree: Path, tmp_path: Path) -> None:
    """Also with a class that has no images."""
    label = datasets.ClassLabel(names=["c", "unseen", "a", "b"])
    path = write_parquet(tmp_path / "p", {name: split_of(tree, split, label) for split, name in NAMES.items()})
    data = load(path)
    assert data.class_names == ["c", "unseen", "a", "b"]
    assert data.datasets["val"].labels.tolist() == [0, 0, 0, 2, 2, 2, 3, 3, 3]
    assert data.class_counts["train"] == [6, 0, 6, 6]
    data.known_classes, data.input_size = ["a", "b", "c"], (32, 64)
    data.setup("test")
    assert data.datasets["test"].labels.tolist() == [2, 2, 2, 0, 0, 0, 1, 1, 1]
    assert data.datasets["test"].images_at(torch.tensor([0])).shape == (1, 3, 32, 64)
    assert [finding.text for finding in check(HuggingFace(str(path))).findings] == [
        "train: classes without images",
        "val: classes without images",
        "test: classes without images",
    ]


def test_one_split_with_another_name_is_split_at_random(tree: Path, tmp_path: Path) -> None:
    split_of(tree, "train").save_to_disk(tmp_path / "saved")
    data = load(tmp_path / "saved", test_fraction=1 / 3, val_fraction=0.5)
    data.setup("test")
    assert sizes(data) == {"train": 6, "val": 6, "test": 6}
    assert all(name.startswith("all/") for name in data.datasets["test"].names)


def test_train_alone_is_tested_on_its_validation_split(
    tree: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_parquet(tmp_path / "p", {"train": split_of(tree, "train")})
    fitted = load(path, val_fraction=1 / 3)
    with caplog.at_level("INFO"):
        tested = load(path, "test", val_fraction=1 / 3)
    assert sizes(fitted) == {"train": 12, "val": 6}
    assert fitted.split_fingerprint and tested.datasets["test"].names == fitted.datasets["val"].names
    assert "has no test split: testing on the validation images" in caplog.text
    predicting = load(path, "predict")
    assert predicting.datasets["predict"].names == [f"train/{i:06d}" for i in range(18)]


def test_names_of_splits(tree: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    def saved(name: str, *splits: str) -> Path:
        datasets.DatasetDict({split: split_of(tree, "val") for split in splits}).save_to_disk(tmp_path / name)
        return tmp_path / name

    assert "none of the splits left, right has a name that is known (train: train, training; val" in refused(
        saved("unknown", "left", "right")
    )
    assert "valid and validation both name the val split" in refused(saved("twice", "train", "valid", "validation"))
    assert sizes(load(saved("more", "training", "dev", "extra"))) == {"train": 9, "val": 9}
    assert "the splits extra are not read" in str(recwarn.pop(UserWarning).message)


# Columns


@pytest.mark.parametrize("kind", ["string", "int64"])
def test_labels_that_are_strings_or_integers(tree: Path, tmp_path: Path, kind: str) -> None:
    for number, name in zip(("10", "2", "1"), "abc", strict=True):
        for split in ("train", "val"):
            (tree / split / name).rename(tree / split / number)
    splits = {NAMES[split]: split_of(tree, split, datasets.Value("string")) for split in ("train", "val")}
    splits = {name: rows.cast_column("label", datasets.Value(kind)) for name, rows in splits.items()}
    data = load(write_parquet(tmp_path / "p", splits))
    assert data.class_names == ["1", "2", "10"] and data.datasets["val"].labels.tolist() == [0] * 3 + [1] * 3 + [2] * 3


def test_columns_that_are_not_clear_are_listed(tree: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    rows = split_of(tree, "train", number=[i % 6 for i in range(18)], score=[0.5] * 18)
    rows = rows.add_column("coarse", [0] * 18).cast_column("coarse", datasets.ClassLabel(names=["x", "y"]))
    path = write_parquet(tmp_path / "p", {"train": rows})
    columns = "The columns are image (Image), label (ClassLabel), number (int64), score (float64), coarse (ClassLabel)."
    message = fails("fit", *TINY, "--data=HuggingFace", f"--data.path={path}")
    assert f"2 columns have the type ClassLabel; choose one with --data.label_column. {columns}" in message
    assert f"--data.label_column score is not a column of labels. {columns}" in refused(path, label_column="score")
    assert f"--data.image_column photo is not a column of images. {columns}" in refused(path, image_column="photo")
    assert "the column number does not hold images: " in refused(path, image_column="number")
    assert load(path, label_column="coarse").class_names == ["x", "y"]
    assert load(path, label_column="number", val_fraction=0.4).class_names == list("012345")
    none = write_parquet(tmp_path / "none", {"train": rows.remove_columns(["image", "label", "coarse"])})
    assert "no columns have the type Image; choose one with --data.image_column" in refused(none)
    unlabeled = write_parquet(tmp_path / "unlabeled", {"train": rows.remove_columns(["label", "coarse"])})
    assert "no columns have the type ClassLabel; choose one with --data.label_column" in refused(unlabeled)
    assert sizes(load(unlabeled, "predict")) == {"predict": 18}


@pytest.mark.parametrize("kind", ["bytes", "paths"])
def test_images_of_other_types(tree: Path, tmp_path: Path, kind: str) -> None:
    files = sorted((tree / "train").rglob("*.png"))
    column = [file.read_bytes() for file in files] if kind == "bytes" else [str(file) for file in files]
    rows = datasets.Dataset.from_dict({"photo": column, "label": [file.parent.name for file in files]})
    data = load(write_parquet(tmp_path / "p", {"train": rows}), image_column="photo", val_fraction=0.5)
    images = data.datasets["val"]
    assert images.images_at(torch.arange(9)).float().mean((2, 3)).argmax(1).tolist() == images.labels.tolist()


# Labels and images that are missing


def test_unlabeled_rows_are_for_predict_only(tree: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    label = datasets.ClassLabel(names=["a", "b", "c"])
    train, test = split_of(tree, "train"), split_of(tree, "test")
    hidden = datasets.Dataset.from_dict({**test[:], "label": [-1] * 9}, features=test.features)
    path = write_parquet(tmp_path / "hidden", {"train": train, "test": hidden})
    with caplog.at_level("INFO"):
        assert sizes(load(path, "test", val_fraction=1 / 3)) == {"test": 6}
    assert "the split test has no labels; only predict uses it" in caplog.text
    assert sizes(load(path, "predict")) == {"predict": 9}
    features = datasets.Features({"image": datasets.Image(), "label": label})
    some = datasets.Dataset.from_dict({**train[:], "label": [None, -1, *[0] * 16]}, features=features)
    path = write_parquet(tmp_path / "some", {"train": some})
    assert "2 of 18 rows of the split train have no label (null or -1 in the column label)" in refused(path)
    assert sizes(load(path, "predict")) == {"predict": 18}


def test_broken_images(tree: Path, tmp_path: Path) -> None:
    rows = rows_of(sorted((tree / "train").rglob("*.png")))
    rows["image"][1] = {"bytes": b"<html>", "path": None}
    rows["image"][2] = None
    rows["image"][8] = rows["image"][14]  # in two classes
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    path = write_parquet(tmp_path / "p", {"train": datasets.Dataset.from_dict(rows, features=features)})
    message = refused(path)
    assert "2 images cannot be read" in message and "'train/000002': the row has no image" in message
    assert "'train/000001': damaged, or not an image" in message
    data = load(path, skip_broken=True, val_fraction=1 / 3)
    assert sum(sizes(data).values()) == 16
    assert load(path, "predict").datasets["predict"].__getitems__([2])["error"] == ["the row has no image"]
    found = check(HuggingFace(str(path)))
    assert [finding.text for finding in found.findings] == ["unreadable files", "duplicates in several classes"]
    assert found.findings[1].details == ["train/000008 = train/000014"]


# The hub


def test_folders_that_cannot_be_loaded(tmp_path: Path, fails: Callable[..., str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.parquet").write_bytes(b"PAR1")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "train.parquet").write_bytes(b"PAR1 and no more")
    fit = ["fit", *TINY, "--data=HuggingFace"]
    assert "--data.path empty cannot be loaded: The directory at" in fails(*fit, "--data.path=empty")
    assert "--data.path file.parquet is a file; expected its folder" in fails(*fit, "--data.path=file.parquet")
    assert "broken cannot be loaded: Parquet magic bytes not found" in refused("broken")


def test_several_configurations(parquet: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / "several" / name).mkdir(parents=True)
        shutil.copy(parquet / "train.parquet", tmp_path / "several" / name)
    configs = [{"config_name": name, "data_files": f"{name}/*.parquet"} for name in ("one", "two")]
    (tmp_path / "several" / "README.md").write_text(f"---\n{json.dumps({'configs': configs})}\n---\n")
    assert refused(tmp_path / "several").endswith(
        "Please pick one among the available configs: ['one', 'two']. Choose one with --data.name."
    )
    assert "BuilderConfig 'three' not found" in refused(tmp_path / "several", name="three")
    assert sizes(load(tmp_path / "several", name="two", val_fraction=0.5)) == {"train": 9, "val": 9}


def test_hub_that_cannot_be_reached(
    parquet: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, fails: Callable[..., str]
) -> None:
    fit = ["fit", *TINY, "--data=HuggingFace", "--data.path=someone/shapes"]
    message = fails(*fit)
    assert (
        message.count("\n") == 1 and "is neither a folder nor in the local cache, and the Hugging Face hub" in message
    )
    assert all(way in message for way in ("offline mode is enabled", "HF_HOME", "HF_HUB_OFFLINE", "local folder"))

    class NotFoundError(RepositoryNotFoundError):
        def __init__(self) -> None:  # the library's own needs a response
            Exception.__init__(self, "404")

    def unknown(self: object, *args: object, **kwargs: object) -> None:
        raise NotFoundError

    monkeypatch.setattr(HfApi, "dataset_info", unknown)
    assert "the Hugging Face hub has no such public dataset (for a private one: hf auth login)" in fails(*fit)
    monkeypatch.setattr("vit_finetune.data.hub.find_spec", lambda name: None)
    assert "needs the package datasets: pip install 'vit_finetune[hf]'." in fails(*fit)


def test_cached_dataset_needs_no_network(parquet: Path, cache: Path) -> None:
    load(parquet)
    (built,) = (file.parent for file in cache.rglob("dataset_info.json"))
    shutil.copytree(built, cache / "someone___shapes" / "default" / "0.0.0" / built.name)
    info = cache / "someone___shapes" / "default" / "0.0.0" / built.name / "dataset_info.json"
    info.write_text(json.dumps(json.loads(info.read_text()) | {"config_name": "default", "dataset_name": "shapes"}))
    for file in info.parent.glob("parquet-*.arrow"):
        file.rename(file.with_name(file.name.replace("parquet-", "shapes-")))
    assert HuggingFace("someone/shapes").unavailable_reason() is None
    assert sizes(load(Path("someone/shapes"))) == {"train": 18, "val": 9}
