"""What a run prints at its end can be pasted, whatever the options."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import only
from vit_finetune import ImageFolder, main

Next = Callable[..., list[str]]


@pytest.fixture
def following(folder_args: list[str], capsys: pytest.CaptureFixture[str]) -> Next:
    """Runs fit with these options; returns the arguments of the test command that it prints."""

    def run(*options: str) -> list[str]:
        main(["fit", *folder_args, *options])
        (command,) = re.findall(r"^next  python -m vit_finetune (.*)$", capsys.readouterr().out, re.M)
        return shlex.split(command)

    return run


def checkpoint_of(args: list[str], caplog: pytest.LogCaptureFixture) -> str:
    """Run the printed command; return the checkpoint that it tested."""
    caplog.clear()
    with caplog.at_level("INFO"):
        main([*args, "--trainer.accelerator=cpu"])
    (found,) = re.findall(r"checkpoint: (.*\.ckpt)", caplog.text)
    return str(found)


@pytest.mark.parametrize(
    ("options", "folder"),
    [
        (["--trainer.default_root_dir=my runs"], "my runs/imagefolder/version_0/checkpoints"),
        (["--config=my.yaml"], "elsewhere/my/version_0/checkpoints"),
        (["--best_checkpoint.dirpath=kept"], "kept"),
    ],
)
def test_next_command_names_the_file_where_best_would_not_find_it(
    options: list[str], folder: str, following: Next, caplog: pytest.LogCaptureFixture
) -> None:
    Path("my.yaml").write_text("trainer: {default_root_dir: elsewhere}\n")
    args = following(*options)
    best = only(Path(folder), "best-*.ckpt")
    assert args == ["test", "--ckpt_path", str(best)]
    assert checkpoint_of(args, caplog) == str(best)


class OwnImages(ImageFolder):
    """Data of a user's own class."""


def test_next_command_names_data_of_your_own_class(following: Next, caplog: pytest.LogCaptureFixture) -> None:
    args = following(f"--data={OwnImages.__module__}.OwnImages")
    assert args == ["test", "--ckpt_path", "best", "--data", f"{OwnImages.__module__}.OwnImages"]
    assert "/best-" in checkpoint_of(args, caplog)


@pytest.mark.parametrize("options", [["--experiment=mine"], ["--trainer.logger=false"]])
def test_next_command_is_best_where_that_finds_it(
    options: list[str], following: Next, caplog: pytest.LogCaptureFixture
) -> None:
    args = following(*options)
    assert args == ["test", "--ckpt_path", "best"]
    assert checkpoint_of(args, caplog) == str(only(Path("runs"), "best-*.ckpt"))


def test_own_file_name_and_no_validation(following: Next) -> None:
    assert following("--best_checkpoint.filename=mine")[-1] == "runs/imagefolder/version_0/checkpoints/mine.ckpt"
    assert following("--trainer.limit_val_batches=0", "--experiment=last") == ["test", "--ckpt_path", "last"]


def test_tensorboard_is_named_only_if_it_logs(
    folder_args: list[str], following: Next, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["fit", *folder_args, "--trainer.default_root_dir=my runs"])
    assert "      tensorboard --logdir 'my runs'" in capsys.readouterr().out
    main(["fit", *folder_args, "--trainer.logger=false", "--trainer.enable_checkpointing=false"])
    out = capsys.readouterr().out
    assert "tensorboard" not in out and "next" not in out
