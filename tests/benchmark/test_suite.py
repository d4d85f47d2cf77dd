"""Suites: their files, the order of their runs, resuming after an interruption, and the report."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.utils.tensorboard import SummaryWriter

from tests.conftest import CPU, REPOSITORY, TINY_KWARGS, read_events
from vit_finetune import main
from vit_finetune.benchmark import runner, summary
from vit_finetune.benchmark.records import Result, load, store
from vit_finetune.benchmark.suite import Variant, read, schedule
from vit_finetune.formatting import median_range

SUITES = sorted((REPOSITORY / "configs" / "benchmark").glob("*.yaml"))
TWO_VARIANTS = """
repeats: 2
options: {data: Shapes, model.pretrained: false}
variants:
  - name: slow
    options: {trainer.precision: 32-true}
  - {name: quick one, extends: slow, options: {trainer.precision: bf16-mixed}}
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "two.yaml"
    path.write_text(TWO_VARIANTS)
    return path


class FakeMachine:
    """Stand in for processes: take no time, record the commands, and write the files of a run.

    Args:
        endings: Results of the first commands: an exit code with an output, or ``None`` for an interruption.
    """

    def __init__(self, *endings: tuple[int, str] | None) -> None:
        self.endings = list(endings)
        self.commands: list[list[str]] = []

    def __call__(self, args: list[str], log: Path) -> runner.Outcome:
        self.commands.append(args)
        ending = self.endings.pop(0) if self.endings else (0, "")
        if ending is None:
            raise KeyboardInterrupt
        code, text = ending
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(text)
        options = _options(args)
        if args[0] == "fit" and code == 0:
            folder = Path(options["trainer.default_root_dir"]) / options["experiment"] / "version_0"
            with SummaryWriter(str(folder)) as writer:
                for step, speed in enumerate([10, 100, 120]):
                    writer.add_scalar("train/images_per_second", speed, step)
            (folder / "checkpoints").mkdir()
            (folder / "checkpoints" / "best-epoch00-acc0.5000.ckpt").touch()
        return runner.Outcome(code, 2.5, 4.0)

    @property
    def fits(self) -> list[str]:
        """Variant, seed and repeat of each training, in order."""
        trained = [_options(args) for args in self.commands if args[0] == "fit"]
        return [f"{Path(o['trainer.default_root_dir']).name} {o['experiment']}" for o in trained]


def _options(args: list[str]) -> dict[str, str]:
    return dict(arg[2:].split("=", 1) for arg in args[1:])


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem != "quick" else []) for path in SUITES],
)
def test_project_suite_is_valid(path: Path) -> None:
    """Every variant's options are options of fit, and every variant differs from the one it is compared with."""
    options = {variant.name: runner.resolve(variant) for variant in read(path)}
    for variant in read(path)[1:]:
        assert summary.changes(options[variant.compared_with or ""], options[variant.name]), variant.name


