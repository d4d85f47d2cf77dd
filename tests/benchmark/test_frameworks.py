"""Five frameworks, one fine-tune: equal losses, and a report of what was measured."""

import csv
import functools
import runpy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from vit_finetune.benchmark.frameworks import compare, tables
from vit_finetune.benchmark.frameworks.run import Measured, execute
from vit_finetune.benchmark.frameworks.runs_of_frameworks import Cost, Run, costs, largest_difference, lines_of_code
from vit_finetune.benchmark.frameworks.task import Task

STEPS = 36  # in two epochs, so that the order of the second counts too
# Largest difference of a loss to plain PyTorch. Seen: none in any precision.
TOLERANCE = {"32-true": 0.0, "bf16-mixed": 0.02, "16-mixed": 1e-3}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    shape = {"patch_size": 16, "embed_dim": 16, "depth": 2, "num_heads": 1}
    weights = tmp_path_factory.mktemp("weights") / "initial.safetensors"
    task = Task(str(weights), shape, steps=STEPS // 2, epochs=2, lr=1e-2)
    task.write_weights()
    return task


def trained(framework: str, task: Task, precision: Any) -> Measured:
    """Runs a framework; in float16 with a first scale that overflows, so that the scaler skips some steps."""
    start = torch.amp.GradScaler.__init__

    @functools.wraps(start)  # the command line reads the options from the signature, and remembers them
    def start_high(*args: Any, **kwargs: Any) -> None:
        start(*args, **{**kwargs, "init_scale": 2.0**24})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.amp.GradScaler, "__init__", start_high)
        return execute(framework, replace(task, precision=precision))


