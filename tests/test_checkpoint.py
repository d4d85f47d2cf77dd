"""What checkpoints hold, how they are found, and who wins: what is typed, the file, or the default."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch import Trainer

from tests.conftest import CPU, TINY_KWARGS, equal, make_tree, only, scalars, weights
from vit_finetune import ImageFolder, ViTClassifier, main
from vit_finetune.cli.ckpt_path import resolve


@pytest.fixture
def run(folder_args: list[str], tmp_path: Path) -> Path:
    """A run of one epoch of five steps."""
    main(["fit", *folder_args])
    return tmp_path / "runs" / "imagefolder" / "version_0"


def test_best_holds_weights_only_and_last_everything(run: Path) -> None:
    best = torch.load(only(run, "best-*.ckpt"), weights_only=True)
    last = torch.load(only(run, "last.ckpt"), weights_only=True)
    assert "optimizer_states" not in best and "optimizer_states" in last
    for content in (best, last):
        extra = content["vit_finetune"]
        assert extra["class_names"] == ["a", "b", "c"]
        assert extra["preprocessing"] == {
            "size": (32, 32),
            "mean": (0.5, 0.5, 0.5),
            "std": (0.5, 0.5, 0.5),
            "interpolation": "bicubic",
        }
        assert len(extra["split_fingerprint"]) == 16
        assert content["hyper_parameters"]["class_names"] == ["a", "b", "c"]


def test_best_is_kept_unless_the_user_says_otherwise(folder_args: list[str], tmp_path: Path) -> None:
    main(["fit", *folder_args, "--best_checkpoint.save_weights_only=false", "--best_checkpoint.save_top_k=2"])
    assert "optimizer_states" in torch.load(only(tmp_path, "best-*.ckpt"), weights_only=True)


def test_last_is_the_newest_epoch_whatever_the_metric(folder_args: list[str], tmp_path: Path) -> None:
    """A learning rate that ruins the weights after the first epoch: best stays, last moves on."""
    main(["fit", *folder_args, "--trainer.max_epochs=3", "--model.lr=0.5", "--model.optimizer=sgd", "--model.warmup=1"])
    assert torch.load(only(tmp_path, "last.ckpt"), weights_only=True)["epoch"] == 2


def test_last_exists_when_max_steps_ends_before_validation(
    folder_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["fit", *folder_args, "--trainer.max_steps=3"])
    assert torch.load(only(tmp_path, "last.ckpt"), weights_only=True)["global_step"] == 3
    assert "best  none: validation did not run" in capsys.readouterr().out


@pytest.mark.parametrize("keyword", ["best", "last"])
def test_keywords_find_the_newest_run(run: Path, keyword: str, caplog: pytest.LogCaptureFixture) -> None:
    """Options come from the checkpoint: neither data nor model options are repeated."""
    older = run.parent.parent / "older" / "version_7"
    shutil.copytree(run, older)
    for path in older.rglob("*.ckpt"):
        import os

        os.utime(path, (1, 1))
    with caplog.at_level("INFO"):
        main(["test", f"--ckpt_path={keyword}", "--trainer.accelerator=cpu"])
    file = only(run, "best-*.ckpt" if keyword == "best" else "last.ckpt")
    assert f"checkpoint: {file.relative_to(Path.cwd())}" in caplog.text


def test_evaluation_goes_into_the_runs_folder(run: Path) -> None:
    main(["test", "--ckpt_path=best", "--trainer.accelerator=cpu"])
    assert sorted(path.name for path in run.parent.iterdir()) == ["version_0"]
    assert yaml.safe_load((run / "test.yaml").read_text())["data"]["class_path"] == "vit_finetune.ImageFolder"
    events = sorted(run.glob("events.*"), key=lambda path: path.stat().st_mtime)
    assert len(events) == 2
    shutil.move(events[0], run.parent)
    assert set(scalars(run)) >= {"test/acc", "test/loss"}


def test_moved_run_is_complete(run: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.move(run, moved)
    main(["test", f"--ckpt_path={only(moved, 'last.ckpt')}", "--trainer.accelerator=cpu"])
    assert (moved / "test.yaml").exists()


def test_typed_learning_rate_overrides_on_resume(run: Path, folder_args: list[str]) -> None:
    """The saved config, the schedule and the optimizer all follow what was typed."""
    typed = ["--model.lr=0.5", "--model.weight_decay=0.25", "--trainer.max_epochs=2"]
    main(["fit", f"--ckpt_path={only(run, 'last.ckpt')}", *CPU, *typed, "--trainer.log_every_n_steps=1"])
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["model"]["lr"] == 0.5 and config["data"]["init_args"]["batch_size"] == 4
    assert yaml.safe_load((run / "config-1.yaml").read_text())["model"]["lr"] == 1.5e-4
    last = torch.load(only(run, "last.ckpt"), weights_only=True)
    assert last["hyper_parameters"]["lr"] == 0.5 and last["global_step"] == 10
    assert {group["weight_decay"] for group in last["optimizer_states"][0]["param_groups"]} == {0.0, 0.25}


def test_resume_of_a_finished_run_is_refused(run: Path, fails: Callable[..., str]) -> None:
    last = only(run, "last.ckpt")
    before = last.stat().st_mtime_ns
    message = fails("fit", f"--ckpt_path={last}", *CPU, "--trainer.max_epochs=1")
    assert "has already trained for 1 epochs" in message and "--trainer.max_epochs" in message
    assert f"fit --model.weights {last}" in message
    assert last.stat().st_mtime_ns == before and not (run / "config-1.yaml").exists()
    main(["fit", f"--ckpt_path={last}", *CPU, "--trainer.max_epochs=2"])
    assert torch.load(last, weights_only=True)["global_step"] == 10


def test_resume_from_weights_is_refused(run: Path, fails: Callable[..., str]) -> None:
    message = fails("fit", "--ckpt_path=best", *CPU)
    last = only(run, "last.ckpt")
    assert f"contains only weights. To resume: --ckpt_path {last.relative_to(Path.cwd())}." in message
    last.unlink()
    assert "To resume" not in fails("fit", "--ckpt_path=best", *CPU)  # only files that exist are named


@pytest.mark.parametrize("keyword", ["best", "last", "nosuch.ckpt"])
def test_checkpoint_that_does_not_exist(keyword: str, fails: Callable[..., str], folder_args: list[str]) -> None:
    message = fails("fit", *folder_args, f"--ckpt_path={keyword}")
    assert f"--ckpt_path {keyword}" in message
    assert not Path("runs").exists()


def test_files_that_are_not_checkpoints(tmp_path: Path, fails: Callable[..., str], folder_args: list[str]) -> None:
    torch.save({"head.weight": torch.zeros(2)}, tmp_path / "raw.pth")
    assert "fit --model.weights" in fails("fit", *folder_args, f"--ckpt_path={tmp_path / 'raw.pth'}")
    (tmp_path / "cut.ckpt").write_bytes(b"PK\x03\x04 cut short")
    assert "is damaged or not a checkpoint" in fails("fit", *folder_args, f"--ckpt_path={tmp_path / 'cut.ckpt'}")


def test_checkpoint_of_another_network_is_refused(run: Path, fails: Callable[..., str]) -> None:
    """At another size, and at another depth; the same size again needs no option."""
    for change in ("--model.img_size=64", "--model.timm_kwargs={patch_size: 8, embed_dim: 24, depth: 3, num_heads: 2}"):
        message = fails("test", "--ckpt_path=best", "--trainer.accelerator=cpu", change)
        assert "does not match the network" in message and "fit --model.weights FILE" in message


def test_other_dataset_does_not_inherit_options(run: Path, fails: Callable[..., str]) -> None:
    """The checkpoint's classes meet those of the data that was typed; nothing of the old dataset carries over."""
    message = fails("test", "--ckpt_path=best", "--data=Shapes", "--trainer.accelerator=cpu")
    assert "The model's classes are a, b, c; the data's are bar, crescent" in message


