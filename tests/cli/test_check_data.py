"""check-data: every kind of problem in one tree, exact lists, exit codes, files that are written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import TINY_MODEL, make_tree, noise_image
from vit_finetune import ImageFolder, main
from vit_finetune.cli.check_data import check
from vit_finetune.cli.check_data_report import SHEET, choose, terminal

Run = Callable[..., tuple[int, str, dict[str, Any]]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command; returns exit code, what it printed, and the newest report."""

    def command(*args: str) -> tuple[int, str, dict[str, Any]]:
        capsys.readouterr()
        code: Any = 0
        try:
            main(["check-data", *args])
        except SystemExit as stop:
            code = stop.code
        reports = sorted(tmp_path.rglob("report.json"), key=lambda path: path.stat().st_mtime_ns)
        return code, capsys.readouterr().out, json.loads(reports[-1].read_text())

    return command


def found(report: dict[str, Any]) -> dict[str, tuple[bool, list[str]]]:
    return {finding["text"]: (finding["problem"], finding["details"]) for finding in report["findings"]}


def test_clean_tree(tree: Path, run: Run, tmp_path: Path) -> None:
    code, out, report = run("--data=ImageFolder", f"--data.root={tree}")
    assert code == 0 and report["findings"] == [] and "problems 0, notes 0; see runs/check-data" in out
    assert report["counts"] == {split: dict.fromkeys("abc", n) for split, n in (("train", 6), ("val", 3), ("test", 3))}
    assert "all images have 40 x 40 pixels" in out
    with Image.open(tmp_path / "runs" / "check-data" / "contact-sheet.png") as sheet:
        assert sheet.width == 900  # six columns
    before = (tmp_path / "runs" / "check-data" / "report.json").stat().st_mtime_ns
    run("--data=ImageFolder", f"--data.root={tree}")
    assert (tmp_path / "runs" / "check-data" / "report.json").stat().st_mtime_ns == before
    assert sorted(p.name for p in (tmp_path / "runs" / "check-data-1").iterdir()) == [
        "contact-sheet.png",
        "report.json",
    ]


def test_every_problem_is_listed_once(tree: Path, run: Run) -> None:
    train, val, test = (tree / split for split in ("train", "val", "test"))
    (train / "a" / "empty.png").write_bytes(b"")
    (train / "b" / "page.jpg").write_text("<html>")
    noise_image(0, np.random.default_rng(1), side=200).save(train / "b" / "cut.jpg")
    (train / "b" / "cut.jpg").write_bytes((train / "b" / "cut.jpg").read_bytes()[:2000])
    shutil.rmtree(val / "b")
    (val / "zebra").mkdir()
    Image.new("RGB", (40, 40), "blue").save(val / "zebra" / "z.png")
    Image.open(train / "a" / "00.png").save(test / "a" / "leak \udcff.bmp")  # another name and file type
    shutil.copy(train / "a" / "01.png", train / "c" / "as c.png")
    shutil.copy(train / "b" / "02.png", train / "b" / "02 again.png")
    Image.new("RGB", (8, 9), "red").save(test / "b" / "tiny.png")
    Image.new("RGB", (400, 100), "red").save(test / "b" / "long.png")
    (train / "a" / "notes.txt").write_text("x")
    (train / "a" / "phone.HEIC").write_bytes(b"x")
    (tree / "README").write_text("x")
    (train / "loose.png").write_bytes(b"x")
    (train / "a" / ".hidden.png").write_bytes(b"")
    code, out, report = run("--data=ImageFolder", f"--data.root={tree}", "--output=looked/at")
    assert code == 1 and "problems 5, notes 5; see looked/at" in out
    listed = found(report)
    problems = {text: details for text, (problem, details) in listed.items() if problem}
    notes = {text: details for text, (problem, details) in listed.items() if not problem}
    broken = problems.pop("unreadable files")
    assert [line.split("'")[1] for line in broken] == [
        str(train / "a" / "empty.png"),
        str(train / "b" / "cut.jpg"),
        str(train / "b" / "page.jpg"),
    ]
    assert broken[0].endswith("the file is empty") and "truncated" in broken[1]
    assert problems == {
        "val: unknown classes": ["zebra (1 images)"],
        "val: classes without images": ["b"],
        "duplicates in several splits": [f"{train}/a/00.png = {test}/a/leak \udcff.bmp"],
        "duplicates in several classes": [f"{train}/a/01.png = {train}/c/as c.png"],
    }
    assert notes == {
        "files of other types, skipped: 1 .heic, 1 .txt, 1 no extension": [],
        "images outside the class folders, skipped": [str(train / "loose.png")],
        "duplicates in the same split and class": [f"{train}/b/02 again.png = {train}/b/02.png"],
        "images with a side of less than 32 pixels": [f"{test}/b/tiny.png (8 x 9)"],
        "images with an aspect ratio over 3, mostly removed by the center crop": [f"{test}/b/long.png (400 x 100)"],
    }
    assert report["counts"] == {
        "train": {"a": 6, "b": 7, "c": 7, "zebra": 0},
        "val": {"a": 3, "b": 0, "c": 3, "zebra": 1},
        "test": {"a": 4, "b": 5, "c": 3, "zebra": 0},
    }
    assert report["sizes"]["width"] == {"least": 8, "median": 40, "most": 400}
    assert r"leak \xff.bmp" in out


