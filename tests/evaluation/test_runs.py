"""Trained models and data frames of runs, as a notebook uses them."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from tests.conftest import TINY, make_tree, only, scalars
from vit_finetune import ViTClassifier, main, runs


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tested run of two epochs and a run of one epoch with another learning rate."""
    folder = tmp_path_factory.mktemp("results")
    tree = make_tree(folder / "images", {"train": 6, "val": 3, "test": 3})
    options = [*TINY, "--data=ImageFolder", f"--data.root={tree}", f"--trainer.default_root_dir={folder / 'runs'}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["vit-finetune"])
        main(["fit", *options, "--experiment=tiny", "--trainer.max_epochs=2", "--model.lr=0.01"])
        main(["test", "--ckpt_path=best", f"--trainer.default_root_dir={folder / 'runs'}"])
        main(["fit", *options, "--experiment=tiny", "--model.lr=0"])
    return folder / "runs"


def test_load_takes_run_experiment_file_and_keyword(two_runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(two_runs.parent)
    first = two_runs / "tiny" / "version_0"
    best = only(first, "best-*.ckpt")
    model = ViTClassifier.load(first)
    assert (model.class_names, model.training, model.device.type) == (["a", "b", "c"], False, "cpu")
    images = torch.randint(0, 256, (2, 3, 50, 30), dtype=torch.uint8)
    with torch.no_grad():
        probabilities = model.probabilities(model(images))
    assert torch.allclose(probabilities.sum(1), torch.ones(2))
    for source in (str(best), best.parent):
        assert torch.equal(ViTClassifier.load(source)(images), model(images))
    stored = torch.load(best, weights_only=True)["vit_finetune"]
    assert model.temperature == stored["temperature"]
    newest = ViTClassifier.load(two_runs / "tiny" / "version_1")(images)
    assert not torch.equal(newest, model(images))
    for source in ("best", two_runs / "tiny", two_runs):  # of several runs, the newest
        assert torch.equal(ViTClassifier.load(source)(images), newest)
    last = ViTClassifier.load("last", runs=two_runs)
    assert torch.equal(last(images), newest)  # the only epoch is the best and the last


def test_load_without_validation_takes_the_last(two_runs: Path, tmp_path: Path) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "last.ckpt").write_bytes(only(two_runs / "tiny" / "version_0", "last.ckpt").read_bytes())
    assert ViTClassifier.load(tmp_path / "run").class_names == ["a", "b", "c"]


def test_load_errors_name_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "meta.pt").touch()
    (tmp_path / "broken.ckpt").write_text("no checkpoint")
    for source, message in (
        ("best", "no run in runs has best"),
        ("nowhere", "nowhere: no such file"),
        ("empty", "empty contains no checkpoint"),
        ("shards", "python -m vit_finetune.checkpoint shards"),
        ("broken.ckpt", "damaged or not a checkpoint"),
    ):
        with pytest.raises(MisconfigurationException, match=message):
            ViTClassifier.load(source)


def test_scalars_are_those_of_the_event_files(two_runs: Path) -> None:
    pytest.importorskip("pandas")
    frame = runs.scalars(two_runs)
    assert list(frame.columns) == ["run", "tag", "step", "value", "time"]
    assert list(frame["run"].unique()) == ["tiny/version_0", "tiny/version_1"]
    one = runs.scalars(two_runs / "tiny" / "version_1")
    for tag, points in scalars(two_runs / "tiny" / "version_1").items():
        rows = one[one["tag"] == tag]
        assert list(zip(rows["step"], rows["value"], strict=True)) == points, tag
    assert one["time"].between("2020-01-01", "2100-01-01").all()
    assert len(runs.scalars(two_runs / "tiny" / "version_1", two_runs)) == len(frame)  # each run once


def test_runs_are_compared_by_options_that_differ(two_runs: Path) -> None:
    pytest.importorskip("pandas")
    table = runs.runs(two_runs)
    assert set(table.index) == {"tiny/version_0", "tiny/version_1"}
    assert table["val/acc"].is_monotonic_decreasing  # the best first
    assert {"started", "minutes", "step", "model.lr", "trainer.max_epochs"} <= set(table.columns)
    assert "data.batch_size" not in table
    row = table.loc["tiny/version_0"]
    points = runs.scalars(two_runs / "tiny" / "version_0").set_index("tag")["value"]
    assert row["val/acc"] == points.loc["val/acc"].max() and row["model.lr"] == 0.01
    assert row["test/acc"] == points.loc["test/acc"] and table["test/acc"].isna().sum() == 1
    assert runs.runs(two_runs, options=["data.batch_size"])["data.batch_size"].tolist() == [4, 4]


def test_runs_of_a_suite_have_unique_names(two_runs: Path, tmp_path: Path) -> None:
    """Runs whose last two folders have equal names get longer names; other runs keep short ones."""
    pytest.importorskip("pandas")
    for variant in ("slow", "fast"):
        shutil.copytree(two_runs / "tiny" / "version_0", tmp_path / "suite" / variant / "seed0" / "version_0")
    shutil.copytree(two_runs / "tiny" / "version_1", tmp_path / "suite" / "tiny" / "version_1")
    names = ["fast/seed0/version_0", "slow/seed0/version_0", "tiny/version_1"]
    assert sorted(runs.runs(tmp_path / "suite").index) == names
    assert sorted(runs.scalars(tmp_path / "suite", str(tmp_path / "suite" / "slow"))["run"].unique()) == names


def test_errors_for_no_run_and_no_pandas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MisconfigurationException, match=r"pip install 'vit_finetune\[notebooks\]'"):
        runs.scalars(tmp_path)
    monkeypatch.undo()
    pytest.importorskip("pandas")
    with pytest.raises(MisconfigurationException, match="contains no run"):
        runs.runs(tmp_path)