def test_python_objects_become_plain(tmp_path: Path, tree: Path) -> None:
    """From Python with a Path and a NumPy number: all ways back read the file safely."""
    model = ViTClassifier(
        "vit_tiny_patch16_224", 32, pretrained=False, timm_kwargs=TINY_KWARGS, lr=np.float64(1e-3), mean=(0.5,) * 3
    )
    trainer = Trainer(max_epochs=1, accelerator="cpu", logger=False, default_root_dir=tmp_path, barebones=False)
    trainer.fit(model, datamodule=ImageFolder(tree, batch_size=np.int64(4)))
    path = tmp_path / "plain.ckpt"
    trainer.save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=True)
    for hparams in (checkpoint["hyper_parameters"], checkpoint["datamodule_hyper_parameters"]):
        assert all(type(v) in (str, int, float, bool, list, dict, type(None)) for v in hparams.values()), hparams
    again = ViTClassifier.load_from_checkpoint(path)
    assert again.class_names == ["a", "b", "c"] and equal(again.state_dict(), model.state_dict())
    main(["test", f"--ckpt_path={path}", "--trainer.accelerator=cpu", "--data=ImageFolder", f"--data.root={tree}"])


def test_loading_never_asks_for_pretrained_weights(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import timm

    made = []
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda *a, **k: made.append(k["pretrained"]) or create(*a, **k))
    last = only(run, "last.ckpt")
    state = torch.load(last, weights_only=True)
    state["hyper_parameters"]["pretrained"] = True  # as after a usual fine-tune
    torch.save(state, last)
    ViTClassifier.load_from_checkpoint(last)
    main(["test", f"--ckpt_path={last}", "--trainer.accelerator=cpu"])
    main(["fit", f"--ckpt_path={last}", *CPU, "--trainer.max_epochs=2"])
    assert made and not any(made)


