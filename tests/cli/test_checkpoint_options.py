"""Checkpoints of other versions and with classes of one's own, files that run code, and the saved configs of runs."""

import os
import pickle
import re
import shutil
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.conftest import CPU, TINY, make_tree, only
from vit_finetune import ViTClassifier, main
from vit_finetune.cli.main import parse

RUN = Path("runs") / "imagefolder" / "version_0"
LAST = RUN / "checkpoints" / "last.ckpt"
HINTS = ("weights_only", "safe_globals", "mmap", "torch.load", "allowlist", "Traceback")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images and a run of one epoch, which was evaluated by three commands."""
    before, folder = Path.cwd(), tmp_path_factory.mktemp("trained")
    os.chdir(folder)
    make_tree(Path("images"), {"train": 6, "val": 3, "test": 3})
    main(["fit", *TINY, "--data=ImageFolder", "--data.root=images"])
    for command in ("validate", "test", "predict"):
        main([command, "--ckpt_path=last", *CPU])
    os.environ.pop("PL_GLOBAL_SEED", None)
    os.chdir(before)
    return folder


@pytest.fixture(autouse=True)
def run(trained: Path, tmp_path: Path, alone: None) -> Path:
    """A copy of that run in the current folder."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return RUN


def edit(section: str, **changes: Any) -> None:
    """Change options in the checkpoint."""
    checkpoint = torch.load(LAST, weights_only=True)
    checkpoint[section].update(changes)
    torch.save(checkpoint, LAST)


def edit_model(**changes: Any) -> None:
    edit("hyper_parameters", **changes)


def edit_data(**changes: Any) -> None:
    edit("datamodule_hyper_parameters", **changes)


def left_out(*args: str) -> tuple[dict[str, Any], list[str]]:
    """Parse a command; return its options and the warnings about the checkpoint."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options = parse(list(args))
    return options, [str(w.message) for w in caught if "left out" in str(w.message)]


# A checkpoint of another version


@pytest.mark.parametrize("command", ["validate", "predict", "export", "check-data"])
def test_unknown_options_are_left_out(command: str) -> None:
    edit_model(dropout=0.1)
    edit_data(crop=[1, 2], cache_gb=1.5)
    options, found = left_out(command, f"--ckpt_path={LAST}")
    (warning,) = found
    assert "--model.dropout 0.1" in warning and "--data.crop [1, 2]" in warning and str(LAST) in warning
    assert options["data"]["init_args"]["cache_gb"] == 1.5


def test_unknown_options_do_not_stop_an_evaluation() -> None:
    edit_model(dropout=0.1)
    edit_data(crop=1)
    with pytest.warns(UserWarning, match="left out"):
        main(["test", f"--ckpt_path={LAST}", *CPU])
    with pytest.warns(UserWarning, match="left out"):
        main(["export", f"--ckpt_path={LAST}", "--format=timm", "--output=exported", *CPU])
    with pytest.warns(UserWarning, match=r"left out: dropout=0\.1"):
        assert ViTClassifier.load(LAST).class_names == ["a", "b", "c"]
    assert Path("exported/model.safetensors").exists()


@pytest.mark.parametrize("command", ["fit", "doctor"])
def test_a_run_is_not_resumed_without_an_option(command: str, fails: Callable[..., str]) -> None:
    edit_data(crop=1)
    message = fails(command, f"--ckpt_path={LAST}", "--trainer.max_epochs=2", *CPU)
    assert f"--ckpt_path {LAST} cannot be resumed" in message and "--data.crop 1" in message
    assert f"fit --model.weights {LAST}" in message and message.count("\n") == 1
    assert not (RUN / "config-1.yaml").exists()


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [("data", "auto_augment", "augmix"), ("data", "val_fraction", 3), ("model", "lr", "x")],
)
def test_values_that_are_not_valid_any_more(section: str, name: str, value: object, fails: Callable[..., str]) -> None:
    """Of another type, not among the choices, or out of range; a typed value replaces it."""
    (edit_data if section == "data" else edit_model)(**{name: value})
    _, found = left_out("test", f"--ckpt_path={LAST}")
    assert len(found) == 1 and f"--{section}.{name} {value!r} (not valid in this version)" in found[0]
    resume = ["fit", f"--ckpt_path={LAST}", "--trainer.max_epochs=2", *CPU]
    assert f"--{section}.{name} {value!r}" in fails(*resume)
    valid = {"auto_augment": "rand", "val_fraction": 0.25, "lr": 0.5}[name]
    options, found = left_out(*resume, f"--{section}.{name}={valid}")
    values = options[section]
    assert not found and values.get("init_args", values)[name] == valid
    if section == "data":
        Path("mine.yaml").write_text(yaml.safe_dump({section: {name: valid}}))
        assert left_out(*resume, "--config=mine.yaml")[1] == []


def test_other_data_need_none_of_its_options() -> None:
    edit_data(crop=1)
    options, found = left_out("test", f"--ckpt_path={LAST}", "--data=Shapes")
    assert found == [] and options["data"]["class_path"] == "vit_finetune.Shapes"


# Data of one's own


OWN = """
from pathlib import Path
from typing import Callable
from vit_finetune import ImageFolder
Path("imported").touch()
class MyData(ImageFolder):
    def __init__(self, root: str = "nowhere", reader: Callable | None = None, **kwargs):
        super().__init__(root, **kwargs)