@pytest.fixture(scope="module")
def reference(task: Task) -> dict[str, Measured]:
    """What plain PyTorch gives in each precision."""
    return {precision: trained("plain", task, precision) for precision in TOLERANCE}


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps its settings for the life of a process; each test has others."""
    pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def check(framework: str, task: Task, precision: Any, reference: dict[str, Measured]) -> None:
    measured = trained(framework, task, precision)
    plain = reference[precision]
    assert len(measured.losses) == len(plain.losses) == STEPS
    assert largest_difference(measured.losses, plain.losses) <= TOLERANCE[precision]
    assert measured.accuracy == pytest.approx(plain.accuracy, abs=1e-6 if precision == "32-true" else 0.02)


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("framework", ["fabric", "ours"])
def test_losses_are_those_of_plain_pytorch(
    framework: str, precision: str, task: Task, reference: dict[str, Measured]
) -> None:
    check(framework, task, precision, reference)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_accelerate_too(precision: str, task: Task, reference: dict[str, Measured], fresh_accelerate: None) -> None:
    check("accelerate", task, precision, reference)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_hf_trainer_too(precision: str, task: Task, reference: dict[str, Measured], fresh_accelerate: None) -> None:
    pytest.importorskip("transformers")
    check("hf_trainer", task, precision, reference)


def test_losses_tell_precisions_and_seeds_apart(task: Task, reference: dict[str, Measured]) -> None:
    """Equality above means something: the losses move, and depend on what they should depend on."""
    plain = reference["32-true"].losses
    assert max(plain) - min(plain) > 0.1
    assert 0 < largest_difference(plain, reference["bf16-mixed"].losses) <= 0.05
    # The first steps are skipped. So is what they would have taught.
    assert largest_difference(plain[:1], reference["16-mixed"].losses[:1]) <= 1e-3
    assert largest_difference(plain, reference["16-mixed"].losses) > 0.02
    assert execute("plain", replace(task, seed=1)).losses[0] != plain[0]


def test_lines_of_code_are_neither_comments_nor_docstrings(tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    head = '"""Two\nlines."""\n\nimport os  # counts\n\n\n'
    code = head + 'def f(\n    a,\n):\n    """No."""\n    # no\n    return """x\ny"""\n'
    file.write_text(code)
    assert lines_of_code(file) == 6


def timed(framework: str, depth: str, number: int, milliseconds: float) -> Run:
    return Run(framework, depth, "32-true", number, Measured(windows=[milliseconds] * 10))


def test_cost_is_what_a_step_takes_beyond_plain() -> None:
    runs = [timed("plain", "1", 0, 1.0), timed("ours", "1", 0, 1.6), timed("plain", "1", 1, 2.0)]
    runs += [timed("ours", "1", 1, 2.5), Run("fabric", "1", "32-true", 0, reason="no")]
    assert costs(runs, "1", 0.1) == {
        "plain": Cost(1.0, 1.0, 2.0),
        "ours": Cost(*(pytest.approx(v) for v in (600, 500, 600))),
    }
    table = tables.cost_table(runs)
    assert "1.000 ms (1.000 to 2.000)" in table and "+600 µs (+500 to +600)" in table and "2 rounds" in table


def test_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """From given measurements, with one package missing."""

    def start(run: Run, task: Task, result: Path) -> Run:
        assert Path(task.weights).exists() and task.precision == run.precision
        last = 1.25 if (run.framework, run.precision) == ("fabric", "bf16-mixed") else 1.5
        losses = [2.0, last] if task.record else []
        return replace(run, measured=Measured(losses, 0.5, [1.0 + (run.framework == "fabric")], 0.75))

    monkeypatch.setattr(compare, "start", start)
    monkeypatch.setattr(compare, "find_spec", lambda name: None)
    out = tmp_path / "out"
    precisions = ["32-true", "bf16-mixed"]
    compare(out, frameworks=["fabric", "accelerate"], precisions=precisions, rounds=2, device="cpu")
    assert {path.name for path in out.iterdir()} == {
        "results.csv", "losses.csv", "results.md", "chart.png", "chart.svg"
    }  # fmt: skip
    text = (out / "results.md").read_text()
    assert text in capsys.readouterr().out
    missing = "accelerate not installed: pip install 'vit_finetune[benchmark]'"
    assert f"- HF Accelerate, 32-true: {missing}\n- HF Accelerate, bf16-mixed: {missing}\n" in text
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    lines = {row[0]: int(row[1]) for row in rows if row[1].isdigit()}
    assert lines.keys() == {"Plain PyTorch", "Lightning Fabric"} and 20 < lines["Lightning Fabric"] < 60
    assert [row[2:] for row in rows if row[0] == "Lightning Fabric" and row[1].isdigit()] == [
        ["32-true", "0, bit for bit", "1.500000", "50.0%", "0.75 GB"],
        ["bf16-mixed", "at most 2.5e-01", "1.250000", "50.0%", "0.75 GB"],
    ]
    assert ["Lightning Fabric", *["+1000 µs (+1000 to +1000)"] * 4] in rows
    assert ["Plain PyTorch", *["1.000 ms (1.000 to 1.000)"] * 4] in rows
    with (out / "results.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row["framework"] for row in table] == ["plain", "fabric", "accelerate"] * 6
    assert all((row["ms_a_step_median"] == "") == (row["framework"] == "accelerate") for row in table)
    with (out / "losses.csv").open() as file:
        losses = [(row["framework"], row["step"], row["loss"]) for row in csv.DictReader(file)]
    assert losses == [(name, step, loss) for last in ("1.5", "1.25") for name in ("plain", "fabric")
                      for step, loss in (("0", "2.0"), ("1", last if name == "fabric" else "1.5"))]  # fmt: skip
    assert (out / "chart.png").read_bytes().startswith(b"\x89PNG") and "<svg" in (out / "chart.svg").read_text()


def test_says_what_this_machine_cannot_do(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "find_spec", lambda name: name if name == "accelerate" else None)
    half = replace(task, precision="16-mixed")
    assert "float16 on a CPU" in compare.why_not("accelerate", half)
    assert compare.why_not("accelerate", replace(half, device="cuda")) == ""
    assert compare.why_not("ours", half) == ""
    assert compare.why_not("hf_trainer", task) == "transformers not installed: pip install 'vit_finetune[benchmark]'"


def test_keeps_what_is_there_and_refuses_too_few_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(MisconfigurationException, match="--steps 10 --rounds 1: at least 151"):
        compare(tmp_path / "out", rounds=1, steps=10)
    assert not (tmp_path / "out").exists()
    (tmp_path / "note").touch()
    monkeypatch.setattr("sys.argv", ["frameworks", "--output", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("vit_finetune.benchmark.frameworks", run_name="__main__")
    assert stop.value.code == 2 and "is not empty" in capsys.readouterr().err


@pytest.mark.slow
def test_each_run_has_a_process_of_its_own(task: Task, tmp_path: Path) -> None:
    """A failure is a line in the report, and the others go on."""
    right = compare.start(Run("ours", "learning", "32-true", 0), task, tmp_path / "result.json")
    assert right.measured is not None and len(right.measured.losses) == STEPS
    wrong = compare.start(Run("ours", "learning", "32-true", 0), replace(task, weights="no"), tmp_path / "result.json")
    assert wrong.measured is None and wrong.reason.startswith("exit code 2: error: --model.weights no")


@pytest.mark.parametrize("broken", [["plain", "ours"], ["ours"]])
def test_a_failure_is_reported_and_shows_in_the_exit_code(
    broken: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(run: Run, task: Task, result: Path) -> Run:
        if run.framework in broken:
            return replace(run, reason=f"{compare.FAILED} 1: out of luck")
        return replace(run, measured=Measured([2.0] if task.record else [], 0.5, [1.0]))

    monkeypatch.setattr(compare, "start", start)
    with pytest.raises(SystemExit) as stop:
        compare(tmp_path / "out", frameworks=["ours"], precisions=["32-true"], rounds=1)
    assert stop.value.code == 1
    assert "- vit_finetune fit, 32-true: exit code 1: out of luck" in (tmp_path / "out" / "results.md").read_text()
