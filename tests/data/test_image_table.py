"""Tables of images: CSV and Parquet, every problem in one error, the same results as from folders."""

import csv
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from tests.conftest import CPU, TINY, equal, noise_image, only, weights
from vit_finetune import ImageTable, main
from vit_finetune.cli.check_data import check

Rows = Sequence[Sequence[object]]


def write_csv(file: Path, rows: Rows, delimiter: str = ",", encoding: str = "utf-8") -> Path:
    with open(file, "w", newline="", encoding=encoding) as stream:
        csv.writer(stream, delimiter=delimiter).writerows(rows)
    return file


def read_csv(file: Path) -> list[dict[str, str]]:
    with open(file, newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def rows_of(tree: Path) -> list[list[str]]:
    """Path relative to the folder around the tree, class and split of every image."""
    files = [file for split in ("train", "val", "test") for file in sorted((tree / split).rglob("*.png"))]
    return [[str(file.relative_to(tree.parent)), file.parent.name, file.parent.parent.name] for file in files]


def paths_of(tree: Path, split: str) -> list[str]:
    return [str(tree.parent / path) for path, _, name in rows_of(tree) if name == split]


@pytest.fixture
def table(tree: Path) -> Path:
    return write_csv(tree.parent / "labels.csv", [["image", "label", "split"], *rows_of(tree)])


def load(table: Path, stage: str = "fit", **options: Any) -> ImageTable:
    data = ImageTable(str(table), **options)
    data.setup(stage)
    return data


def refused(table: Path, stage: str = "fit", **options: Any) -> str:
    with pytest.raises(MisconfigurationException) as error:
        load(table, stage, **options)
    return str(error.value)


def test_equals_the_folders(table: Path, tree: Path, tmp_path: Path) -> None:
    """Bit for bit the same weights, decoded by two workers or once into memory."""
    workers = ["--data.cache_gb=0", "--data.num_workers=2"]
    main(["fit", *TINY, "--data=ImageTable", f"--data.table={table}", *workers, "--experiment=table"])
    main(["fit", *TINY, "--data=ImageFolder", f"--data.root={tree}", "--experiment=folder"])
    left, right = (weights(only(tmp_path / "runs" / name, "last.ckpt")) for name in ("table", "folder"))
    assert equal(left, right)


def test_from_fit_to_export(table: Path, tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["fit", *TINY, "--data=ImageTable", f"--data.table={table}"])
    main(["test", "--ckpt_path=last", *CPU])
    assert json.loads(only(tmp_path / "runs", "report.json").read_text())["images"] == 9
    main(["predict", "--ckpt_path=last", *CPU])
    predictions = read_csv(only(tmp_path / "runs", "predictions.csv"))
    assert [row["path"] for row in predictions] == paths_of(tree, "test")
    main(["check-data", "--ckpt_path=last", *CPU])
    assert "problems 0, notes 0" in capsys.readouterr().out
    pytest.importorskip("vit_finetune.export")
    main(["export", "--ckpt_path=last", "--format=timm", *CPU])
    assert "top-1 equal for 9 of 9 images" in capsys.readouterr().out


# Reading


@pytest.mark.parametrize(
    ("delimiter", "encoding"), [(",", "utf-8"), (";", "utf-8-sig"), ("\t", "utf-8"), ("parquet", "")]
)
def test_kinds_of_tables(tree: Path, delimiter: str, encoding: str) -> None:
    """Names with delimiters, quotes and letters beyond ASCII, integers as classes, any spelling of the splits."""
    odd = 'ü, "x"; y.png'
    (tree / "train" / "a" / "00.png").rename(tree / "train" / "a" / odd)
    splits = {"train": "Training", "val": "valid", "test": "TEST"}
    rows = [[path, {"a": 10, "b": 2, "c": 1}[label], splits[split]] for path, label, split in rows_of(tree)]
    header = ["file, name" if delimiter != ";" else "file", "class", "subset"]
    file = tree.parent / "table"
    if delimiter == "parquet":
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.table(dict(zip(header, zip(*rows, strict=True), strict=True))), file)
    else:
        write_csv(file, [header, *rows, []], delimiter, encoding)
    columns = dict(zip(("image_column", "label_column", "split_column"), header, strict=True))
    data = load(file, **columns)
    assert data.class_names == ["1", "2", "10"]
    assert {name: len(dataset) for name, dataset in data.datasets.items()} == {"train": 18, "val": 9}
    train = data.datasets["train"]
    assert str(tree / "train" / "a" / odd) in train.names
    assert train.labels.tolist() == [{"c": 0, "b": 1, "a": 2}[Path(name).parent.name] for name in train.names]


