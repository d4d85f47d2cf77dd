"""Predictions for files of any kind, as tables."""

import csv
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from tests.conftest import CPU, REPOSITORY, TINY, TINY_KWARGS, TINY_MODEL, make_tree, noise_image, only, run_command
from vit_finetune import ViTClassifier, main
from vit_finetune.callbacks import PredictionWriter
from vit_finetune.callbacks.prediction_tables import PredictionTables, free_partial, merge_into
from vit_finetune.data.datasets import InMemoryDataset, collate_shared

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


# While a run is working, and after it was interrupted


class Watch(Callback):
    """Count the rows on disk each time a batch is finished, before the writer is told of it."""

    def __init__(self, stem: Path) -> None:
        self.stem, self.rows = stem, list[tuple[int, int]]()

    def on_predict_batch_end(self, *_: object) -> None:
        table, lines = (Path(f"{self.stem}.partial.{suffix}").read_text() for suffix in ("csv", "jsonl"))
        self.rows.append((table.count("\n") - 1, lines.count("\n")))


class Fail(Callback):
    """Stop the run with an exception in a batch, before the writer is told of it."""

    def __init__(self, batch: int, error: type[BaseException]) -> None:
        self.batch, self.error = batch, error

    def on_predict_batch_end(self, trainer: Trainer, module: object, out: object, batch: object, number: int) -> None:
        if number == self.batch:
            raise self.error


class Kill(Fail):
    """Kill the process in the 21st batch."""

    def __init__(self) -> None:
        super().__init__(20, KeyboardInterrupt)

    def on_predict_batch_end(self, *args: Any) -> None:
        try:
            super().on_predict_batch_end(*args)
        except KeyboardInterrupt:
            os.kill(os.getpid(), signal.SIGKILL)


def predict_from_python(*callbacks: Callback, images: int = 12, name: str = "image") -> None:
    """Predict with a plain Trainer, four images per batch."""
    model = ViTClassifier(
        "vit_tiny_patch16_224", img_size=32, pretrained=False, timm_kwargs=TINY_KWARGS, class_names=list("abc")
    )
    names = [f"{name}{position}" for position in range(images)]
    pixels = torch.zeros(images, 3, 32, 32, dtype=torch.uint8)
    dataset = InMemoryDataset(pixels, torch.zeros(images, dtype=torch.long), names)
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[*callbacks])
    trainer.predict(model, DataLoader(dataset, batch_size=4, collate_fn=collate_shared), return_predictions=False)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_rows_are_on_disk_when_their_batch_is_finished(tmp_path: Path) -> None:
    watch = Watch(tmp_path / "new" / "out")
    predict_from_python(watch, PredictionWriter(path=str(tmp_path / "new" / "out.csv")))
    assert watch.rows == [(0, 0), (4, 4), (8, 8)]
    assert files(tmp_path / "new") == ["out.csv", "out.jsonl"]
    with open(tmp_path / "new" / "out.csv", newline="") as file:
        assert [row["path"] for row in csv.DictReader(file)] == [f"image{position}" for position in range(12)]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_exception_leaves_the_finished_batches(error: type[BaseException], tmp_path: Path) -> None:
    for number in ("", "-1"):  # the second run does not touch the files of the first
        with pytest.raises((RuntimeError, SystemExit)):
            predict_from_python(Fail(2, error), PredictionWriter(path="out.csv"))
        assert len(Path(f"out{number}.partial.csv").read_text().splitlines()) == 9
        assert len(Path(f"out{number}.partial.jsonl").read_text().splitlines()) == 8
    with pytest.raises((RuntimeError, SystemExit)):  # there is nothing to keep
        predict_from_python(Fail(0, error), PredictionWriter(path="out.csv"))
    names = [f"out{number}.partial.{suffix}" for number in ("", "-1") for suffix in ("csv", "jsonl")]
    assert files(tmp_path) == sorted(names)


