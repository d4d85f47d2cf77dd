"""Predictions for files of any kind, as tables."""

import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import CPU, REPOSITORY, TINY, TINY_MODEL, make_tree, noise_image, only
from vit_finetune import main

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that classifies red (a), green (b) and blue (c) images."""
    folder = tmp_path_factory.mktemp("trained")
    tree = make_tree(folder / "images", {"train": 6, "val": 3})
    options = ["--data=ImageFolder", f"--data.root={tree}", f"--trainer.default_root_dir={folder / 'runs'}"]
    main(["fit", *TINY, *options, "--trainer.max_epochs=8", "--model.lr=0.01"])
    return only(folder, "best-*.ckpt")


@pytest.fixture
def predict(checkpoint: Path, tmp_path: Path) -> Callable[..., tuple[Rows, Rows]]:
    """Predict into a new table; return its rows and the JSON lines."""

    def run(root: Path, *options: str, name: str = "predictions") -> tuple[Rows, Rows]:
        arguments = [f"--ckpt_path={checkpoint}", *CPU, f"--data.root={root}", "--data.num_workers=0"]
        main(["predict", *arguments, f"--predictions.path={tmp_path / name}", *options])
        with open(tmp_path / f"{name}.csv", newline="", encoding="utf-8") as file:
            table = list(csv.DictReader(file))
        return table, [json.loads(line) for line in (tmp_path / f"{name}.jsonl").open(encoding="utf-8")]

    return run


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Six images of known classes and three broken files, nested, without class folders."""
    root = tmp_path / "mixed"
    (root / "deep" / "er").mkdir(parents=True)
    generator = np.random.default_rng(1)
    for name, channel in (("1.png", 2), ("3.png", 0), ("5.png", 1), ("deep/6.png", 1), ("deep/er/8.png", 0)):
        noise_image(channel, generator).save(root / name)
    noise_image(2, generator, side=200).save(root / "deep" / "7.jpg")
    whole = (root / "deep" / "7.jpg").read_bytes()
    (root / "2.jpg").write_bytes(whole[: len(whole) // 2])
    (root / "4.png").write_bytes(b"")
    (root / "deep" / "er" / "9.png").write_text("<html>")
    return root


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_file_is_a_row_with_its_error(predict: Callable[..., Any], mixed: Path, workers: int) -> None:
    table, lines = predict(mixed, f"--data.num_workers={workers}", "--data.batch_size=2")
    places = ["1.png", "2.jpg", "3.png", "4.png", "5.png", "deep/6.png", "deep/7.jpg", "deep/er/8.png", "deep/er/9.png"]
    assert [row["path"] for row in table] == [str(mixed / place) for place in places]
    assert [row["class"] for row in table] == ["c", "", "a", "", "b", "b", "c", "a", ""]
    errors = [row["error"] for row in table]
    assert errors[1].startswith("image file is truncated") and errors[3] == "the file is empty"
    assert errors[8].startswith("damaged, or not an image") and "".join(errors[4:8]) == ""
    for row, line in zip(table, lines, strict=True):
        assert (line["path"], line["error"] or "", line["class"] or "") == (row["path"], row["error"], row["class"])
        if not line["error"]:
            assert line["top"][0] == {"class": line["class"], "probability": line["probability"]}
            assert sum(entry["probability"] for entry in line["top"]) == pytest.approx(1, abs=1e-5)
    assert lines[1]["top"] == [] and lines[1]["class"] is None and lines[1]["probability"] is None
    more = [f"{name}_{number}" for number in (2, 3) for name in ("class", "probability")]
    assert list(table[0]) == ["path", "class", "probability", *more, "error"]


def test_list_of_paths_and_one_file(predict: Callable[..., Any], mixed: Path) -> None:
    """Relative to the list's folder or absolute, in the order of the list; a missing file is a row."""
    lines = ["deep/6.png", str(mixed / "1.png"), "", "gone.png", "3.png"]
    (mixed / "list.txt").write_bytes(("\ufeff" + "\r\n".join(lines)).encode())
    table, _ = predict(mixed / "list.txt")
    assert [(Path(row["path"]).name, row["class"]) for row in table] == [
        ("6.png", "b"), ("1.png", "c"), ("gone.png", ""), ("3.png", "a"),
    ]  # fmt: skip
    assert table[2]["error"] == "No such file or directory"
    table, _ = predict(mixed / "5.png", name="one")
    assert [(row["path"], row["class"]) for row in table] == [(str(mixed / "5.png"), "b")]


def test_test_folder_needs_no_classes(predict: Callable[..., Any], mixed: Path, tmp_path: Path) -> None:
    """Training images in class folders and unlabeled test images: the usual layout of competitions."""
    root = make_tree(tmp_path / "root", {"train": 1})
    shutil.copytree(mixed / "deep", root / "test" / "no class of the model")
    assert [row["class"] for row in predict(root)[0]] == ["b", "c", "a", ""]


def test_top_k_and_path(
    predict: Callable[..., Any], mixed: Path, checkpoint: Path, fails: Callable[..., str], tmp_path: Path
) -> None:
    table, lines = predict(mixed, "--predictions.top_k=2", name="new/predictions.of.today")
    assert list(table[0]) == ["path", "class", "probability", "class_2", "probability_2", "error"]
    assert [len(line["top"]) for line in lines] == [2, 0, 2, 0, 2, 2, 2, 2, 0]
    options = ["predict", f"--ckpt_path={checkpoint}", f"--data.root={mixed}"]
    before = (tmp_path / "new" / "predictions.of.today.csv").read_bytes()
    message = fails(*options, f"--predictions.path={tmp_path / 'new' / 'predictions.of.today.csv'}")
    assert "--predictions.path" in message and "predictions.of.today.csv" in message and "already" in message
    assert (tmp_path / "new" / "predictions.of.today.csv").read_bytes() == before
    assert "--predictions.top_k is 0; expected at least 1" in fails(*options, "--predictions.top_k=0")


def test_nothing_to_predict_is_refused(checkpoint: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "photo.heic").write_bytes(b"\0\0\0\x18ftypheic")
    options = ["predict", f"--ckpt_path={checkpoint}", *CPU]
    assert "contains no images; accepted types are" in fails(*options, f"--data.root={tmp_path / 'empty'}")
    assert "nowhere does not exist" in fails(*options, "--data.root=nowhere")
    assert "is neither a folder, an image" in fails(*options, f"--data.root={tmp_path / 'photo.heic'}")


def test_checkpoint_of_another_dataset(mixed: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    main(["fit", *TINY, "--data=Shapes", "--data.train_size=200", "--trainer.limit_train_batches=1"])
    options = ["predict", "--ckpt_path=best", *CPU]
    message = fails(*options, f"--data.root={mixed}")
    assert "--data.root is not an option of the selected dataset. First select --data CIFAR10 or" in message
    main([*options, "--data=ImageFolder", f"--data.root={mixed}", "--data.num_workers=0"])
    lines = [json.loads(line) for line in only(tmp_path, "predictions.jsonl").open(encoding="utf-8")]
    assert len(lines) == 9 and {line["error"] is None for line in lines} == {True, False}
    assert len(lines[0]["top"]) == 5


def test_folder_of_images_is_not_read_as_cifar10(cifar: Path, mixed: Path, fails: Callable[..., str]) -> None:
    """Nothing is downloaded."""
    main(["fit", *TINY, f"--data.root={cifar}", "--trainer.limit_train_batches=1"])
    message = fails("predict", "--ckpt_path=best", *CPU, f"--data.root={mixed}")
    assert "contains image files, not CIFAR-10. For your own images, use --data ImageFolder" in message


def test_plain_lines_in_long_predictions(
    predict: Callable[..., Any], mixed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vit_finetune.callbacks.progress.LINE_EVERY", 0.0)
    predict(mixed, "--data.batch_size=4")
    lines = [line for line in capsys.readouterr().out.splitlines() if "predict" in line]
    assert lines[:3] == ["predict batch 1/3", "predict batch 2/3", "predict batch 3/3"] and len(lines) == 4
    assert lines[3].startswith("predictions  9 images, 3 of them unreadable")


CLASSES = ["a,\"b'\n c", "café", "raw\udcff"]
NAMES = ["\udcff\udcfe.png", "日本.png", "new\nline\r.png", 'q"uo,te.png', "-dash.png", "=1+1.png", " space .png"]


def odd_tree(root: Path) -> Path:
    generator = np.random.default_rng(0)
    for split in ("train", "val", "test"):
        for channel, folder in enumerate(CLASSES):
            (root / split / folder).mkdir(parents=True)
            for name in NAMES:
                with open(root / split / folder / name, "wb") as file:
                    noise_image(channel, generator).save(file, "PNG")
    return root


def check_odd_table(path: Path) -> None:
    """Check that every row is present, with its class."""
    with open(path, newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    shown = {name.encode(errors="surrogateescape").decode(errors="backslashreplace") for name in NAMES}
    assert len(table) == 21 and {os.path.basename(row["path"]) for row in table} == shown
    assert all(row["path"].split("/test/")[1].startswith(row["class"] + "/") for row in table)
    lines = path.with_suffix(".jsonl").read_bytes().decode().split("\n")
    assert [json.loads(line)["path"] for line in lines[:-1]] == [row["path"] for row in table]


def test_odd_names_survive_every_stage(tmp_path: Path) -> None:
    """Commas, quotes, line breaks, other scripts and bytes that are not text, in names of files and classes."""
    root = odd_tree(tmp_path / "trée")
    options = ["--data=ImageFolder", f"--data.root={root}", "--data.num_workers=2", "--data.cache_gb=0"]
    main(["fit", *TINY, *options, "--trainer.max_epochs=4", "--model.lr=0.01"])
    for command in ("validate", "test", "predict"):
        main([command, "--ckpt_path=best", *CPU])
    check_odd_table(only(tmp_path, "predictions.csv"))


@pytest.mark.slow
def test_odd_names_without_a_locale(tmp_path: Path, checkpoint: Path, fails: Callable[..., str]) -> None:
    """The same in a locale in which Python decodes ASCII only."""
    odd_tree(tmp_path / "tree")
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONPATH": str(REPOSITORY)}
    environment.pop("PL_GLOBAL_SEED", None)
    fit = ["fit", *TINY_MODEL, *CPU, "--data=ImageFolder", "--data.root=tree", "--data.batch_size=4"]
    for arguments in (
        [*fit, "--trainer.max_epochs=4", "--model.lr=0.01"],
        ["test", "--ckpt_path=best", *CPU],
        ["predict", "--ckpt_path=best", *CPU],
    ):
        command = [sys.executable, "-m", "vit_finetune", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, check=False, capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr
    check_odd_table(only(tmp_path, "predictions.csv"))


def test_option_that_is_not_text_is_refused(fails: Callable[..., str]) -> None:
    message = fails("fit", "--data=ImageFolder", "--data.root=\udcff")
    assert "--data.root=\\udcff' contains bytes that are not text" in message
