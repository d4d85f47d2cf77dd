"""Run a suite: each run is a process of the real command line, and an interrupted suite can be resumed."""

import hashlib
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from lightning.fabric.utilities.exceptions import MisconfigurationException

from vit_finetune.benchmark import summary
from vit_finetune.benchmark.records import Result, load, origin, read_run, store
from vit_finetune.benchmark.suite import Options, Run, Variant, read, schedule
from vit_finetune.cli.main import parse

DATE = "%Y-%m-%d %H:%M:%S"
NOT_POSSIBLE = 2  # exit code of a command that explains in one line why it cannot run


class Outcome(NamedTuple):
    """Exit code, duration and processor time of a process."""

    code: int
    seconds: float
    cpu_seconds: float


Start = Callable[[list[str], Path], Outcome]
"""Runs ``python -m vit_finetune`` with these arguments and writes its output to this file."""


def run_process(args: list[str], log: Path) -> Outcome:
    """Run a command in a process, which ends when this process is interrupted."""
    log.parent.mkdir(parents=True, exist_ok=True)
    start, cpu_start = time.perf_counter(), _cpu_seconds()
    with log.open("a", encoding="utf-8") as file:
        command = [sys.executable, "-m", "vit_finetune", *args]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
    return Outcome(code, time.perf_counter() - start, _cpu_seconds() - cpu_start)