"""


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> str:
    """The checkpoint was trained with a class of a module that can be imported from here."""
    name = f"own_{Path.cwd().name.replace('-', '_')}"
    Path(f"{name}.py").write_text(OWN)
    monkeypatch.syspath_prepend(Path.cwd())
    edit_data(_class_path=f"{name}.MyData")
    return f"{name}.MyData"


@pytest.mark.parametrize("command", ["test", "export", "fit"])
def test_a_class_of_the_checkpoint_is_not_imported(own: str, command: str, fails: Callable[..., str]) -> None:
    message = fails(command, f"--ckpt_path={LAST}", "--data.size=32")
    assert f"{LAST} was trained with data {own}" in message and f"Give --data {own} to use it" in message
    assert message.count("\n") == 1 and not Path("imported").exists()


def test_commands_that_get_other_data_do_not_need_the_class(own: str) -> None:
    folder = ["--data=ImageFolder", "--data.root=images", f"--ckpt_path={LAST}", *CPU]
    main(["predict", *folder, "--predictions.path=p.csv"])
    main(["export", *folder, "--format=timm", "--output=exported"])
    assert Path("p.csv").exists() and Path("exported/model.safetensors").exists() and not Path("imported").exists()


def test_a_class_that_the_user_names_gets_the_options_of_the_checkpoint(own: str) -> None:
    """Typed, or in a config file; text for a function that the checkpoint names is left out."""
    edit_data(reader="os.system")
    Path("mine.yaml").write_text(f"data: {{class_path: {own}}}")
    for named in (f"--data={own}", "--config=mine.yaml"):
        options, found = left_out("test", named, f"--ckpt_path={LAST}")
        values = options["data"]["init_args"]
        assert (values["root"], values["batch_size"], values["reader"]) == ("images", 4, None)
        assert len(found) == 1 and "--data.reader 'os.system'" in found[0]
    main(["test", f"--data={own}", f"--ckpt_path={LAST}", *CPU])


@pytest.mark.parametrize("class_path", ["not_installed.MyData", "vit_finetune.Pets", "vit_finetune.data.cifar.Path"])
def test_a_class_that_is_not_here(class_path: str, fails: Callable[..., str]) -> None:
    edit_data(_class_path=class_path)
    message = fails("test", f"--ckpt_path={LAST}", *CPU)
    assert f"trained with data {class_path}, which is not in this package" in message and "--data" in message
    typed = fails("test", f"--ckpt_path={LAST}", f"--data={class_path}", *CPU)
    assert class_path in typed and typed.count("\n") == 1
    options, _ = left_out("test", f"--ckpt_path={LAST}", "--data=ImageFolder")
    assert options["data"]["init_args"]["root"] == "data"


def test_nested_classes_of_a_checkpoint_are_not_created() -> None:
    """Jsonargparse imports and creates a class_path in any option without a type."""
    Path("evil.py").write_text("from pathlib import Path\nPath('imported').touch()\nclass X: ...\n")
    edit_model(timm_kwargs={"depth": 2, "norm": {"class_path": "evil.X"}}, _class_path="evil.X", _instantiator="evil.X")
    _, found = left_out("test", f"--ckpt_path={LAST}")
    assert len(found) == 1 and "--model.timm_kwargs" in found[0] and "evil.X" in found[0]
    edit_model(timm_kwargs={"patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2})
    ViTClassifier.load(LAST)
    assert not Path("imported").exists()


# Files that run code, and files that are not checkpoints


class Runs:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Callable[..., object], argument: str) -> None:
        self.call = (function, (argument,))

    def __reduce__(self) -> Any:
        return self.call


def broken(kind: str) -> tuple[Path, str]:
    """Write a file that must be refused; return it and what the message must contain."""
    path = Path("given.pth")
    if kind == "folder":
        path.mkdir()
        return path, "is a folder"
    if kind == "system":
        torch.save({"state_dict": Runs(os.system, "touch ran"), "pytorch-lightning_version": "2"}, path)
        return path, f"would call {os.system.__module__}.system"
    if kind in ("exec", "exec, old format"):
        torch.save({"a": Runs(exec, "open('ran', 'w')")}, path, _use_new_zipfile_serialization=kind == "exec")
        return path, "would call exec"
    if kind == "module":
        torch.save(torch.nn.Linear(2, 2), path)
        return path, "would call torch.nn.modules.linear.Linear"
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a.txt", "x")
    else:
        whole = LAST.read_bytes()
        contents = {
            "pickle": pickle.dumps({"a": Runs(os.system, "touch ran")}),
            "text": b"hello world, this is text\n",
            "empty": b"",
            "truncated": whole[: len(whole) // 2],
            "cut at the end": whole[:-100],
        }
        path.write_bytes(contents[kind])
    return path, "damaged or not a checkpoint"


@pytest.mark.parametrize(
    "kind",
    ["system", "exec", "exec, old format", "module", "pickle", "folder", "zip", "text", "empty", "truncated"]
    + ["cut at the end"],
)
def test_files_that_are_refused(kind: str, fails: Callable[..., str]) -> None:
    path, expected = broken(kind)
    commands = ("fit", "test", "predict", "export") if kind == "system" else ("test",)
    messages = [fails(command, f"--ckpt_path={path}", *CPU) for command in commands]
    if kind != "folder":
        fit = ["fit", *TINY, "--data=ImageFolder", "--data.root=images", f"--model.weights={path}"]
        messages.append(fails(*fit))
        with pytest.raises(Exception, match=re.escape(expected)) as caught:
            ViTClassifier.load(path)
        messages.append(f"{caught.value}\n")
    for message in messages:
        assert expected in message and str(path) in message and message.count("\n") == 1
        assert not [hint for hint in HINTS if hint in message.replace("--model.weights", "")], message
    assert not Path("ran").exists()


# Saved configs


@pytest.mark.parametrize(
    ("file", "commands"),
    [
        ("predict.yaml", ["fit", "validate", "test", "predict", "export", "check-data", "doctor", "tune"]),
        ("test.yaml", ["fit", "predict", "check-data"]),
    ],
)
def test_a_saved_config_serves_every_command(file: str, commands: list[str]) -> None:
    """What one command has and another has not is ignored; a null that nobody typed hides nothing."""
    for command in commands:
        options: Any = parse([command, "--ckpt_path=last", f"--config={RUN / 'config.yaml'}", f"--config={RUN / file}"])
        assert options["model"]["class_names"] == ["a", "b", "c"] and options["ckpt_path"] == str(LAST)
        assert options["data"]["init_args"]["root"] == "images"


def test_commands_run_with_the_config_of_a_run(fails: Callable[..., str]) -> None:
    config = f"--config={RUN / 'config.yaml'}"
    main(["validate", config, "--ckpt_path=last"])
    main(["test", config, "--ckpt_path=best"])
    main(["predict", config, "--ckpt_path=last", "--predictions.path=p.csv"])
    main(["export", config, "--ckpt_path=last", "--format=timm", "--output=exported"])
    main(["check-data", config, "--output=checked"])
    main(["doctor", config])
    main(["tune", config, "--low=1e-5", "--steps=5"])
    assert "increase it to resume" in fails("fit", config, "--ckpt_path=last")
    # Without a checkpoint it is another run of the same experiment.
    main(["fit", config, "--trainer.limit_train_batches=1"])
    main(["fit", config, f"--ckpt_path={LAST}", "--trainer.max_epochs=2"])
    assert torch.load(LAST, weights_only=True)["global_step"] == 10
    assert sorted(path.name for path in RUN.parent.iterdir()) == ["version_0", "version_1"]
    for path in (only(Path("exported"), "model.safetensors"), Path("p.csv"), Path("checked/report.json")):
        assert path.exists()


def test_a_null_that_was_chosen_counts() -> None:
    """On the command line, in a file of one's own, and where null is not the default."""
    edit_model(ema=0.5, layer_decay=0.5)
    saved = (RUN / "config.yaml").read_text().replace("layer_decay: 0.75", "layer_decay: null")
    (RUN / "config.yaml").write_text(saved)
    Path("mine.yaml").write_text("model: {ema: null}\n")
    resume = ["fit", "--ckpt_path=last", f"--config={RUN / 'config.yaml'}"]
    for more, ema in (([], 0.5), (["--model.ema=null"], None), (["--config=mine.yaml"], None)):
        model: Any = parse([*resume, *more])["model"]
        assert model["ema"] == ema and model["layer_decay"] is None


def test_a_saved_config_with_a_mistake(fails: Callable[..., str]) -> None:
    config = RUN / "config.yaml"
    saved = config.read_text()
    for text, expected in (
        (f"{saved}nonsense: 1\n", "nonsense"),
        (f"{saved}:\n  - [", "config"),
        ("# lightning.pytorch==2\n5", "5"),
    ):
        config.write_text(text)
        assert expected in fails("test", "--ckpt_path=last", f"--config={config}")
