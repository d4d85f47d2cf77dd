"""Branches that only CUDA reaches, run on a CPU with the calls to the device replaced, and the list of all of them."""

import re
from pathlib import Path

import pytest
import torch

from tests.conftest import REPOSITORY
from vit_finetune import environment
from vit_finetune.benchmark.frameworks import compare
from vit_finetune.benchmark.frameworks.task import Task
from vit_finetune.callbacks import throughput
from vit_finetune.data.position import seed_generators
from vit_finetune.data.random_crop import crop_batch
from vit_finetune.data.shapes import Shapes
from vit_finetune.model import flops

GPU = torch.device("cuda", 0)
PACKAGE = REPOSITORY / "vit_finetune"
LIST = REPOSITORY / "tests" / "gpu" / "README.md"


class OnGPU(torch.Tensor):
    """A tensor of the CPU that claims to be on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """One NVIDIA H200 as far as questions about it go."""
    for name, answer in {
        "is_available": True,
        "device_count": 1,
        "get_device_name": "NVIDIA H200",
        "is_bf16_supported": True,
        "max_memory_allocated": 3_000_000_000,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)


def test_peak_memory(h200: None) -> None:
    assert throughput.peak_memory_gb(GPU) == 3.0


def test_peak_flops(h200: None) -> None:
    """989 TFLOP/s dense bfloat16, from NVIDIA's data sheet of the H200 SXM."""
    assert flops.peak_flops(GPU, "bf16-mixed") == 989e12


def test_hardware(h200: None) -> None:
    assert environment.has_native_bf16() is True
    assert environment.facts()["gpu"] == "NVIDIA H200, bf16: in hardware"


def test_pinned_memory(h200: None) -> None:
    data = Shapes(train_size=20)
    data.setup("fit")
    assert data.train_dataloader().pin_memory is True


def test_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator of the GPU gets the seed of the one of the CPU."""
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed", seeds.append)
    seed_generators(GPU, step=3, rank=1)
    assert seeds == [torch.initial_seed()]


def test_frameworks_choose_the_gpu(h200: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tasks: list[Task] = []
    monkeypatch.setattr(compare, "_take_turns", lambda frameworks, each, rounds: tasks.extend(each) or [])
    monkeypatch.setattr(compare, "write", lambda results, output: output.joinpath("results.md").write_text(""))
    compare.compare_frameworks(tmp_path)
    assert tasks and {task.device for task in tasks} == {"cuda"}


def test_random_crops_in_float16() -> None:
    """Products of float16 matrices differ by at most one step of 255 from those of float32, and by 0.1 on average."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (4, 3, 48, 48), dtype=torch.uint8, generator=generator)
    boxes = torch.tensor([[0, 0, 48, 48], [3, 5, 30, 22], [10, 1, 20, 40], [7, 7, 33, 33]])
    flipped = torch.tensor([False, True, False, True])
    expected = crop_batch(images, boxes, (32, 32), flipped).int()
    crops = crop_batch(images.as_subclass(OnGPU), boxes, (32, 32), flipped).as_subclass(torch.Tensor).int()
    difference = (crops - expected).abs()
    assert difference.max() <= 1 and difference.float().mean() < 0.1


def rows() -> list[tuple[str, ...]]:
    """Return the rows of the table: file, branch, tests on a CPU, tests on a GPU."""
    lines = [line for line in LIST.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]


def test_list_names_every_file_with_such_a_branch() -> None:
    pattern = r"torch\.cuda\.|else \"cpu\"|device\.type [!=]= \"c|\bon_cpu ="
    files = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if re.search(pattern, path.read_text())}
    assert {row[0].strip("`") for row in rows()} == files


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_list_names_tests_that_exist(row: tuple[str, ...]) -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", " ".join(row[2:]))
    assert named
    for file, test in named:
        assert f"def {test}(" in Path(REPOSITORY / "tests" / file).read_text(encoding="utf-8"), (file, test)
