"""Issues that users of similar tools report, if no other file tests them; KNOWN_ISSUES.md lists all of them."""

import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from torch.utils.tensorboard import SummaryWriter

from tests.conftest import CPU, TINY, equal, make_tree, only, scalars, weights
from vit_finetune import CIFAR10, ImageFolder, Shapes, ViTClassifier, main


def test_every_case_has_a_test() -> None:
    """The table names files and functions that exist."""
    rows = [
        line
        for line in (Path(__file__).parent / "KNOWN_ISSUES.md").read_text().splitlines()
        if re.match(r"\| \d+\. ", line)
    ]
    assert len(rows) == 87
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row)
        assert named, row
        for file, function in named:
            assert f"def {function}(" in (Path(__file__).parent / file).read_text(), (file, function)


def options_of(cls: type) -> set[str]:
    """Options of the constructor, including those of the base classes."""
    return {
        name
        for base in cls.__mro__
        if "__init__" in vars(base)
        for name, parameter in inspect.signature(base.__init__).parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and name != "self"
    }


@pytest.mark.parametrize("data", [CIFAR10, ImageFolder, Shapes])
def test_no_option_exists_in_model_and_data_at_once(data: type) -> None:
    """Two options of one name could disagree, and Lightning would refuse to log them."""
    assert options_of(ViTClassifier) & options_of(data) == set()


def test_other_classes_than_the_checkpoints_are_refused(
    folder_args: list[str], tmp_path: Path, fails: Callable[..., str]
) -> None:
    main(["fit", *folder_args])
    last = only(tmp_path, "last.ckpt")
    message = fails("test", f"--ckpt_path={last}", *CPU, "--model.class_names=[a,b,c,d]")
    assert "The checkpoint's classes are a, b, c; --model.class_names or the data has a, b, c, d." in message
    message = fails("test", f"--ckpt_path={last}", *CPU, "--model.img_size=64")
    assert "does not match the network" in message and "img_size" in message


