"""Two real processes over gloo, started as a user starts them."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import REPOSITORY, TINY_MODEL, make_tree, noise_image, only, run_command, scalars, weights
from vit_finetune import main

DDP = ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.strategy=ddp"]


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A checkpoint that tells red from green from blue; of five test images one lies in the wrong folder."""
    tree = make_tree(tmp_path / "images", {"train": 6, "val": 3})
    options = [*TINY_MODEL, "--trainer.accelerator=cpu", "--data=ImageFolder", f"--data.root={tree}"]
    main(["fit", *options, "--data.batch_size=4", "--trainer.max_epochs=8", "--model.lr=0.01"])
    generator = np.random.default_rng(5)
    (tmp_path / "five" / "test").mkdir(parents=True)
    (tmp_path / "five" / "test" / "broken.png").write_bytes(b"")  # lies in no class folder, so only predict meets it
    for name, channel in (("a/0", 0), ("a/1", 0), ("b/2", 0), ("c/3", 2), ("c/4", 2)):
        path = tmp_path / "five" / "test" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        noise_image(channel, generator).save(path)
    return only(tmp_path / "runs", "best-*.ckpt")


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_each_image_is_scored_and_predicted_once(
    processes: int, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Five images, one wrong: 0.8 on one and on several processes, and the same tables of predictions."""
    options = [f"--ckpt_path={trained}", f"--data.root={tmp_path / 'five'}", "--data.batch_size=1"]
    tables, reports = [], []

    def run(*args: str) -> str:
        if "--trainer.devices=1" not in args:
            return run_command(*args, folder=tmp_path)
        main(list(args))
        return capsys.readouterr().out

    cpu = "--trainer.accelerator=cpu"
    several = [cpu, f"--trainer.devices={processes}", "--trainer.strategy=ddp"]
    for number, devices in (("", [cpu, "--trainer.devices=1"]), ("-1", several)):
        out = run("test", *options, *devices)
        row = next(line for line in out.splitlines() if "test/acc" in line)
        assert "0.8" in row and "0.83" not in row, row
        reports.append(max(tmp_path.rglob("report.json"), key=lambda path: path.stat().st_mtime_ns))
        run("predict", *options, *devices)
        tables.append({path.suffix: path.read_bytes() for path in tmp_path.rglob(f"predictions{number}.*")})
    rows = csv.DictReader(tables[0][".csv"].decode().splitlines())
    assert [row["error"] for row in rows] == ["the file is empty", *[""] * 5]
    assert tables[0].keys() == {".csv", ".jsonl"} and tables[0] == tables[1]
    assert not list(tmp_path.rglob("*.partial*"))
    assert [path.parent.name for path in reports] == ["test-report", "test-report-1"]
    one, both = (json.loads(path.read_text()) for path in reports)
    assert one["about"].pop("command") != both["about"].pop("command") and one == both


WEIGHTED = ["--model.class_weights=balanced", "--model.tta=flip", "--best_checkpoint.monitor=val/acc_macro"]


@pytest.mark.parametrize("more", [[], pytest.param(WEIGHTED, marks=pytest.mark.slow)], ids=["plain", "weighted"])
def test_two_processes_equal_one_on_the_same_global_batch(more: list[str], tmp_path: Path) -> None:
    """DDP on two processes of batch 3 against one process of batch 6: equal weights but for the order of sums."""
    tree = make_tree(tmp_path / "images", {"train": 6, "val": 3})
    for number in range(2):  # eight, six and four training images; three, three and two for validation
        (tree / "train" / "c" / f"0{number}.png").rename(tree / "train" / "a" / f"1{number}.png")
    (tree / "val" / "c" / "00.png").unlink()
    options = [
        *more,
        *TINY_MODEL,
        "--data=ImageFolder",
        f"--data.root={tree}",
        "--trainer.max_epochs=2",
        "--data.shift=0",
        "--data.crop_scale=0",
    ]
    options += ["--data.flip=false", "--model.optimizer=sgd", "--model.lr=0.05"]
    one = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--data.batch_size=6", "--experiment=one"]
    run_command("fit", *options, *one, folder=tmp_path)
    run_command("fit", *options, *DDP, "--data.batch_size=3", "--experiment=two", folder=tmp_path)
    left, right = (weights(only(tmp_path / "runs" / name, "last.ckpt")) for name in ("one", "two"))
    for key, value in left.items():
        torch.testing.assert_close(value, right[key], atol=1e-5, rtol=1e-4, msg=key)
    tags = [scalars(tmp_path / "runs" / name) for name in ("one", "two")]  # and one event file each
    for name in ("train/loss", "val/loss", "val/acc", "val/acc_macro", "train/acc", "train/grad_norm"):
        assert [v for _, v in tags[0][name]] == pytest.approx([v for _, v in tags[1][name]], abs=1e-4), name
    assert sorted(path.name for path in (tmp_path / "runs" / "two").iterdir()) == ["version_0"]


@pytest.mark.slow
def test_frozen_backbone_needs_no_special_strategy(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "images", {"train": 6, "val": 3})
    options = [*TINY_MODEL, "--data=ImageFolder", f"--data.root={tree}", "--trainer.max_epochs=1"]
    run_command("fit", *options, *DDP, "--model.freeze_backbone=true", "--data.batch_size=3", folder=tmp_path)


def test_interrupt_ends_with_a_code(tmp_path: Path) -> None:
    """Ctrl+C: the code is not 0 and the last finished epoch can be loaded."""
    tree = make_tree(tmp_path / "images", {"train": 6, "val": 3})
    command = [sys.executable, "-m", "vit_finetune", "fit", *TINY_MODEL, "--trainer.accelerator=cpu"]
    command += ["--data=ImageFolder", f"--data.root={tree}", "--trainer.max_epochs=100000", "--data.batch_size=4"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.rglob("last.ckpt")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) != 0
    torch.load(only(tmp_path, "last.ckpt"), weights_only=True)
