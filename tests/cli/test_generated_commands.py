"""Generated command lines through the real ``main``: exit 0, or exit 1 or 2 with one readable message; no traceback.

Each command runs in a forked process, so that one that hangs, changes global state or starts processes of its own
affects no other. All choices are functions of a fixed seed.
"""

import os
import random
import signal
import sys
import time
import traceback
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from PIL import Image

from tests.conftest import CPU, TINY_MODEL, make_tree
from vit_finetune import main
from vit_finetune.cli.main import parse

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks a process for each command")

SECONDS = 120  # after which a command counts as hanging
SHAPES = [
    "--data=Shapes",
    "--data.train_size=40",
    "--data.val_fraction=0.25",
    "--data.test_size=30",
    "--data.batch_size=8",
]
FIT = ["fit", *TINY_MODEL, *CPU, *SHAPES, "--trainer.max_steps=2", "--trainer.max_epochs=1"]
VALUES = ["", "null", "true", "abc", "-1", "0", "1", "2", "0.5", "1.5", "-0.5", "1e-9", "nan", "inf", "[]", "[1, 2]"]
VALUES += [
    "{}",
    "{a: 1}",
    "[a, b]",
    "~",
    "/dev/null",
    ".",
    "nowhere/at/all",
    "ä\n",
    "1e400",
    "!!python/object:os.system x",
]
NUMBERS = ["1", "0.5", "2", "0", "-1", "3", "0.999", "1.5", "-0.5", "1e-9", "nan", "inf"]
WORDS = {  # values that options with a fixed set of words accept, besides the general ones
    "trainer.accelerator": ["cpu", "gpu", "tpu", "cuda"],
    "trainer.strategy": ["ddp", "fsdp", "deepspeed", "ddp_spawn", "FSDPStrategy", "ModelParallelStrategy"],
    "trainer.precision": ["bf16-mixed", "16-true", "64-true", "transformer-engine", "bf16"],
    "trainer.logger": ["CSVLogger", "TensorBoardLogger", "WandbLogger", "false"],
    "trainer.callbacks": ["EarlyStopping", "LearningRateMonitor", "Timer", "os.system", "DeviceStatsMonitor"],
    "trainer.profiler": ["simple", "advanced", "pytorch", "xla"],
    "trainer.plugins": ["MixedPrecision", "AsyncCheckpointIO"],
    "trainer.max_time": ["00:00:00:01", "1"],
    "trainer.gradient_clip_algorithm": ["norm", "value"],
    "model.name": ["resnet18", "vit_tiny_patch16_224", "vit_huge", "deit_tiny_patch16_224"],
    "model.optimizer": ["sgd", "adam", "lion", "lbfgs", "adamw8bit"],
    "model.timm_kwargs": ["{depth: 1}", "{depth: 0}", "{num_heads: 5}", "{no_such: 1}", "{num_classes: 4}"],
    "model.class_names": ["[a]", "[a, a]", "[a, b, c]"],
    "model.mean": ["[0.5]", "[0.5, 0.5, 0.5]", "[a, b, c]"],
    "data": ["CIFAR100", "ImageFolder", "Contours", "os.system", "torch.nn.Linear", "no.such.Class"],
    "best_checkpoint.monitor": ["val/loss", "train/acc", "val/acc_top5", "nothing"],
    "best_checkpoint.filename": ["{epoch}", "{", "a/b", "../up"],
    "best_checkpoint.mode": ["min", "max"],
    "experiment": ["../up", "a b", "a/b"],
}
ENDLESS = {"trainer.num_nodes"}  # a second node is waited for, as it should be


class Outcome(NamedTuple):
    """How a command ended."""

    args: list[str]
    code: int
    output: str
    created: list[str]

    @property
    def readable(self) -> bool:
        """Exit 0, or a refusal or failure with one message and without a traceback."""
        failed = self.code in (1, 2) and self.output.count("error: ") == 1
        return "Traceback" not in self.output and (self.code == 0 or failed)