@pytest.mark.parametrize(("batch", "workers"), [(1, 0), (64, 2), pytest.param(4, 8, marks=pytest.mark.slow)])
def test_all_commands_with_all_kinds_of_loader(
    folder_args: list[str], tmp_path: Path, batch: int, workers: int
) -> None:
    loader = [f"--data.batch_size={batch}", f"--data.num_workers={workers}", "--data.cache_gb=0"]
    main(["fit", *folder_args, *loader])
    steps = torch.load(only(tmp_path, "last.ckpt"), weights_only=True)["global_step"]
    assert steps == -(-18 // batch)  # fewer images than a batch are a batch
    for command in ("validate", "test", "predict"):
        main([command, "--ckpt_path=last", *CPU, *loader])
    assert len(only(tmp_path, "predictions.csv").read_text().splitlines()) == 10


def test_a_remainder_of_one_image_is_trained_on(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "images", {"train": 6, "val": 1})
    Image.new("RGB", (40, 40)).save(tree / "train" / "a" / "extra.png")
    main(["fit", *TINY, "--data=ImageFolder", f"--data.root={tree}", "--data.batch_size=18"])
    assert torch.load(only(tmp_path, "last.ckpt"), weights_only=True)["global_step"] == 2


def test_short_epochs_have_curves(folder_args: list[str], tmp_path: Path) -> None:
    """With five batches per epoch and a logging interval of fifty, each epoch still ends with a point."""
    main(["fit", *folder_args, "--trainer.max_epochs=3"])
    tags = scalars(tmp_path / "runs")
    for name in ("train/loss_step", "train/loss", "val/loss", "train/lr"):
        assert [step for step, _ in tags[name]] == [4, 9, 14], name


@pytest.mark.parametrize(
    ("options", "least"),
    [(["--trainer.check_val_every_n_epoch=2"], 4), (["--trainer.val_check_interval=2"], 1)],
)
def test_early_stopping_counts_validations(
    folder_args: list[str], tmp_path: Path, options: list[str], least: int
) -> None:
    """No validation can be better than the first by min_delta, so the second one ends the run."""
    stopping = ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val/loss"]
    stopping += ["--trainer.callbacks.patience=1", "--trainer.callbacks.min_delta=10"]
    main(["fit", *folder_args, "--trainer.max_epochs=6", *stopping, *options])
    tags = scalars(tmp_path / "runs")
    assert len(tags["val/loss"]) == 2 and len(tags["train/loss"]) == least
    assert only(tmp_path, "best-*.ckpt") and only(tmp_path, "last.ckpt")


def test_profiler_and_metric_names_make_flat_folders(folder_args: list[str], tmp_path: Path) -> None:
    profiler = ["--trainer.profiler=AdvancedProfiler", "--trainer.profiler.dirpath=profile"]
    main(["fit", *folder_args, *profiler, "--trainer.profiler.filename=fit", "--trainer.max_epochs=3"])
    assert list(Path("profile").iterdir())
    folder = only(tmp_path, "last.ckpt").parent
    assert len(list(folder.iterdir())) == 2 and all(re.fullmatch(r"[\w.-]+", p.name) for p in folder.iterdir())


@pytest.mark.parametrize("name", ["resnet18", ""])
def test_other_networks_are_refused(name: str, fails: Callable[..., str]) -> None:
    message = fails("fit", *TINY, f"--model.name={name}", "--model.timm_kwargs=null", "--data=Shapes")
    assert "--model.name" in message and "vit_" in message


def test_older_name_of_a_model_works_and_is_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = ["--model.name=vit_base_patch16_224_in21k", "--data=Shapes", "--data.train_size=200"]
    main(["fit", *TINY, *options, "--trainer.limit_train_batches=1", "--trainer.limit_val_batches=1"])
    now = "vit_base_patch16_224.augreg_in21k"
    assert f"vit_base_patch16_224_in21k is now called {now}" in caplog.text
    assert torch.load(only(tmp_path, "last.ckpt"), weights_only=True)["hyper_parameters"]["name"] == now


@pytest.mark.parametrize(
    "network", ["--model.name=deit_tiny_distilled_patch16_224", "--model.timm_kwargs.global_pool=avg"]
)
def test_distilled_and_averaging_networks_train(network: str, folder_args: list[str], tmp_path: Path) -> None:
    main(["fit", *folder_args, network, "--model.drop_path=0.5"])
    saved = torch.load(only(tmp_path, "last.ckpt"), weights_only=True)
    assert saved["global_step"] == 5 and all(value.isfinite().all() for value in saved["state_dict"].values())


@pytest.mark.parametrize(
    ("variables", "devices", "refused"),
    [
        ({}, 1, True),  # Lightning expects the number of tasks per node
        ({"SLURM_NTASKS_PER_NODE": "2"}, 1, False),  # a single process within the allocation
        ({"SLURM_NTASKS_PER_NODE": "2"}, 2, True),
        ({"SLURM_NTASKS_PER_NODE": "2", "SLURM_PROCID": "0"}, 2, True),  # a batch script without srun
        ({"SLURM_JOB_NAME": "bash"}, 1, False),
        ({"SLURM_JOB_NAME": "interactive"}, 1, False),
    ],
)
def test_slurm_variables_without_srun(
    variables: dict[str, str],
    devices: int,
    refused: bool,
    folder_args: list[str],
    monkeypatch: pytest.MonkeyPatch,
    fails: Callable[..., str],
) -> None:
    for key, value in {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_NAME": "train", **variables}.items():
        monkeypatch.setenv(key, value)
    args = ["fit", *folder_args, "--trainer.fast_dev_run=true", f"--trainer.devices={devices}"]
    if refused:
        message = fails(*args)
        assert "SLURM_NTASKS is 2" in message and "srun" in message and "SLURM_JOB_NAME=bash" in message
    else:
        main(args)


def test_shared_checkpoint_folder_says_what_it_wrote(
    folder_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (0, 1):
        main(["fit", *folder_args, "--best_checkpoint.dirpath=kept", f"--seed_everything={seed}"])
    names = [path.name for path in Path("kept").iterdir()]
    assert not [name for name in names if re.search(r"-v\d", name)]
    assert capsys.readouterr().out.count("  kept/best-") == 2


def test_a_short_last_window_is_an_average_too(folder_args: list[str], tmp_path: Path) -> None:
    """With five batches, windows of eight and of five take the same single step; windows of two take three steps."""
    plain = [
        "--model.optimizer=sgd",
        "--model.warmup=0",
        "--data.flip=false",
        "--data.shift=0",
        "--data.crop_scale=0",
        "--model.lr=0.1",
    ]
    ends = {}
    for window, steps in ((5, 1), (8, 1), (2, 3)):
        run = f"--experiment=w{window}"
        main(["fit", *folder_args, *plain, f"--trainer.accumulate_grad_batches={window}", run])
        last = only(tmp_path / "runs" / f"w{window}", "last.ckpt")
        assert torch.load(last, weights_only=True)["global_step"] == steps
        ends[window] = weights(last)
    assert all(torch.allclose(ends[5][key], ends[8][key], atol=1e-6) for key in ends[5])
    assert not equal(ends[5], ends[2])


def test_graph_of_a_trained_model(folder_args: list[str], tmp_path: Path) -> None:
    """In training, Lightning warns that it has no example input, and training is not affected."""
    main(["fit", *folder_args, "--experiment=plain"])
    logger = ["--trainer.logger=TensorBoardLogger", "--trainer.logger.save_dir=logs", "--trainer.logger.log_graph=true"]
    with pytest.warns(UserWarning, match="example_input_array"):
        main(["fit", *folder_args, *logger])
    assert equal(*(weights(only(tmp_path / folder, "last.ckpt")) for folder in ("runs", "logs")))
    with SummaryWriter("graph") as writer:
        writer.add_graph(ViTClassifier.load("runs/plain").net, torch.zeros(1, 3, 32, 32))
    assert b"blocks" in only(Path("graph"), "events*").read_bytes()


def test_deterministic_mode_runs_and_agrees(folder_args: list[str], tmp_path: Path) -> None:
    for name in ("one", "two"):
        main(["fit", *folder_args, "--trainer.deterministic=true", f"--experiment={name}"])
    assert equal(*(weights(only(tmp_path / "runs" / name, "last.ckpt")) for name in ("one", "two")))
    torch.use_deterministic_algorithms(False)


def test_worker_count_changes_nothing(folder_args: list[str], tmp_path: Path) -> None:
    """Augmentation runs on the device and depends on seed and step, so workers draw no random numbers."""
    for workers in (0, 2):
        main(["fit", *folder_args, "--data.cache_gb=0", f"--data.num_workers={workers}", f"--experiment=w{workers}"])
    assert equal(*(weights(only(tmp_path / "runs" / f"w{workers}", "last.ckpt")) for workers in (0, 2)))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting takes root")
@pytest.mark.slow
def test_workers_without_shared_memory_end_in_a_line(tree: Path) -> None:
    """With 64 KB of /dev/shm, two workers end in an error and do not hang; without workers, the run succeeds."""
    options = [*TINY, "--data=ImageFolder", f"--data.root={tree}", "--data.cache_gb=0", "--data.size=400"]
    for workers, code in ((2, 1), (0, 0)):
        fit = shlex.join([sys.executable, "-m", "vit_finetune", "fit", *options, f"--data.num_workers={workers}"])
        mounted = ["unshare", "-m", "sh", "-c", f"mount -t tmpfs -o size=64k tmpfs /dev/shm && exec {fit}"]
        run = subprocess.run(mounted, capture_output=True, text=True, timeout=120, check=False)
        assert run.returncode == code, run.stderr
        assert ("--shm-size" in run.stderr and "--data.num_workers 0" in run.stderr) == bool(workers)
        assert "Traceback" not in run.stderr


@pytest.mark.slow
def test_few_open_files_suffice(tree: Path) -> None:
    """Five epochs and 400 batches of predictions with at most 128 descriptors."""
    for number in range(400):
        Image.new("RGB", (40, 40), (number % 256, 0, 0)).save(tree / "test" / "a" / f"more{number}.png")
    fit = [*TINY, "--data=ImageFolder", f"--data.root={tree}", "--data.cache_gb=0", "--data.num_workers=2"]
    predict = ["--ckpt_path=last", *CPU, "--data.batch_size=1", "--data.num_workers=2", "--data.cache_gb=0"]
    for args in (["fit", *fit, "--trainer.max_epochs=5"], ["predict", *predict]):
        command = shlex.join([sys.executable, "-m", "vit_finetune", *args])
        subprocess.run(["bash", "-c", f"ulimit -n 128; exec {command}"], check=True, timeout=120)
    assert len(only(Path.cwd(), "predictions.csv").read_text().splitlines()) == 410


@pytest.mark.slow
@pytest.mark.parametrize("command", [[sys.executable, "-m", "vit_finetune"], ["vit-finetune"]])
def test_two_processes_from_anywhere_make_one_run(command: list[str], folder_args: list[str], tmp_path: Path) -> None:
    """As a module and as a console script, from another folder, with paths relative to it."""
    if shutil.which(command[0]) is None:
        pytest.skip("not installed by pip")
    ddp = ["--trainer.devices=2", "--trainer.strategy=ddp", "--data.root=images"]
    subprocess.run([*command, "fit", *folder_args, *ddp], check=True, timeout=120, cwd=tmp_path)
    run = tmp_path / "runs" / "imagefolder" / "version_0"
    assert len(list(run.glob("events*"))) == 1 and len(list((run / "checkpoints").iterdir())) == 2


def test_drawn_seed_is_saved(folder_args: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    main(["fit", *folder_args, "--seed_everything=true"])
    saved = yaml.safe_load(only(tmp_path, "config.yaml").read_text())["seed_everything"]
    assert isinstance(saved, int) and not isinstance(saved, bool)


@pytest.mark.parametrize("precision", ["16-mixed", "16-true", "bf16-mixed", "bf16-true"])
def test_every_precision_on_a_cpu(
    precision: str, folder_args: list[str], tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    losses = []
    for value in ("32-true", precision):
        main(["fit", *folder_args, f"--trainer.precision={value}", f"--experiment={value}"])
        losses.append(scalars(tmp_path / "runs" / value)["val/loss"][-1][1])
    assert losses[1] == pytest.approx(losses[0], rel=0.02 if "mixed" in precision else 0.1)
    if precision == "16-mixed":
        assert len([w for w in recwarn if "bf16" in str(w.message) and "16-mixed" in str(w.message)]) == 1


def test_no_table_where_it_cannot_be_written(folder_args: list[str], tmp_path: Path) -> None:
    main(["fit", *folder_args])
    last = only(tmp_path, "last.ckpt")
    lone = last.rename(tmp_path / "lone.ckpt")
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as stop:
        main(["predict", f"--ckpt_path={lone}", *CPU, "--trainer.default_root_dir=file", "--trainer.logger=false"])
    assert stop.value.code
