"""The folder of a run, whatever its loggers, and the options that select a checkpoint."""

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import ClassVar

import pytest
from lightning.pytorch.loggers.logger import DummyExperiment, Logger

from tests.conftest import CPU, only, scalars
from vit_finetune import main
from vit_finetune.cli.ckpt_path import experiment_name, peek
from vit_finetune.cli.main import parse
from vit_finetune.cli.run_dir import claim
from vit_finetune.evaluation.find_checkpoint import RUNS

FILES = {
    "one.yaml": "experiment: first\ntrainer: {default_root_dir: elsewhere}\n",
    "two.yaml": "model: {lr: 0.1}\nexperiment: second\n",
    "three.yaml": "trainer: {default_root_dir: third, max_epochs: 2}\n",
    "null.yaml": "experiment: null\n",
    "list.yaml": "trainer: {callbacks: []}\n",
}


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["--config=one.yaml"],
        ["-c", "two.yaml", "--config", "one.yaml"],
        ["--config=one.yaml", "--config=two.yaml", "--config=three.yaml"],
        ["--config=three.yaml", "--config=one.yaml", "--experiment=typed"],
        ["--config=one.yaml", "--trainer.default_root_dir=typed", "--config=three.yaml"],
        ["--config=one.yaml", "--config=null.yaml"],
        ["--experiment=typed", "--config=two.yaml"],
        ["--config=list.yaml", "--experiment", "typed", "--trainer.default_root_dir", "typed"],
        ["--experiment=a", "--experiment=b", "--model.lr", "0.2"],
    ],
)
def test_peek_agrees_with_the_parser(args: list[str], tmp_path: Path) -> None:
    """Options that select a checkpoint are read before the parser runs."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    args = [*args, "--ckpt_path=restart"] if "--experiment=a" not in args else args  # restart: of nothing, here
    found, parsed = peek(["fit", *args]), parse(["fit", *args])
    assert found.ckpt_path == ("restart" if "--ckpt_path=restart" in args else parsed["ckpt_path"])
    assert found.experiment == parsed["experiment"]
    typed_roots = any("default_root_dir" in arg or arg.endswith(("one.yaml", "three.yaml")) for arg in args)
    assert found.default_root_dir == parsed["trainer"]["default_root_dir"]
    assert typed_roots or found.default_root_dir == RUNS
    files = [value for value in " ".join(args).replace("=", " ").split() if value.endswith(".yaml")]
    assert experiment_name(found) == (parsed["experiment"] or (Path(files[0]).stem if files else None))


class SharedFolder(Logger):
    """Like the loggers of MLflow and Weights & Biases: one folder for all runs, and none of its own."""

    logged: ClassVar[list[str]] = []

    def __init__(self, save_dir: str | None = None) -> None:
        super().__init__()
        self.folder = save_dir

    @property
    def save_dir(self) -> str | None:
        return self.folder

    @property
    def name(self) -> str:
        return "project"

    @property
    def version(self) -> str:
        return "id"

    @property
    def experiment(self) -> DummyExperiment:
        return DummyExperiment()

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logged += metrics

    def log_hyperparams(self, params: object) -> None:
        pass


CSV = ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=csv"]
SHARED = [f"--trainer.logger={__name__}.SharedFolder"]
BOTH = ["--trainer.logger+=CSVLogger", "--trainer.logger.save_dir=csv"]
BOTH += ["--trainer.logger+=TensorBoardLogger", "--trainer.logger.save_dir=tb"]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(CSV, id="csv", marks=pytest.mark.slow),
        pytest.param(SHARED, id="no-folder", marks=pytest.mark.slow),
        pytest.param([*SHARED, "--trainer.logger.save_dir=runs"], id="shared-folder"),
        pytest.param(["--trainer.logger=false"], id="none"),
        pytest.param(BOTH, id="two", marks=pytest.mark.slow),
    ],
)
def test_each_run_has_its_folder_whatever_the_logger(options: list[str], folder_args: list[str]) -> None:
    for _ in range(2):
        main(["fit", *folder_args, *options])
    assert sorted(path.name for path in Path("runs").iterdir()) == ["imagefolder"]
    runs = [Path("runs/imagefolder/version_0"), Path("runs/imagefolder/version_1")]
    assert sorted(Path("runs/imagefolder").iterdir()) == runs
    for run in runs:
        assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "config.yaml"]
        assert len(list((run / "checkpoints").iterdir())) == 2
    before = {path: path.stat().st_mtime_ns for path in runs[0].rglob("*")}
    main(["test", "--ckpt_path=best", "--trainer.accelerator=cpu", *options])
    main(["predict", "--ckpt_path=last", "--trainer.accelerator=cpu", *options])
    main(["fit", "--ckpt_path=last", *CPU, "--trainer.max_epochs=2", *options])
    assert {path.name for path in runs[1].iterdir()} >= {"test-report", "test.yaml", "predictions.csv", "config-1.yaml"}
    assert before == {path: path.stat().st_mtime_ns for path in runs[0].rglob("*")}


def test_loggers_get_the_same_metrics(folder_args: list[str]) -> None:
    SharedFolder.logged.clear()
    main(["fit", *folder_args])
    main(["test", "--ckpt_path=best", "--trainer.accelerator=cpu"])
    main(["fit", *folder_args, *SHARED])
    main(["test", "--ckpt_path=best", "--trainer.accelerator=cpu", *SHARED])
    assert {*scalars(Path("runs"))} == {*SharedFolder.logged}


def test_folder_of_the_users_tensorboard_logger(folder_args: list[str]) -> None:
    """Its folder is that of the run, as it is for the default logger."""
    options = ["--trainer.logger=TensorBoardLogger", "--trainer.logger.save_dir=logs", "--trainer.logger.name=mine"]
    for _ in range(2):
        main(["fit", *folder_args, *options])
    assert sorted(path.name for path in Path("logs/mine").iterdir()) == ["version_0", "version_1"]
    assert only(Path("logs/mine/version_1"), "last.ckpt") and not Path("runs").exists()


def test_runs_started_at_once_get_folders_of_their_own() -> None:
    barrier = Barrier(8)

    def start(_: int) -> Path:
        barrier.wait()
        return claim(Path("runs/x"))

    (Path("runs/x") / "version_3").mkdir(parents=True)
    (Path("runs/x") / "version_notes").mkdir()
    with ThreadPoolExecutor(8) as pool:
        claimed = list(pool.map(start, range(8)))
    assert sorted(path.name for path in claimed) == sorted(f"version_{number}" for number in range(4, 12))


def test_folder_taken_between_looking_and_creating(folder_args: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    create, competitors = os.mkdir, [Path("runs/imagefolder/version_0")]

    def late(path: Path, mode: int = 0o777) -> None:
        if path in competitors:  # of another process
            create(competitors.pop())
        create(path, mode)

    Path("runs/imagefolder").mkdir(parents=True)
    monkeypatch.setattr(os, "mkdir", late)
    main(["fit", *folder_args])
    assert not [*Path("runs/imagefolder/version_0").iterdir()]
    assert (
        only(Path("runs"), "last.ckpt").parent.parent.name == only(Path("runs"), "events*").parent.name == "version_1"
    )


@pytest.mark.parametrize("logger", [[], ["--trainer.logger=false"]])
def test_refused_when_the_data_is_read_leaves_nothing(
    logger: list[str], folder_args: list[str], fails: Callable[..., str], tmp_path: Path
) -> None:
    """Known only after the preflight checks; a resumed run keeps its options."""
    message = fails("fit", *folder_args, *logger, "--model.class_names=[x, y]")
    assert "unknown class: a, b, c. The classes are x, y." in message
    assert not Path("runs").exists()
    main(["fit", *folder_args, *logger])
    config = only(Path("runs"), "config.yaml")
    before = config.read_text()
    shutil.copytree(tmp_path / "images", tmp_path / "other")
    for split in ("train", "val", "test"):
        (tmp_path / "other" / split / "c").rename(tmp_path / "other" / split / "d")
    options = ["--ckpt_path=last", "--trainer.max_epochs=2", f"--data.root={tmp_path / 'other'}", *CPU, *logger]
    assert "unknown class: d" in fails("fit", *options)
    assert config.read_text() == before and not list(Path("runs").rglob("config-1.yaml"))


def test_evaluation_of_a_lone_checkpoint_has_a_folder_too(folder_args: list[str], fails: Callable[..., str]) -> None:
    main(["fit", *folder_args])
    lone = shutil.move(only(Path("runs"), "last.ckpt"), "lone.ckpt")
    Path("config.yaml").touch()  # of something else: the folder above a checkpoint need not be a run
    main(["test", f"--ckpt_path={lone}", *CPU])
    assert only(Path("runs/imagefolder/version_1"), "report.json")
    fails("test", f"--ckpt_path={lone}", *CPU, "--data=Shapes", "--data.test_size=20")
    assert not Path("runs/shapes").exists()


def test_fast_dev_run_writes_nothing(folder_args: list[str]) -> None:
    main(["fit", *folder_args, "--trainer.fast_dev_run=true"])
    assert not Path("runs").exists()


def test_job_that_ended_before_it_saved_its_options_does_not_resume_another_run(
    folder_args: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["fit", *folder_args])
    claim(Path("runs/imagefolder"))  # the first attempt of this job
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    main(["fit", *folder_args, "--ckpt_path=restart", "--experiment=imagefolder"])
    assert only(Path("runs/imagefolder/version_2"), "last.ckpt")