def test_variant_overrides_the_one_it_extends(tmp_path: Path) -> None:
    """Its overlays override options of that variant, too; paths are relative to the suite file."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "overlay.yaml").write_text("trainer: {devices: 2}\n")
    text = "options: {trainer.devices: 1, model.lr: 0.5}\nvariants:\n  - {name: a, epochs: 7}\n"
    text += "  - {name: b, extends: a, config: [overlay.yaml], seeds: [1, 2]}\n  - {name: c}"
    (tmp_path / "sub" / "suite.yaml").write_text(text)
    a, b, c = read(tmp_path / "sub" / "suite.yaml")
    assert a.args == ("--trainer.devices=1", "--model.lr=0.5", "--trainer.max_epochs=7")
    assert b == Variant("b", (*a.args, "--config=sub/overlay.yaml"), seeds=(1, 2), compared_with="a")
    assert c == Variant("c", a.args[:2], compared_with="b")
    trainer = runner.resolve(b)["trainer"]
    assert (trainer["devices"], trainer["max_epochs"]) == (2, 7)


def test_variants_take_turns() -> None:
    """Each variant runs once per round."""
    variants = [Variant("a", repeats=2, seeds=(3, 4)), Variant("b", repeats=2, seeds=(3,)), Variant("c")]
    order = [(run.variant.name, run.seed, run.repeat) for run in schedule(variants)]
    assert order == [("a", 3, 0), ("b", 3, 0), ("c", 0, 0), ("a", 4, 0), ("a", 3, 1), ("b", 3, 1), ("a", 4, 1)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("variants: [{name: a, option: {}}]", "variant 1: unrecognized key 'option'. Allowed: .* Did you mean options"),
        ("variant: []", "unrecognized key 'variant'.*Did you mean variants"),
        ("repeats: 2", "has no variants; expected a list of variants"),
        ("repeats: two\nvariants: [{name: a}]", "repeats is 'two'; expected int"),
        ("repeats: 0\nvariants: [{name: a}]", "repeats is 0; expected at least 1"),
        ("seeds: [x]\nvariants: [{name: a}]", r"seeds is \['x'\]; expected a non-empty list of int"),
        ("variants: [{name: a}, {name: a}]", "variant 2: name is 'a'; expected a unique, non-empty name"),
        ("variants: [{name: a}, {name: b, extends: c}]", "variant 2: extends is 'c'; expected an earlier variant: a"),
        ("variants: [{name: a, config: [no.yaml]}]", "variant 1: config no.yaml does not exist"),
        ("variants: [{name: a, options: {model.lrr: 1}}]", "variant 'a': .*--model.lrr.*--model.lr"),
        ("variants: [a", "is not valid YAML"),
        ("just text", "'just text' is not a mapping; expected the keys .*variants"),
    ],
)
def test_mistake_in_a_suite_is_reported_on_one_line(text: str, message: str, fails: Callable[..., str]) -> None:
    Path("wrong.yaml").write_text(text)
    line = fails("benchmark", "--suite=wrong.yaml")
    assert re.search(message, line), line
    assert line.count("\n") == 1 and not Path("runs").exists()


def test_mistakes_on_the_command_line(fails: Callable[..., str]) -> None:
    assert "benchmark needs either --suite FILE" in fails("benchmark")
    assert "--suite no.yaml does not exist" in fails("benchmark", "--suite=no.yaml")
    assert re.search("--suites.*--suite", fails("benchmark", "--suites=no.yaml"))


def test_folder_with_other_files_is_rejected(suite: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    (tmp_path / "thesis" / "summary").mkdir(parents=True)
    note = tmp_path / "thesis" / "summary" / "note.txt"
    note.write_text("mine")
    message = fails("benchmark", f"--suite={suite}", f"--output={tmp_path / 'thesis'}")
    assert "is not empty and holds no results of a suite" in message and note.read_text() == "mine"
    assert "needs either --suite" in fails("benchmark", f"--suite={suite}", "--frameworks")


def test_resumes_after_an_interruption_of_the_first_run(suite: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        runner.run(suite, tmp_path / "out", FakeMachine(None))
    assert runner.run(suite, tmp_path / "out", FakeMachine()) == 0


def test_help_lists_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    for args, expected in ((["--help"], "benchmark"), (["benchmark", "--help"], "--frameworks")):
        with pytest.raises(SystemExit) as stop:
            main(args)
        assert stop.value.code == 0
        assert expected in capsys.readouterr().out


def test_resumes_where_it_was_interrupted(suite: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    """After an interruption in the third of four runs, two are kept and reported; the next call does only the rest."""
    out = tmp_path / "out"
    first = FakeMachine((0, ""), (0, ""), (0, ""), (0, ""), None)
    with pytest.raises(KeyboardInterrupt):
        runner.run(suite, out, first)
    assert first.fits == ["slow seed0-repeat0", "quick-one seed0-repeat0", "slow seed0-repeat1"]
    assert [result.key for result in load(out / "results.csv")] == [("slow", 0, 0), ("quick one", 0, 0)]
    assert (out / "results.md").exists()

    second = FakeMachine()
    assert runner.run(suite, out, second) == 0
    assert second.fits == ["slow seed0-repeat1", "quick-one seed0-repeat1"]
    assert [args[0] for args in second.commands] == ["fit", "test"] * 2
    results = load(out / "results.csv")
    assert [result.key for result in results] == [(name, 0, r) for r in (0, 1) for name in ("slow", "quick one")]
    for result in results:
        assert (result.status, result.seconds, result.images_per_second) == ("done", 2.5, 110)
        assert result.machine and "torch" in result.versions and result.commit and result.date

    suite.write_text(TWO_VARIANTS.replace("bf16-mixed", "bf16-true"))
    assert "results of variant 'quick one' with other options" in fails(
        "benchmark", f"--suite={suite}", f"--output={out}"
    )


def test_skipped_runs_are_listed_with_the_reason(suite: Path, tmp_path: Path) -> None:
    """Exit code 2 means not possible here, and is not repeated in the same call; any other code is a failure."""
    out = tmp_path / "out"
    machine = FakeMachine(
        (2, "some words\nerror: 2 things:\n  1. no GPU\n  2. no hub\n"), (1, "Traceback\nValueError: x\n")
    )
    assert runner.run(suite, out, machine) == 1
    assert machine.fits == ["slow seed0-repeat0", "quick-one seed0-repeat0", "quick-one seed0-repeat1"]
    outcomes = [(r.variant, r.repeat, r.status, r.reason) for r in load(out / "results.csv")]
    reason = "2 things: 1. no GPU 2. no hub"
    assert outcomes == [
        ("slow", 0, "skipped", reason),
        ("quick one", 0, "failed", "ValueError: x"),
        ("slow", 1, "skipped", reason),
        ("quick one", 1, "done", ""),
    ]
    text = (out / "results.md").read_text()
    assert f"| slow | skipped | {reason} |" in text and "| quick one | failed | ValueError: x |" in text
    assert "| quick one | slow | `trainer.precision: 32-true → bf16-mixed` | not run |" in text

    again = FakeMachine()
    assert runner.run(suite, out, again) == 0
    assert again.fits == ["slow seed0-repeat0", "quick-one seed0-repeat0", "slow seed0-repeat1"]


def test_weights_of_an_earlier_variant(suite: Path, tmp_path: Path) -> None:
    """They come from its best checkpoint; if it did not run, the variant that needs it is skipped."""
    text = TWO_VARIANTS.replace("repeats: 2", "repeats: 1")
    suite.write_text(text + "  - {name: x, weights_from: slow}\n  - {name: y, weights_from: quick one}\n")
    machine = FakeMachine((0, ""), (0, ""), (2, "error: no\n"))
    runner.run(suite, tmp_path / "out", machine)
    best = "runs/slow/seed0-repeat0/version_0/checkpoints/best-epoch00-acc0.5000.ckpt"
    assert Path(_options(machine.commands[3])["model.weights"]).resolve() == tmp_path / "out" / best
    results = load(tmp_path / "out" / "results.csv")
    assert [result.status for result in results] == ["done", "skipped", "done", "skipped"]
    assert results[3].reason == "weights are missing: variant 'quick one'"


SYNTHETIC = [
    Result(
        "a",
        0,
        0,
        "done",
        seconds=10.0,
        cpu_seconds=19.0,
        train_seconds=8.0,
        images_per_second=100,
        peak_memory_gb=2.0,
        test_acc=0.90,
    ),
    Result(
        "a", 1, 0, "done", seconds=14.0, train_seconds=10.0, images_per_second=80, peak_memory_gb=2.0, test_acc=0.92
    ),
    Result("b", 0, 0, "done", seconds=6.0, train_seconds=3.0, images_per_second=270, peak_memory_gb=1.0, test_acc=0.90),
    Result("c", 0, 0, "skipped", reason="no GPU | none"),
]
OPTIONS = {
    "a": {"trainer": {"precision": None, "devices": 1}, "model": {"timm_kwargs": {"depth": 2}}},
    "b": {"trainer": {"precision": "bf16-mixed", "devices": 1}, "model": {"timm_kwargs": {"depth": 2}}},
    "c": {"trainer": {"precision": "bf16-mixed", "devices": 4}, "model": {"timm_kwargs": None}},
}
VARIANTS = [Variant("a"), Variant("b", compared_with="a"), Variant("c", compared_with="b")]


def test_tables_are_exact() -> None:
    lines = summary.markdown("test", VARIANTS, OPTIONS, SYNTHETIC).splitlines()
    assert [line for line in lines if line.startswith("|")] == [
        "| Variant | Runs | Process, s | Speedup | CPU time, s | Training, s | Images/s | Peak memory, GB | "
        "Test accuracy, % |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| a | 2 | 12.0 (10.0 to 14.0) | 1.00 x | 19.0 | 9.0 (8.0 to 10.0) | 90 (80 to 100) | 2.000 (2.000 to 2.000) | "
        "91.0 (90.0 to 92.0) |",
        "| b | 1 | 6.0 | 2.00 x |  | 3.0 | 270 | 1.000 | 90.0 |",
        "| Variant | Compared with | Changes | Delta |",
        "| --- | --- | --- | --- |",
        "| b | a | `trainer.precision: null → bf16-mixed` | training time x 0.33, images/s x 3.00, memory x 0.50, "
        "test accuracy -1.0 points |",
        "| c | b | `trainer.devices: 1 → 4`<br>`model.timm_kwargs.depth: 2 → null` | not run |",
        "| Variant | Status | Reason |",
        "| --- | --- | --- |",
        "| c | skipped | no GPU \\| none |",
    ]


def test_report_files(tmp_path: Path) -> None:
    """Charts name every variant that ran; TensorBoard has the table, the chart and a curve for each variant."""
    summary.write(tmp_path, "test", VARIANTS, OPTIONS, SYNTHETIC)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.md", "results.png", "results.svg", "summary"]
    svg = (tmp_path / "results.svg").read_text()
    assert "<!-- Peak memory, GB -->" in svg and "<!-- b -->" in svg and "<!-- c -->" not in svg
    events = read_events(tmp_path / "summary")
    events.Reload()
    assert events.Tags()["images"] == ["suite/chart"] and events.Tags()["tensors"] == ["suite/table/text_summary"]
    curve = read_events(tmp_path / "summary" / "a")
    curve.Reload()
    assert [event.value for event in curve.Scalars("suite/seconds")] == [10, 14]
    summary.write(tmp_path, "test", VARIANTS, OPTIONS, SYNTHETIC)  # replaces the first
    assert len(list((tmp_path / "summary").glob("events*"))) == 1


def test_results_are_stored_and_loaded(tmp_path: Path) -> None:
    store(tmp_path / "results.csv", SYNTHETIC)
    assert load(tmp_path / "results.csv") == SYNTHETIC
    (tmp_path / "results.csv").write_text("other,columns\n")
    with pytest.raises(Exception, match="has other columns"):
        load(tmp_path / "results.csv")


@pytest.mark.slow
def test_suite_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Two variants of the tiny model in real processes; a variant for 99 GPUs is skipped with the reason."""
    options: dict[str, Any] = {**_options(["", *CPU])}
    options |= {"data": "Shapes", "data.train_size": 100, "data.test_size": 20, "model.name": "vit_tiny_patch16_224"}
    options |= {"model.pretrained": False, "model.img_size": 32, "model.timm_kwargs": TINY_KWARGS}
    variants = [
        {"name": "one", "options": {"trainer.precision": "32-true"}},
        {"name": "tuned", "extends": "one", "weights_from": "one", "options": {"trainer.precision": "bf16-mixed"}},
        {"name": "gpus", "extends": "one", "options": {"trainer.accelerator": "gpu", "trainer.devices": 99}},
    ]
    (tmp_path / "small.yaml").write_text(yaml.safe_dump({"epochs": 1, "options": options, "variants": variants}))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    main(["benchmark", "--suite=small.yaml"])
    folder = tmp_path / "runs" / "benchmark" / "small"
    one, tuned, gpus = load(folder / "results.csv")
    assert gpus.status == "skipped" and "gpu" in gpus.reason.lower() and gpus.reason in capfd.readouterr().out
    for result in (one, tuned):
        assert result.status == "done"
        assert result.cpu_seconds > 1 and result.trainable_parameters == 1000
        assert result.seconds > result.train_seconds > result.first_step_seconds > 0  # type: ignore[operator]
        assert result.images_per_second > 0 and 0 < result.data_time_fraction < 1 and result.mfu is None  # type: ignore[operator]
        assert 0 < result.forecast_gb < result.peak_memory_gb  # type: ignore[operator]
        assert 0 <= result.test_acc <= 1 and result.val_acc is not None  # type: ignore[operator]
    assert "head loaded" in (folder / "logs" / "tuned-seed0-repeat0.txt").read_text()


def test_median_range() -> None:
    assert median_range([3.0, 1.0, 2.26], 1) == "2.3 (1.0 to 3.0)"
    assert median_range([10, 20]) == "15 (10 to 20)"