def test_resumed_at_an_epochs_end_equals_uninterrupted(tmp_path: Path) -> None:
    """Bit for bit, with augmentation, dropout, drop path and shuffling; and so do two runs with one seed."""
    tree = make_tree(tmp_path / "images", {"train": 6, "val": 1})
    options = ["--model.name=vit_tiny_patch16_224", "--model.pretrained=false", "--model.img_size=32"]
    options += [f"--model.timm_kwargs={TINY_KWARGS | {'proj_drop_rate': 0.2}}", "--model.drop_path=0.2", *CPU]
    options += ["--data=ImageFolder", f"--data.root={tree}", "--data.batch_size=4", "--trainer.max_epochs=4"]
    for name in ("whole", "again"):
        main(["fit", *options, f"--experiment={name}"])
    main(["fit", *options, "--experiment=other", "--seed_everything=1"])
    # Stopped by the time limit's own means after two epochs, the schedule still that of four.
    main(
        ["fit", *options, "--experiment=parts", "--trainer.limit_train_batches=5", "--trainer.max_epochs=4"]
        + ["--trainer.callbacks=tests.test_checkpoint.StopAfterTwo"]
    )
    last = only(tmp_path / "runs" / "parts", "last.ckpt")
    assert torch.load(last, weights_only=True)["global_step"] == 10
    main(["fit", *options, f"--ckpt_path={last}"])
    final = {
        name: weights(only(tmp_path / "runs" / name, "last.ckpt")) for name in ("whole", "again", "other", "parts")
    }
    assert equal(final["whole"], final["again"]) and equal(final["whole"], final["parts"])
    assert not equal(final["whole"], final["other"])


from lightning.pytorch import Callback, LightningModule  # noqa: E402


class StopAfterTwo(Callback):
    """Ends the run after two epochs, as an interruption would."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.should_stop = trainer.current_epoch == 1


def test_resume_on_other_images_says_so(run: Path) -> None:
    last = only(run, "last.ckpt")
    other = make_tree(run.parent / "other", {"train": 6, "val": 1})
    with pytest.warns(UserWarning, match="training split is not that of the checkpoint"):
        main(["fit", f"--ckpt_path={last}", *CPU, "--trainer.max_epochs=2", f"--data.root={other}"])


def test_restart_resumes_only_a_restarted_job(
    run: Path, folder_args: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fresh at first; from the newest last.ckpt when torchrun or SLURM says that this is another attempt."""
    assert resolve("restart", Path("runs"), None) is None
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert resolve("restart", Path("runs"), "imagefolder") == Path("runs") / only(run, "last.ckpt").relative_to(
        run.parent.parent
    )
    main(["fit", *folder_args, "--ckpt_path=restart", "--trainer.max_epochs=2", "--experiment=imagefolder"])
    assert torch.load(only(run, "last.ckpt"), weights_only=True)["global_step"] == 10
    assert resolve("restart", Path("runs"), "none-yet") is None
    # This job's first attempt left no file; files of older jobs do not count.
    (Path("runs") / "imagefolder" / "version_1").mkdir()
    (Path("runs") / "imagefolder" / "version_1" / "config.yaml").touch()
    assert resolve("restart", Path("runs"), "imagefolder") is None


def test_experiment_and_folder_of_a_config_file_count(folder_args: list[str], tmp_path: Path) -> None:
    """The newest run of all is another experiment's."""
    (tmp_path / "my.yaml").write_text("experiment: cats\ntrainer: {default_root_dir: elsewhere}\n")
    main(["fit", *folder_args, "--config=my.yaml"])
    main(["fit", *folder_args, "--trainer.default_root_dir=elsewhere", "--experiment=dogs"])
    cats, dogs = (only(tmp_path / "elsewhere" / name, "last.ckpt") for name in ("cats", "dogs"))
    main(["fit", *folder_args, "--config=my.yaml", "--ckpt_path=last", "--trainer.max_epochs=2"])
    steps = [torch.load(path, weights_only=True)["global_step"] for path in (cats, dogs)]
    assert steps == [10, 5]
