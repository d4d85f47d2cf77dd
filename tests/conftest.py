"""Generated images in the true layouts, a tiny model, and the real command line in process."""

import hashlib
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torchvision import datasets

from vit_finetune import main
from vit_finetune.evaluation.runs import read_scalars

# The networks of the tests are too small for more: on a busy machine threads mostly wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for processes that tests start
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

LIMIT = 180  # seconds after which a process counts as hanging
REPOSITORY = Path(__file__).parent.parent
TINY_KWARGS = {"patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
TINY_MODEL = [
    "--model.name=vit_tiny_patch16_224",
    "--model.pretrained=false",
    "--model.img_size=32",
    f"--model.timm_kwargs={TINY_KWARGS}",
]
CPU = ["--trainer.accelerator=cpu", "--trainer.devices=1"]
TINY = [*TINY_MODEL, *CPU, "--trainer.max_epochs=1", "--data.batch_size=4"]


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test works in its own folder, without network, and leaves no seed behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr("sys.argv", ["vit-finetune"])
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):  # so that caplog sees them
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    yield
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must be refused; returns the one message, its first line starting with ``error:``."""

    def run(*args: str) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main(list(args))
        assert stop.value.code == 2
        text = capsys.readouterr().err
        assert text.count("error: ") == 1 and "Traceback" not in text
        return text[text.index("error: ") :]

    return run


def noise_image(channel: int, generator: np.random.Generator, side: int = 40) -> Image.Image:
    """Noise with one bright channel: red, green and blue are the classes a, b and c."""
    pixels = generator.integers(0, 60, (side, side, 3), dtype=np.uint8)
    pixels[..., channel] += 150
    return Image.fromarray(pixels)


def make_tree(root: Path, counts: dict[str, int], side: int = 40, seed: int = 0) -> Path:
    """Writes ``root/<split>/{a,b,c}/NN.png`` with that many images a class; the split ``""`` is the root itself."""
    generator = np.random.default_rng(seed)
    for split, count in counts.items():
        for channel, name in enumerate("abc"):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                noise_image(channel, generator, side).save(folder / f"{number:02d}.png")
    return root


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """18 training, 9 validation and 9 test images, 40 by 40 pixels, three classes."""
    return make_tree(tmp_path / "images", {"train": 6, "val": 3, "test": 3})


@pytest.fixture
def folder_args(tree: Path) -> list[str]:
    """Options that train the tiny model on that tree for one epoch of five batches."""
    return [*TINY, "--data=ImageFolder", f"--data.root={tree}"]


@pytest.fixture
def cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """CIFAR-10's own files with 100 training and 20 test images, and checksums to match."""
    root = tmp_path / "cifar"
    base = root / "cifar-10-batches-py"
    base.mkdir(parents=True)
    generator = np.random.default_rng(0)
    sums = {}
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        entry: dict[str, Any] = {
            "data": generator.integers(0, 256, (20, 3072), dtype=np.uint8),
            "labels": [i % 10 for i in range(20)],
        }
        sums[name] = _write(base / name, entry)
    meta = _write(base / "batches.meta", {"label_names": list("abcdefghij")})
    monkeypatch.setattr(datasets.CIFAR10, "train_list", [[n, s] for n, s in sums.items() if n != "test_batch"])
    monkeypatch.setattr(datasets.CIFAR10, "test_list", [["test_batch", sums["test_batch"]]])
    monkeypatch.setattr(datasets.CIFAR10, "meta", {"filename": "batches.meta", "key": "label_names", "md5": meta})
    return root


@pytest.fixture
def cifar100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """CIFAR-100's own files with 1000 training and 20 test images, and checksums to match."""
    base = tmp_path / "cifar" / "cifar-100-python"
    base.mkdir(parents=True)
    generator = np.random.default_rng(0)
    sums = {}
    for name, count in (("train", 1000), ("test", 20)):
        pixels = generator.integers(0, 256, (count, 3072), dtype=np.uint8)
        sums[name] = _write(base / name, {"data": pixels, "fine_labels": [i % 100 for i in range(count)]})
    meta = _write(base / "meta", {"fine_label_names": [f"class{i}" for i in range(100)]})
    monkeypatch.setattr(datasets.CIFAR100, "train_list", [["train", sums["train"]]])
    monkeypatch.setattr(datasets.CIFAR100, "test_list", [["test", sums["test"]]])
    monkeypatch.setattr(datasets.CIFAR100, "meta", {"filename": "meta", "key": "fine_label_names", "md5": meta})
    return base.parent


def _write(path: Path, entry: dict[str, Any]) -> str:
    content = pickle.dumps(entry)
    path.write_bytes(content)
    return hashlib.md5(content).hexdigest()


def run_command(*args: str, folder: Path) -> str:
    """Run ``python -m vit_finetune`` in a process of its own; return its output."""
    distributed = ("PL_", "MASTER_", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "GROUP_RANK")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(distributed)}
    environment |= {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "vit_finetune", *args],
        cwd=folder,
        env=environment,
        timeout=LIMIT,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def only(folder: Path, pattern: str) -> Path:
    """The one file that matches."""
    found = sorted(folder.rglob(pattern))
    assert len(found) == 1, found
    return found[0]


def scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag to (step, value) pairs of the one run at or below a folder; a resumed run has two event files."""
    (folder,) = {file.parent for file in run.rglob("events.out.tfevents.*")}
    return {tag: [(point.step, point.value) for point in points] for tag, points in read_scalars(folder).items()}


def read_events(path: Path) -> EventAccumulator:
    """Read every scalar, image and tensor of an event file, or of the event files in a folder."""
    events = EventAccumulator(str(path), {"scalars": 0, "images": 0, "tensors": 0})
    events.Reload()
    return events


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The state dict of a checkpoint."""
    state: dict[str, torch.Tensor] = torch.load(checkpoint, weights_only=True)["state_dict"]
    return state


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Whether two state dicts are equal to the last bit."""
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)
