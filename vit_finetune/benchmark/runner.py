"""Runs a suite: each run a process of its own through the real command line, and goes on where it was stopped."""

import contextlib
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException

from vit_finetune.benchmark import summary
from vit_finetune.benchmark.records import Result, load, origin, read_run, store
from vit_finetune.benchmark.suite import Run, Variant, read, schedule

DATE = "%Y-%m-%d %H:%M:%S"
REFUSED = 2  # exit code of a command that says in a line why it cannot work


class Outcome(NamedTuple):
    """How a process ended."""

    code: int
    seconds: float


Start = Callable[[list[str], Path], Outcome]
"""Runs ``python -m vit_finetune`` with these words, its output going into this file."""


def run_process(words: list[str], log: Path) -> Outcome:
    """Runs a command in a process; one that is under way is ended when this one is interrupted."""
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with log.open("a", encoding="utf-8") as file:
        command = [sys.executable, "-m", "vit_finetune", *words]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
    return Outcome(code, time.perf_counter() - start)


def run(path: Path, output: Path, start: Start = run_process) -> int:
    """Runs what is missing of a suite and writes the report.

    Args:
        path: The suite file.
        output: Folder of the results; with those of an earlier, interrupted call the suite goes on.
        start: Runs a command.

    Returns:
        How many runs failed; those that this machine cannot do are not counted.

    Raises:
        MisconfigurationException: The suite has a mistake, or the folder holds something else.
    """
    variants = read(path)
    options = {variant.name: resolve(variant) for variant in variants}
    # What was skipped or failed is tried again: a device or a compiler may be there by now.
    table = output / "results.csv"
    if not table.exists():
        _refuse_foreign_folder(output)
        store(table, [])  # from now on the folder is a suite's
    results = {result.key: result for result in load(table) if result.status == "done"}
    _refuse_other_options(results, options, output)
    runs = list(schedule(variants))
    where = origin()
    try:
        for number, one in enumerate(runs, 1):
            key = (one.variant.name, one.seed, one.repeat)
            if key in results:
                continue
            print(
                f"{number}/{len(runs)}  {one.variant.name}  seed {one.seed}, repeat {one.repeat}", end="  ", flush=True
            )
            begun = Result(*key, options=_fingerprint(options[one.variant.name]), date=time.strftime(DATE), **where)
            results[key] = _execute(one, begun, options[one.variant.name], list(results.values()), output, start)
            print(results[key].outcome, flush=True)
            store(table, list(results.values()))
    finally:
        if results:
            summary.write(output, path.stem, variants, options, list(results.values()))
    return sum(result.status == "failed" for result in results.values())


def resolve(variant: Variant) -> dict[str, Any]:
    """Every option of a variant, the defaults included, by the command line's own parser.

    Raises:
        MisconfigurationException: An option or value is not allowed.
    """
    from vit_finetune import main

    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main(["fit", *variant.words, "--print_config"])
    except SystemExit as stop:
        if stop.code:
            raise MisconfigurationException(f"variant {variant.name!r}: {_reason(err.getvalue())}") from stop
    options: dict[str, Any] = yaml.safe_load(out.getvalue())
    return options | ({"weights_from": variant.weights_from} if variant.weights_from else {})


def _execute(
    one: Run, begun: Result, options: dict[str, Any], before: list[Result], output: Path, start: Start
) -> Result:
    """Trains, tests where there is a checkpoint to test, and reads off what was measured."""
    obstacle = _obstacle(one, before)
    if obstacle is not None:
        return replace(begun, status="skipped", reason=obstacle)
    slug, name = re.sub(r"[^\w.-]+", "-", one.variant.name), f"seed{one.seed}-repeat{one.repeat}"
    log = output / "logs" / f"{slug}-{name}.txt"
    log.unlink(missing_ok=True)
    fit = start(["fit", *_fit_words(one, before, output / "runs" / slug, name)], log)
    if fit.code == 0:
        folder = _newest(output / "runs" / slug / name)
        if folder is None:
            return replace(
                begun, status="failed", reason="it left no event file; a suite needs the default trainer.logger"
            )
        weights = _weights(folder)
        test = start(["test", f"--ckpt_path={weights}", *_test_words(options)], log) if weights else fit
        if test.code == 0:
            measured = read_run(folder)
            return replace(begun, status="done", seconds=fit.seconds, run=os.path.relpath(folder), **measured)
    reason = _reason(log.read_text(encoding="utf-8", errors="replace"))
    return replace(begun, status="skipped" if fit.code == REFUSED else "failed", reason=reason)


def _obstacle(one: Run, before: list[Result]) -> str | None:
    """Why a run need not be tried: another run of its variant was refused, or its weights are missing."""
    for result in before:
        if result.variant == one.variant.name and result.status == "skipped":
            return result.reason
    if one.variant.weights_from and _source(one.variant, before) is None:
        return f"there are no weights of variant {one.variant.weights_from!r}"
    return None


def _source(variant: Variant, before: list[Result]) -> Path | None:
    """The weights that a variant starts from: those of the first run of the other variant."""
    return next(
        (_weights(Path(r.run)) for r in before if r.variant == variant.weights_from and r.status == "done"), None
    )


def _fit_words(one: Run, before: list[Result], folder: Path, name: str) -> list[str]:
    words = [*one.variant.words, f"--seed_everything={one.seed}", f"--experiment={name}"]
    words += [f"--trainer.default_root_dir={folder}"]
    words += ["--trainer.callbacks+=vit_finetune.callbacks.MemoryForecast"]
    if one.variant.weights_from:
        words.append(f"--model.weights={_source(one.variant, before)}")
    return words


def _test_words(options: dict[str, Any]) -> list[str]:
    """Precision and kind of device of the training, on one device; compiling would take longer than it saves."""
    trainer = options["trainer"]
    words = ["--trainer.devices=1", "--model.compile=false", f"--matmul_precision={options['matmul_precision']}"]
    words += [f"--auto_precision={json.dumps(options['auto_precision'])}"]
    return words + [f"--trainer.{key}={trainer[key]}" for key in ("accelerator", "precision") if trainer[key]]


def _newest(runs: Path) -> Path | None:
    return max(runs.glob("version_*"), key=lambda path: int(path.name.rpartition("_")[2]), default=None)


def _weights(folder: Path) -> Path | None:
    """The best weights of a run, the last where nothing was validated."""
    return next((path for name in ("best-*.ckpt", "last.ckpt") for path in sorted(folder.rglob(name))), None)


def _reason(output: str) -> str:
    """The one line that a command ended with."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    if not lines:
        return "it said nothing"
    if not errors:
        return lines[-1]
    first = lines.index(errors[-1])  # several problems are listed below the first line
    return " ".join(lines[first:]).removeprefix("error: ")


def _fingerprint(options: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:12]


def _refuse_foreign_folder(output: Path) -> None:
    """A report replaces files and the folder summary, which must not be someone else's."""
    if output.exists() and any(output.iterdir()):
        raise MisconfigurationException(
            f"--output {output} is not empty and holds no results of a suite. Name another folder."
        )


def _refuse_other_options(
    results: dict[tuple[str, int, int], Result], options: dict[str, dict[str, Any]], output: Path
) -> None:
    for result in results.values():
        if result.variant not in options or result.options != _fingerprint(options[result.variant]):
            raise MisconfigurationException(
                f"--output {output} holds results of variant {result.variant!r} with other options than the suite now has. "
                "Name another folder, or move that one away."
            )