def run(args: list[str], folder: Path, environment: dict[str, str] | None = None) -> Outcome:
    """Run a command in a forked process of its own, in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder.with_suffix(".txt")
    child = os.fork()
    if child == 0:
        os.setsid()
        os._exit(_child(args, folder, log, environment or {}))
    deadline = time.monotonic() + SECONDS
    status = None
    while status is None and time.monotonic() < deadline:
        done, code = os.waitpid(child, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if done else None
        time.sleep(0.01)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # also what it may have left behind
    if status is None:
        os.waitpid(child, 0)
    created = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    return Outcome(args, -1 if status is None else status, log.read_text(errors="replace"), created)


def _child(args: list[str], folder: Path, log: Path, environment: dict[str, str]) -> int:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDONLY) if stream == 0 else file, stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    os.chdir(folder)
    os.environ.update(environment)
    try:
        main(args)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException:
        traceback.print_exc()
        code = 99
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def leaves(options: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Names of all options with their values, from parsed options."""
    if not isinstance(options, dict) or (prefix and not options):
        yield prefix, options
        return
    for key, value in options.items():
        if key == "init_args":
            yield from leaves(value, prefix)
        elif key == "class_path":
            yield prefix, value
        else:
            yield from leaves(value, f"{prefix}.{key}" if prefix else key)


def value_for(name: str, default: object, generator: random.Random) -> str:
    """A value that is often of the right type, in range or not, and sometimes anything."""
    typed = NUMBERS if isinstance(default, (int, float)) else []
    typed = ["true", "false"] if isinstance(default, bool) else typed or NUMBERS[:3]
    return generator.choice(
        [generator.choice(WORDS.get(name, typed)), generator.choice(typed), generator.choice(VALUES)]
    )


def generated(base: list[str], number: int, seed: int) -> list[list[str]]:
    """A command with one to three options of generated values; each option comes first once before any repeats."""
    generator = random.Random(seed)
    defaults = {name: value for name, value in leaves(parse(base)) if name not in ENDLESS}
    names = sorted(defaults)
    generator.shuffle(names)
    commands = []
    for index in range(number):
        chosen = [names[index % len(names)], *generator.sample(names, generator.choice((0, 0, 1, 2)))]
        options = [f"--{name}={value_for(name, defaults[name], generator)}" for name in chosen]
        commands.append([*base, *options])
    return commands


