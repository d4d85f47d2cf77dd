"""One fine-tuning task in six frameworks: equal losses, and a report of the measured values."""

import csv
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from vit_finetune.benchmark.charts import Bar
from vit_finetune.benchmark.frameworks import compare
from vit_finetune.benchmark.frameworks.compare import compare_frameworks, largest_difference, overheads
from vit_finetune.benchmark.frameworks.task import FAILED, Result, Task, execute, run_process

STEPS = 36  # in two epochs, so that the order of the second is tested too
# Largest difference of a loss to plain PyTorch. Observed: none in any precision.
TOLERANCE = {"32-true": 0.0, "bf16-mixed": 0.02, "16-mixed": 1e-3}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    shape = {"patch_size": 16, "embed_dim": 16, "depth": 2, "num_heads": 1}
    weights = tmp_path_factory.mktemp("weights") / "initial.safetensors"
    task = Task("learning", shape, steps=STEPS // 2, epochs=2, lr=1e-2, weights=str(weights))
    task.write_weights()
    return task


def trained(framework: str, task: Task, precision: Any) -> Result:
    """Run a framework; in float16 with an initial loss scale that overflows, so that the scaler skips some steps."""
    start = torch.amp.GradScaler.__init__

    @functools.wraps(start)  # the command line reads the options from the signature, and caches them
    def start_high(*args: Any, **kwargs: Any) -> None:
        start(*args, **{**kwargs, "init_scale": 2.0**24})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.amp.GradScaler, "__init__", start_high)
        return execute(framework, replace(task, precision=precision))