def _cpu_seconds() -> float:
    """Return the processor time of all processes that this one has started and that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run(path: Path, output: Path, start: Start = run_process) -> int:
    """Run what is missing of a suite and write the report.

    Args:
        path: The suite file.
        output: Folder of the results; if it holds those of an interrupted call, the suite is resumed.
        start: Runs a command.

    Returns:
        The number of failed runs, without those that are not possible on this machine.

    Raises:
        MisconfigurationException: The suite is not valid, or the folder holds something else.
    """
    variants = read(path)
    options = {variant.name: resolve(variant) for variant in variants}
    table = output / "results.csv"
    results = _completed(table, options)
    runs = list(schedule(variants))
    machine = origin()
    try:
        for number, one in enumerate(runs, 1):
            variant = one.variant
            key = (variant.name, one.seed, one.repeat)
            if key in results:
                continue
            print(f"{number}/{len(runs)}  {variant.name}  seed {one.seed}, repeat {one.repeat}", end="  ", flush=True)
            begun = Result(*key, options=_fingerprint(options[variant.name]), date=time.strftime(DATE), **machine)
            results[key] = _execute(one, begun, options[variant.name], list(results.values()), output, start)
            print(results[key].outcome, flush=True)
            store(table, results.values())
    finally:
        if results:
            summary.write(output, path.stem, variants, options, list(results.values()))
    return sum(result.status == "failed" for result in results.values())


def _completed(table: Path, options: dict[str, Options]) -> dict[tuple[str, int, int], Result]:
    """Load the completed runs of an earlier call; runs that were skipped or failed are repeated.

    Raises:
        MisconfigurationException: The folder holds other files, or results with other options.
    """
    output = table.parent
    if not table.exists():
        if output.exists() and any(output.iterdir()):  # the report must not overwrite someone else's files
            raise MisconfigurationException(
                f"--output {output} is not empty and holds no results of a suite. Choose another folder."
            )
        store(table, [])  # marks the folder as one of a suite
    results = {result.key: result for result in load(table) if result.status == "done"}
    for result in results.values():
        if result.variant not in options or result.options != _fingerprint(options[result.variant]):
            raise MisconfigurationException(
                f"--output {output} holds results of variant {result.variant!r} with other options than in the suite. "
                "Choose another folder, or move this one away."
            )
    return results


def resolve(variant: Variant) -> Options:
    """Return all options of a variant, including defaults, as the command line parses them.

    Raises:
        MisconfigurationException: An option or value is not valid.
    """
    try:
        options = parse(["fit", *variant.args])
    except MisconfigurationException as error:
        raise MisconfigurationException(f"variant {variant.name!r}: {error}") from error
    return options | ({"weights_from": variant.weights_from} if variant.weights_from else {})


def _execute(one: Run, begun: Result, options: Options, before: list[Result], output: Path, start: Start) -> Result:
    """Train, test if there is a checkpoint, and read the measured values."""
    obstacle = _obstacle(one, before)
    if obstacle is not None:
        return replace(begun, status="skipped", reason=obstacle)
    slug, name = re.sub(r"[^\w.-]+", "-", one.variant.name), f"seed{one.seed}-repeat{one.repeat}"
    log = output / "logs" / f"{slug}-{name}.txt"
    log.unlink(missing_ok=True)
    fit = start(["fit", *_fit_args(one, before, output / "runs" / slug, name)], log)
    if fit.code == 0:
        folder = _newest(output / "runs" / slug / name)
        if folder is None:
            return replace(begun, status="failed", reason="no event file; a suite needs the default trainer.logger")
        weights = _weights(folder)
        test = start(["test", f"--ckpt_path={weights}", *_test_args(options)], log) if weights else fit
        if test.code == 0:
            measured: dict[str, Any] = read_run(folder)
            measured |= {"seconds": fit.seconds, "cpu_seconds": fit.cpu_seconds}
            return replace(begun, status="done", run=os.path.relpath(folder), **measured)
    reason = _reason(log.read_text(encoding="utf-8", errors="replace"))
    return replace(begun, status="skipped" if fit.code == NOT_POSSIBLE else "failed", reason=reason)


def _obstacle(one: Run, before: list[Result]) -> str | None:
    """Return why a run cannot succeed: another run of its variant was skipped, or its weights are missing."""
    for result in before:
        if result.variant == one.variant.name and result.status == "skipped":
            return result.reason
    if one.variant.weights_from and _source(one.variant, before) is None:
        return f"weights are missing: variant {one.variant.weights_from!r}"
    return None


def _source(variant: Variant, before: list[Result]) -> Path | None:
    """Return the weights that a variant starts from: those of the first run of the other variant."""
    return next(
        (_weights(Path(r.run)) for r in before if r.variant == variant.weights_from and r.status == "done"), None
    )


def _fit_args(one: Run, before: list[Result], folder: Path, name: str) -> list[str]:
    args = [*one.variant.args, f"--seed_everything={one.seed}", f"--experiment={name}"]
    args += [f"--trainer.default_root_dir={folder}"]
    args += ["--trainer.callbacks+=vit_finetune.callbacks.MemoryForecast"]
    if one.variant.weights_from:
        args.append(f"--model.weights={_source(one.variant, before)}")
    return args


def _test_args(options: Options) -> list[str]:
    """Test on one device like that of training, in its precision; without compilation, which would take longer."""
    trainer = options["trainer"]
    args = ["--trainer.devices=1", "--model.compile=false", f"--matmul_precision={options['matmul_precision']}"]
    args += [f"--auto_precision={json.dumps(options['auto_precision'])}"]
    return args + [f"--trainer.{key}={trainer[key]}" for key in ("accelerator", "precision") if trainer[key]]


def _newest(runs: Path) -> Path | None:
    return max(runs.glob("version_*"), key=lambda path: int(path.name.rpartition("_")[2]), default=None)


def _weights(folder: Path) -> Path | None:
    """Return the best checkpoint of a run, or the last one if there was no validation."""
    return next((path for name in ("best-*.ckpt", "last.ckpt") for path in sorted(folder.rglob(name))), None)


def _reason(output: str) -> str:
    """Return the error at the end of a command's output, on one line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    if not lines:
        return "the process printed nothing"
    if not errors:
        return lines[-1]
    first = lines.index(errors[-1])  # several problems are listed below the first line
    return " ".join(lines[first:]).removeprefix("error: ")


def _fingerprint(options: Options) -> str:
    return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:12]