def all_generated(trained: Path, number: int, seed: int) -> list[list[str]]:
    """Commands of every kind, most of them ``fit``."""
    evaluated = [f"--ckpt_path={trained}", *CPU]
    commands = generated(FIT, number, seed)
    for command in ("validate", "test", "predict", "export", "check-data"):
        commands += generated([command, *evaluated], number // 8, seed)
    return commands + generated(["tune", *FIT[1:], "--steps=3"], number // 8, seed)


def check(outcomes: list[Outcome]) -> None:
    """All ended well, and what was refused has written nothing into the folder of runs."""
    bad = [f"{o.args[1:]} -> {o.code}\n{o.output[-1500:]}" for o in outcomes if not o.readable]
    assert not bad, f"{len(bad)} of {len(outcomes)}:\n\n" + "\n\n".join(bad)
    written = [(o.args, o.created) for o in outcomes if o.args[:1] == ["fit"] and o.code == 2 and o.created]
    assert not written, written


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run."""
    folder = tmp_path_factory.mktemp("trained")
    outcome = run(FIT, folder / "here")
    assert outcome.code == 0, outcome.output
    return next((folder / "here").rglob("last.ckpt"))


def test_some_generated_options(tmp_path: Path, trained: Path) -> None:
    commands = random.Random(1).sample(all_generated(trained, 200, 7), 14)
    outcomes = [run(args, tmp_path / str(number)) for number, args in enumerate(commands)]
    check(outcomes)
    assert {outcome.code for outcome in outcomes} >= {0, 2}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_many_generated_options(tmp_path: Path, trained: Path, seed: int) -> None:
    commands = all_generated(trained, 80, 100 + seed)
    check([run(args, tmp_path / str(number)) for number, args in enumerate(commands)])


def files(folder: Path, trained: Path) -> dict[str, str]:
    """Files that somebody might name by mistake, by kind."""
    folder.mkdir()
    content = trained.read_bytes()
    for kind, data in {
        "empty": b"",
        "text": b"hello\n",
        "half": content[: len(content) // 2],
        "head": content[:100],
        "tail": content[100:],
        "zeros": content[:2000] + bytes(2000) + content[4000:],
        "image": b"\x89PNG\r\n\x1a\n" + bytes(50),
        "list.yaml": b"- 1\n- 2\n",
        "broken.yaml": b"a: [1\n",
        "latin.yaml": b"experiment: \xe9\n",
        "unknown.yaml": b"no_such: 1\n",
    }.items():
        (folder / kind).write_bytes(data)
    checkpoint = torch.load(trained, weights_only=True)
    others: dict[str, object] = {
        "weights.pth": checkpoint["state_dict"],
        "list.pth": [1, 2],
        "tensor.pth": torch.zeros(3),
        "bare.ckpt": {"pytorch-lightning_version": "2.0.0", "state_dict": {}, "epoch": 0, "global_step": 0},
        "foreign.ckpt": {**checkpoint, "hyper_parameters": {"backbone": "resnet", "lr": "high"}},
        "renamed.ckpt": {**checkpoint, "state_dict": {f"x.{k}": v for k, v in checkpoint["state_dict"].items()}},
        "no_loops.ckpt": {key: value for key, value in checkpoint.items() if key not in ("loops", "callbacks")},
        "other_data.ckpt": {
            **checkpoint,
            "datamodule_hyper_parameters": {"_class_path": "no_such.Data", "_instantiator": "x", "root": "data"},
        },
    }
    for kind, value in others.items():
        torch.save(value, folder / kind)
    with zipfile.ZipFile(folder / "archive.zip", "w") as archive:
        archive.writestr("data.pkl", b"x")
    make_tree(folder / "tree", {"train": 2, "val": 1})
    (folder / "no_images").mkdir()
    Image.new("RGB", (40, 40)).save(folder / "one.png")
    return {path.name: str(path) for path in folder.iterdir()} | {
        "missing": str(folder / "missing"),
        "null": "/dev/null",
    }


def file_commands(places: dict[str, str], trained: Path) -> list[list[str]]:
    """Every command with every file in every option that takes one."""
    commands: list[list[str]] = []
    for path in places.values():
        commands += [[command, f"--ckpt_path={path}", *CPU] for command in ("fit", "test", "predict", "export")]
        commands += [[*FIT, f"--model.weights={path}"], [*FIT, f"--config={path}"]]
        commands.append(
            [*FIT[: -len(SHAPES) - 2], "--data=ImageFolder", f"--data.root={path}", "--trainer.max_epochs=1"]
        )
        commands.append(["check-data", "--data=ImageFolder", f"--data.root={path}"])
        commands.append(["predict", f"--ckpt_path={trained}", *CPU, "--data=ImageFolder", f"--data.root={path}"])
        commands.append(["predict", f"--ckpt_path={trained}", *CPU, f"--predictions.path={path}/x.csv"])
        commands.append(["test", f"--ckpt_path={trained}", *CPU, f"--trainer.default_root_dir={path}"])
        commands.append(["benchmark", f"--suite={path}", "--output=out"])
    return commands


def test_some_files_in_every_place(tmp_path: Path, trained: Path) -> None:
    commands = file_commands(files(tmp_path / "files", trained), trained)
    chosen = random.Random(3).sample(commands, 10)
    check([run(args, tmp_path / str(number)) for number, args in enumerate(chosen)])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_all_files_in_every_place(tmp_path: Path, trained: Path, part: int) -> None:
    commands = file_commands(files(tmp_path / "files", trained), trained)[part::8]
    check([run(args, tmp_path / str(number)) for number, args in enumerate(commands)])


ODD = [
    [], ["--"], ["--help"], ["fitt"], ["fit", "extra"], ["fit", "--trainer"], ["fit", "--model.lr"], ["fit", "--=1"],
    ["fit", "--config"], ["fit", "--data"], ["fit", "--data="], ["test"], ["predict", "--ckpt_path"], ["export"],
    ["test", "--ckpt_path=best"], ["fit", "--ckpt_path=last"], ["tune", "--what=depth"],
    ["tune", "--low=1", "--high=0", *FIT[1:]],
    ["tune", "--steps=0", *FIT[1:]], ["tune", "--what=batch_size", "--largest=0", *FIT[1:]], ["benchmark"],
    ["benchmark", "--suite"], ["benchmark", "--frameworks", "x"], ["--config=none.yaml", "fit"], ["doctor", *FIT[1:]],
    ["fit", "--print_config", "--model.lr=x"], ["fit", "--model", "torch.nn.Linear"], ["fit", "\x00"], ["fit", "--é=1"],
]  # fmt: skip


def test_odd_commands(tmp_path: Path) -> None:
    check([run(args, tmp_path / str(number)) for number, args in enumerate(ODD)])


def test_environment_variables(tmp_path: Path) -> None:
    variables = [{"VIT_FINETUNE_FIT__MODEL__LR": value} for value in ("x", "nan", "")]
    variables += [{"MASTER_PORT": "x"}, {"PL_GLOBAL_SEED": "x"}, {"WORLD_SIZE": "x"}, {"SLURM_NTASKS": "2"}]
    variables += [
        {"VIT_FINETUNE_FIT__CKPT_PATH": "nowhere"},
        {"VIT_FINETUNE_CONFIG": "nowhere"},
        {"HF_HOME": "/dev/null"},
    ]
    check([run(FIT, tmp_path / str(number), entry) for number, entry in enumerate(variables)])