def test_full_disk_is_named(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: 'out\.partial\.csv'"):
            predict_from_python(PredictionWriter(path="out.csv"), name="long" * 500)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with open("out.partial.csv", newline="") as file:
        assert len(list(csv.reader(file))) >= 1 + 4


def test_killed_run_leaves_its_rows_and_the_next_run_says_so(
    predict: Callable[..., Any], checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = make_tree(tmp_path / "many", {"": 8})
    options = [f"--ckpt_path={checkpoint}", *CPU, f"--data.root={tree}", "--data.num_workers=0", "--data.batch_size=1"]
    command = [sys.executable, "-m", "vit_finetune", "predict", *options, "--predictions.path=predictions.csv"]
    command.append("--trainer.callbacks=tests.callbacks.test_prediction_writer.Kill")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, env=environment, check=False, capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = {name: Path(name).read_bytes() for name in ("predictions.partial.csv", "predictions.partial.jsonl")}
    capsys.readouterr()
    table, lines = predict(tree)
    said = [line for line in capsys.readouterr().out.splitlines() if "interrupted" in line]
    partial = tmp_path / "predictions.partial.csv"
    assert said == [f"{partial} with 20 rows of an interrupted run is there and stays as it is"]
    assert {name: Path(name).read_bytes() for name in left} == left
    assert len(list(tmp_path.glob("predictions*"))) == 4
    assert len(table) == len(lines) == 24
    assert list(csv.DictReader(left["predictions.partial.csv"].decode().splitlines())) == table[:20]


def test_path_that_cannot_be_written_stops_before_the_first_image(
    checkpoint: Path, mixed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vit_finetune.callbacks.progress.LINE_EVERY", 0.0)
    Path("file").touch()
    with pytest.raises(SystemExit) as stop:
        main(["predict", f"--ckpt_path={checkpoint}", *CPU, f"--data.root={mixed}", "--predictions.path=file/x.csv"])
    shown = capsys.readouterr()
    assert stop.value.code == 1 and "predict batch" not in shown.out
    assert re.search(r"^error: .*'file.*'$", shown.err, re.MULTILINE) and "Traceback" not in shown.err


def test_names_of_growing_files_stay_clear_of_earlier_ones(tmp_path: Path) -> None:
    stem = tmp_path / "a[1].b"
    assert free_partial(stem) == (tmp_path / "a[1].b.partial", [], 0)
    for name in ("a[1].b.partial.rank0", "a[1].b.partial.rank1", "a[1].b-1.partial", "a1.b-2.partial"):
        (tmp_path / f"{name}.csv").write_text("")
        (tmp_path / f"{name}.jsonl").write_text("{}\n{}\n{")  # the third row is cut off
    partial, interrupted, rows = free_partial(stem)
    assert partial == tmp_path / "a[1].b-2.partial" and rows == 6
    assert [path.name for path in interrupted] == [
        "a[1].b.partial.rank0.csv", "a[1].b.partial.rank1.csv", "a[1].b-1.partial.csv",
    ]  # fmt: skip


# Several processes


def test_parts_are_merged_in_order_and_each_image_once(tmp_path: Path) -> None:
    """Two pairs of processes that compute the same images; the last process has none but padding samples."""
    one = PredictionTables(tmp_path / "one", CLASSES[:2], 2)
    parts = [PredictionTables(tmp_path / f"part{rank}", CLASSES[:2], 2, with_position=True) for rank in range(5)]
    for position in range(7):
        path = f'{position}, "quoted"\r\nline\'s.png'
        row = (path, [1, 0], [0.75, 0.25], "cannot\nbe read" if position == 3 else None)
        one.add(position, *row)
        for part in parts[:2] if position % 2 else parts[2:4]:
            part.add(position, *row)
    for tables in [one, *parts]:
        tables.flush()
        tables.close()
    merged = PredictionTables(tmp_path / "merged", CLASSES[:2], 2)
    merge_into(merged, [tmp_path / f"part{rank}" for rank in range(5)])
    merged.close()
    assert (merged.rows, merged.unreadable) == (7, 1)
    for expected, file in zip(one.files, merged.files, strict=True):
        assert file.read_bytes() == expected.read_bytes()


@pytest.mark.slow
def test_tensor_parallel_processes_write_each_image_once(
    checkpoint: Path, mixed: Path, predict: Callable[..., Any], tmp_path: Path
) -> None:
    table, _ = predict(mixed)
    strategy = f"--config={REPOSITORY / 'configs' / 'strategy' / 'tensor_parallel.yaml'}"
    options = [f"--ckpt_path={checkpoint}", f"--data.root={mixed}", "--trainer.accelerator=cpu"]
    run_command("predict", strategy, *options, "--predictions.path=two.csv", folder=tmp_path)
    with open("two.csv", newline="", encoding="utf-8") as file:
        two = list(csv.DictReader(file))
    assert [(row["path"], row["class"]) for row in two] == [(row["path"], row["class"]) for row in table]
    assert not list(tmp_path.glob("*partial*"))


# Memory


class Memory(Callback):
    """What the writer, the sampler and Lightning's wrapper of it hold after some batches, in bytes."""

    def __init__(self, *batches: int) -> None:
        self.batches, self.bytes = batches, list[int]()

    def on_predict_batch_start(self, trainer: Trainer, module: object, batch: object, number: int) -> None:
        if number in self.batches:
            places = ["*/prediction_*.py", "*/utils/data/sampler.py", "*/overrides/distributed.py", "*/csv.py"]
            snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, place) for place in places])
            self.bytes.append(sum(trace.size for trace in snapshot.traces))


def test_nothing_is_kept_per_image(tmp_path: Path) -> None:
    memory, writer = Memory(10, 99), PredictionWriter(path="out.csv")
    tracemalloc.start()
    try:
        predict_from_python(writer, memory, images=400)
    finally:
        tracemalloc.stop()
    early, late = memory.bytes
    assert late - early < 1000  # for 356 images
    assert not [name for name, value in vars(writer).items() if isinstance(value, (list, dict)) and len(value) > 3]


@pytest.mark.slow
def test_ten_times_the_images_need_no_more_memory(checkpoint: Path, tmp_path: Path) -> None:
    """Peak memory of two processes, with 200 and with 2,000 JPEG files."""
    noise_image(0, np.random.default_rng(0), side=64).save(tmp_path / "one.jpg")
    peaks = []
    for count in (200, 2000):
        root = tmp_path / str(count)
        root.mkdir()
        for number in range(count):
            shutil.copy(tmp_path / "one.jpg", root / f"{number}.jpg")
        command = [sys.executable, "-m", "vit_finetune", "predict", f"--ckpt_path={checkpoint}", *CPU]
        command += [f"--data.root={root}", "--data.num_workers=0", f"--predictions.path={count}.csv"]
        process = subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, stdout=subprocess.DEVNULL
        )
        _, status, usage = os.wait4(process.pid, 0)
        assert status == 0 and len(Path(f"{count}.csv").read_text().splitlines()) == count + 1
        peaks.append(usage.ru_maxrss / 1024)
    assert peaks[1] - peaks[0] < 50, peaks  # MB