@pytest.fixture(scope="module")
def reference(task: Task) -> dict[str, Result]:
    """Result of plain PyTorch in each precision."""
    return {precision: trained("plain", task, precision) for precision in TOLERANCE}


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps its settings for the life of a process; each test has others."""
    pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState, GradientState

    yield
    # There is no public way to reset them; Accelerate's own tests use these methods.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def check(framework: str, task: Task, precision: Any, reference: dict[str, Result]) -> None:
    result = trained(framework, task, precision)
    plain = reference[precision]
    assert len(result.losses) == len(plain.losses) == STEPS
    assert largest_difference(result.losses, plain.losses) <= TOLERANCE[precision]
    assert result.accuracy == pytest.approx(plain.accuracy, abs=1e-6 if precision == "32-true" else 0.02)


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("framework", ["fabric", "lightning_trainer", "this_project"])
def test_losses_equal_plain_pytorch(framework: str, precision: str, task: Task, reference: dict[str, Result]) -> None:
    check(framework, task, precision, reference)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_losses_of_accelerate(precision: str, task: Task, reference: dict[str, Result], fresh_accelerate: None) -> None:
    check("accelerate", task, precision, reference)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_losses_of_hf_trainer(precision: str, task: Task, reference: dict[str, Result], fresh_accelerate: None) -> None:
    pytest.importorskip("transformers")
    check("hf_trainer", task, precision, reference)


def test_losses_depend_on_precision_and_seed(task: Task, reference: dict[str, Result]) -> None:
    """The equality above is meaningful: losses change, and depend on precision and seed."""
    plain = reference["32-true"].losses
    assert max(plain) - min(plain) > 0.1
    assert 0 < largest_difference(plain, reference["bf16-mixed"].losses) <= 0.05
    # The scaler skips the first steps, so the weights and the losses differ from then on.
    assert largest_difference(plain[:1], reference["16-mixed"].losses[:1]) <= 1e-3
    assert largest_difference(plain, reference["16-mixed"].losses) > 0.02
    assert execute("plain", replace(task, seed=1)).losses[0] != plain[0]


def test_overhead_is_the_time_over_plain_pytorch() -> None:
    task = Task("1 block", record=False)

    def timed(framework: str, number: int, milliseconds: float) -> Result:
        return Result(framework, task, number, windows=[milliseconds] * 10)

    results = [timed("plain", 0, 1.0), timed("this_project", 0, 1.6), timed("plain", 1, 2.0)]
    results += [timed("this_project", 1, 2.5), Result("fabric", task, reason="no")]
    assert overheads(results, "1 block", 0.1) == {
        "plain": Bar(1.0, 1.0, 2.0),
        "this_project": Bar(*(pytest.approx(v) for v in (600, 500, 600))),
    }
    table = compare.overhead_table(results)
    assert "1.000 ms (1.000 to 2.000)" in table and "+600 µs (+500 to +600)" in table and "2 rounds" in table


def measured(choose: Callable[[Result], dict[str, Any]]) -> Callable[[Result, Path], Result]:
    """Stand in for a process: return given values."""

    def start(result: Result, path: Path) -> Result:
        assert Path(result.task.weights).exists()
        return replace(result, **choose(result))

    return start


def test_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The report of given measurements, with one package missing."""

    def choose(result: Result) -> dict[str, Any]:
        last = 1.25 if (result.framework, result.task.precision) == ("fabric", "bf16-mixed") else 1.5
        losses = [2.0, last] if result.task.record else [0.1]  # the frameworks record them in any case
        windows = [1.0 + (result.framework == "fabric")]
        return {"losses": losses, "accuracy": 0.5, "windows": windows, "peak_memory_gb": 0.75}

    monkeypatch.setattr(compare, "run_process", measured(choose))
    monkeypatch.setattr(compare, "find_spec", lambda name: None)
    out = tmp_path / "out"
    precisions: Any = ["32-true", "bf16-mixed"]
    assert compare_frameworks(out, ["fabric", "accelerate"], precisions, rounds=2, device="cpu") == 0
    assert {path.name for path in out.iterdir()} == {"results.csv", "results.md", "chart.png", "chart.svg"}
    text = (out / "results.md").read_text()
    assert text in capsys.readouterr().out
    missing = "accelerate not installed: pip install 'vit_finetune[benchmark]'"
    assert f"- HF Accelerate, 32-true: {missing}\n- HF Accelerate, bf16-mixed: {missing}\n" in text
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    assert [row[1:] for row in rows if row[0] == "Lightning Fabric"] == [
        ["32-true", "0, bit for bit", "1.500000", "50.0%", "0.75 GB"],
        ["bf16-mixed", "at most 2.5e-01", "1.250000", "50.0%", "0.75 GB"],
        ["+1000 µs (+1000 to +1000)"] * 4,
    ]
    assert ["Plain PyTorch", *["1.000 ms (1.000 to 1.000)"] * 4] in rows
    with (out / "results.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row["framework"] for row in table] == ["plain", "fabric", "accelerate"] * 6
    assert all((row["ms_per_step_median"] == "") == (row["framework"] == "accelerate") for row in table)
    assert [row["last_loss"] for row in table][:6] == ["1.5", "1.5", "", "1.5", "1.25", ""]
    svg = (out / "chart.svg").read_text()
    assert (out / "chart.png").read_bytes().startswith(b"\x89PNG") and "<!-- 12 blocks, µs -->" in svg
    assert "<!-- Lightning Fabric -->" in svg and "<!-- HF Accelerate -->" not in svg


def test_unavailable_reason(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "find_spec", lambda name: name if name == "accelerate" else None)
    half = replace(task, precision="16-mixed")
    assert "float16 on a CPU" in compare.unavailable_reason("accelerate", half)
    assert compare.unavailable_reason("accelerate", replace(half, device="cuda")) == ""
    assert compare.unavailable_reason("this_project", half) == ""
    reason = "transformers not installed: pip install 'vit_finetune[benchmark]'"
    assert compare.unavailable_reason("hf_trainer", task) == reason


def test_existing_files_are_kept_and_too_few_steps_rejected(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match="steps is 10; expected at least 151"):
        compare_frameworks(tmp_path / "out", rounds=1, steps=10)
    assert not (tmp_path / "out").exists()
    (tmp_path / "note").touch()
    with pytest.raises(MisconfigurationException, match="is not empty"):
        compare_frameworks(tmp_path)


@pytest.mark.slow
def test_each_run_has_its_own_process(task: Task, tmp_path: Path) -> None:
    """A failure becomes the reason of a result, and other runs continue."""
    right = run_process(Result("this_project", task), tmp_path / "result.json")
    assert not right.reason and len(right.losses) == STEPS and right.peak_memory_gb > 0
    wrong = run_process(Result("this_project", replace(task, weights="no")), tmp_path / "result.json")
    assert not wrong.losses and wrong.reason.startswith("exit code 2: error: --model.weights no")


@pytest.mark.parametrize("broken", [["plain", "this_project"], ["this_project"]])
def test_failure_is_reported_and_counted(broken: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(result: Result) -> dict[str, Any]:
        if result.framework in broken:
            return {"reason": f"{FAILED} 1: out of luck"}
        return {"losses": [2.0] if result.task.record else [], "accuracy": 0.5, "windows": [1.0]}

    monkeypatch.setattr(compare, "run_process", measured(choose))
    out = tmp_path / "out"
    failed = compare_frameworks(out, ["this_project"], ["32-true"], rounds=1)
    assert failed == 3 * len(broken)
    assert "- vit_finetune fit, 32-true: exit code 1: out of luck" in (out / "results.md").read_text()