def test_the_folder_one_is_in(tree: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree / "train")
    assert run("--data=ImageFolder", "--data.root=.")[2]["findings"] == []


def test_one_tree_is_split_at_random_so_copies_are_a_problem(tmp_path: Path, run: Run) -> None:
    tree = make_tree(tmp_path / "one", {"": 12})
    for number in range(11):
        (tree / "c" / f"{number:02d}.png").unlink()
    shutil.copy(tree / "a" / "00.png", tree / "a" / "copy.png")
    (tree / "empty").mkdir()
    code, _, report = run("--data=ImageFolder", f"--data.root={tree}")
    assert code == 1 and report["counts"] == {"all": {"a": 13, "b": 12, "c": 1, "empty": 0}}
    assert found(report) == {
        "all: classes without images": (True, ["empty"]),
        "duplicates that a random split can separate": (True, [f"{tree}/a/00.png = {tree}/a/copy.png"]),
        "all: imbalanced classes, from 1 of c to 13 of a; fit --model.class_weights balanced weights the loss": (
            False,
            [],
        ),
    }


def test_copies_in_train_are_harmless_only_if_val_is_not_cut_out_of_it(tree: Path) -> None:
    shutil.copy(tree / "train" / "a" / "00.png", tree / "train" / "a" / "copy.png")
    assert check(ImageFolder(str(tree))).problems == 0
    shutil.rmtree(tree / "val")
    assert check(ImageFolder(str(tree))).problems == 1


def test_a_checkpoint_tells_the_classes(folder_args: list[str], tree: Path, tmp_path: Path, run: Run) -> None:
    main(["fit", *folder_args, "--trainer.limit_train_batches=1"])
    later = make_tree(tmp_path / "later", {"test": 2}, seed=5)
    (later / "test" / "a").rename(later / "test" / "zebra")
    code, out, report = run("--ckpt_path=last", f"--data.root={later}")
    assert code == 1 and list(found(report)) == ["test: unknown classes", "test: classes without images"]
    assert "zebra" in out


def test_sets_that_are_no_folders(cifar: Path, run: Run) -> None:
    """The fixture's CIFAR-10 is noise without copies; drawn shapes neither, unless the seeds coincide."""
    code, out, report = run("--data=CIFAR10", f"--data.root={cifar}")
    assert code == 0 and sum(report["counts"]["train"].values()) == 90 and sum(report["counts"]["test"].values()) == 20
    assert "all images have 32 x 32 pixels" in out
    code, _, report = run("--data=Shapes", "--data.train_size=100", "--data.test_size=20", *TINY_MODEL)
    assert code == 0 and set(report["counts"]["test"].values()) == {2}


def test_copies_across_sets_in_memory_are_found(cifar: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from vit_finetune import CIFAR10

    read = CIFAR10._read

    def leaky(self: CIFAR10, train: bool) -> Any:
        images: Any = read(self, train)
        images.images[3] = torch.full((3, 32, 32), 7, dtype=torch.uint8)
        return images

    monkeypatch.setattr(CIFAR10, "_read", leaky)
    code, _, report = run("--data=CIFAR10", f"--data.root={cifar}")
    assert code == 1
    assert found(report) == {"duplicates in several splits": (True, ["train/00003 = test/00003"])}


def test_refusals(tree: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    options = ["check-data", "--data=ImageFolder"]
    assert "--data.root nowhere" in fails(*options, "--data.root=nowhere")
    (tmp_path / "bare").mkdir()
    assert "has no class folders" in fails(*options, "--data.root=bare")
    assert f"--output {tree} already exists" in fails(*options, f"--data.root={tree}", f"--output={tree}")


def test_many_classes_are_shown_in_part(tmp_path: Path) -> None:
    image = Image.new("RGB", (40, 40))
    for number in range(320):
        folder = tmp_path / "many" / f"{number:03d}"
        folder.mkdir(parents=True)
        image.putpixel((number % 40, number // 40), (255, 255, 255))
        image.save(folder / "one.png")
    looked = check(ImageFolder(str(tmp_path / "many")))
    assert looked.problems == 0 and len(choose(looked)) == SHEET
    lines = terminal(looked).splitlines()
    assert lines[21] == "all classes       320" and lines[22] == "the 20 smallest of 320 classes" and len(lines) == 25