def test_integers_that_pandas_stored_as_floats(tree: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    paths = [path for path, *_ in rows_of(tree)]
    labels = [float(i % 3) for i in range(len(paths))]
    pq.write_table(pa.table({"image": paths, "label": labels}), tree.parent / "t.parquet")
    assert load(tree.parent / "t.parquet").class_names == ["0", "1", "2"]
    pq.write_table(pa.table({"image": paths, "label": [*labels[:-1], None]}), tree.parent / "t.parquet")
    assert "row 35: the label is empty" in refused(tree.parent / "t.parquet")


def test_absolute_paths_and_spaces(tree: Path, tmp_path: Path) -> None:
    lines = [f"{tree.parent / path} , {label} ,{split}" for path, label, split in rows_of(tree)]
    (tmp_path / "elsewhere").mkdir()
    table = tmp_path / "elsewhere" / "labels.csv"
    table.write_text("\r\n".join(["image, label, split", *lines, ",,"]))
    assert load(table).datasets["val"].names == [
        str(tree.parent / path) for path, _, split in rows_of(tree) if split == "val"
    ]


def test_splits_at_random_without_the_column(tree: Path) -> None:
    table = write_csv(tree.parent / "t.csv", [["image", "label"], *(row[:2] for row in rows_of(tree))])
    options = {"test_fraction": 0.25, "val_fraction": 1 / 3}
    data = load(table, **options)
    data.setup("test")
    assert {name: len(dataset) for name, dataset in data.datasets.items()} == {"train": 18, "val": 9, "test": 9}
    assert load(table, **options).split_fingerprint == data.split_fingerprint
    assert data.class_counts == {"train": [6] * 3, "val": [3] * 3, "test": [3] * 3}


def test_train_rows_alone(tree: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [row for row in rows_of(tree) if row[2] == "train"]
    table = write_csv(tree.parent / "t.csv", [["image", "label", "split"], *rows])
    fitted = load(table, val_fraction=1 / 3)
    with caplog.at_level("INFO"):
        tested = load(table, "test", val_fraction=1 / 3)
    assert len(fitted.datasets["train"]) == 12
    assert tested.datasets["test"].names == fitted.datasets["val"].names
    assert f"--data.table {table} has no test split: testing on the validation images" in caplog.text


@pytest.mark.parametrize(
    ("left", "predicted"), [(("train", "val", "test"), "test"), (("train", "val"), "val"), ((), "")]
)
def test_predict_needs_no_labels(tree: Path, left: tuple[str, ...], predicted: str) -> None:
    rows = [[path, split] for path, _, split in rows_of(tree) if split in left or not left]
    rows = rows if left else [row[:1] for row in rows]
    table = write_csv(tree.parent / "t.csv", [["image", "split"][: len(rows[0])], *rows])
    names = [str(tree.parent / row[0]) for row in rows if row[-1] == predicted or not predicted]
    data = load(table, "predict")
    assert data.datasets["predict"].names == names and set(data.datasets["predict"].labels.tolist()) == {-1}


def test_known_classes_and_an_input_that_is_not_square(table: Path) -> None:
    data = ImageTable(str(table))
    data.known_classes, data.input_size = ["c", "unseen", "b", "a"], (32, 64)
    data.setup("test")
    assert data.datasets["test"].labels.tolist() == [3, 3, 3, 2, 2, 2, 0, 0, 0]
    assert data.datasets["test"].images_at(torch.tensor([0])).shape == (1, 3, 32, 64)
    data.known_classes = ["a", "b"]
    with pytest.raises(MisconfigurationException, match=r"train: unknown class: c\. The classes are a, b"):
        data.setup("test")


# Problems


def test_missing_table_and_missing_column(table: Path, fails: Callable[..., str]) -> None:
    assert (
        fails("fit", *TINY, "--data=ImageTable", "--data.table=no.csv")
        == "error: --data.table no.csv does not exist.\n"
    )
    assert fails("fit", *TINY, "--data=ImageTable", f"--data.table={table.parent}").endswith("is not a file.\n")
    message = fails("fit", *TINY, "--data=ImageTable", f"--data.table={table}", "--data.label_column=class")
    assert "has no column class. Its columns are image, label, split; choose" in message
    other = write_csv(table.with_name("other.csv"), [["file", "class"], ["1.png", "a"]], ";")
    assert f"{other} has no column image, label. Its columns are file, class; choose" in refused(other)
    assert "no column subset. " in refused(table, split_column="subset")
    assert "no column file. " in refused(table, "predict", image_column="file")


def test_every_row_that_cannot_be_used_is_in_one_error(
    table: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No image is opened before: all of them are empty files here."""
    for path in tree.rglob("*.png"):
        path.write_bytes(b"")
    rows = rows_of(tree)
    rows[1][1] = ""
    rows[2][2] = "holdout"
    rows[3][0] = "images/none.png"
    rows[4] = rows[4][:2]
    rows[5][0] = ""
    rows[6] = [rows[0][0], "b", "train"]
    rows[7] = [*rows[7], "more"]
    write_csv(table, [["image", "label", "split"], *rows])
    assert refused(table).splitlines() == [
        f"--data.table {table}: 7 rows cannot be used:",
        "  line 3: the label is empty",
        "  line 4: unknown split 'holdout'; expected train, val or test",
        f"  line 5: {tree}/none.png is not a file",
        "  line 6: 2 fields for 3 columns",
        "  line 7: the image is empty",
        f"  line 8: {tree}/train/a/00.png has the label b, but a on line 2",
        "  line 9: 4 fields for 3 columns",
    ]
    data = ImageTable(str(table))
    data.known_classes = ["b", "c"]
    with pytest.raises(MisconfigurationException, match="line 2: unknown class a"):
        data.setup("fit")
    assert "line 3" not in refused(table, "predict") and "line 5" in refused(table, "predict")


def test_a_long_list_of_problems_is_cut(table: Path, tree: Path) -> None:
    shutil.rmtree(tree / "train")
    shutil.rmtree(tree / "test")
    lines = refused(table).splitlines()
    assert "27 rows cannot be used" in lines[0] and lines[-1] == "  and 7 more" and len(lines) == 22


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"image,label\n", "has no rows"),
        (b"PK\x03\x04\0\0image", "is neither a CSV file in UTF-8 nor a Parquet file"),
        ("image,label\n".encode("utf-16"), "is neither a CSV file in UTF-8 nor a Parquet file"),
        (b'image,label\n"' + b"x" * 200_000, "line 2: field larger than field limit"),
    ],
)
def test_files_that_are_not_tables(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    assert message in refused(tmp_path / "t.csv")


def test_parquet_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: Callable[..., str]
) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "t.parquet"
    file.write_bytes(b"PAR1 and no more")
    assert f"--data.table {file} cannot be read: " in refused(file)
    pq.write_table(pa.table({"image": [{"bytes": b"x"}], "label": [0]}), file)
    assert "not text or numbers. If the images are stored in the Parquet file itself: --data HuggingFace" in refused(
        file
    )
    monkeypatch.setattr("vit_finetune.data.image_table.find_spec", lambda name: None)
    message = fails("fit", *TINY, "--data=ImageTable", f"--data.table={file}")
    assert "needs the package pyarrow: pip install 'vit_finetune[hf]'" in message


def test_broken_and_missing_files_can_be_skipped(table: Path, tree: Path, tmp_path: Path) -> None:
    broken, missing = tree / "train" / "a" / "03.png", tree / "train" / "b" / "02.png"
    broken.write_bytes(b"")
    with pytest.raises(MisconfigurationException, match="1 images cannot be read"):
        load(table)
    missing.unlink()
    main(["fit", *TINY, "--data=ImageTable", f"--data.table={table}", "--data.skip_broken=true"])
    lines = only(tmp_path / "runs", "skipped-fit.txt").read_text().splitlines()
    assert [line.split("'")[1] for line in lines] == [str(broken), str(missing)]
    names = load(table, "predict", skip_broken=True).datasets["predict"].names
    assert len(names) == 9


def test_check_data_finds_rows_listed_twice_and_copies(table: Path, tree: Path) -> None:
    shutil.copy(tree / "train" / "a" / "00.png", tree / "test" / "a" / "copy.png")
    (tree / "val" / "c" / "01.png").write_bytes(b"")
    noise_image(0, np.random.default_rng(1)).save(tree / "val" / "stray.png")
    rows = [*rows_of(tree), ["images/train/b/01.png", "b", "train"]]
    rows = [row for row in rows if row[0] != "images/val/stray.png"]
    found = check(ImageTable(str(write_csv(table, [["image", "label", "split"], *rows]))))
    assert [(finding.problem, finding.text, finding.details) for finding in found.findings] == [
        (True, "unreadable files", [f"'{tree}/val/c/01.png': the file is empty"]),
        (True, "duplicates in several splits", [f"{tree}/train/a/00.png = {tree}/test/a/copy.png"]),
        (False, "duplicates in the same split and class", [f"{tree}/train/b/01.png = {tree}/train/b/01.png"]),
    ]
    unsplit = write_csv(table, [["image", "label"], *(row[:2] for row in rows)])
    kinds = [finding.text for finding in check(ImageTable(str(unsplit))).findings]
    assert kinds == ["unreadable files", "duplicates that a random split can separate"]
