"""Compare configurations or frameworks: ``python -m vit_finetune benchmark``.

The command has no model, data or trainer to configure, and therefore a parser of its own.
"""

import signal
import sys
from pathlib import Path
from types import FrameType

from lightning.fabric.utilities.exceptions import MisconfigurationException

from vit_finetune.cli.main import report_errors
from vit_finetune.cli.parser import ReadableParser
from vit_finetune.cli.paths import expand_options

SUMMARY = "Run configurations side by side and report time, memory and accuracy."
FOLDER = Path("runs") / "benchmark"


def parser() -> ReadableParser:
    """Return the parser of the command."""
    options = ReadableParser(prog="vit-finetune benchmark", description=SUMMARY, allow_abbrev=False)
    options.add_argument(
        "--suite", type=Path, help="Run the variants of a suite file, such as configs/benchmark/quick.yaml."
    )
    options.add_argument(
        "--frameworks",
        action="store_true",
        help="Compare the same fine-tuning in plain PyTorch, Fabric, Accelerate, HF Trainer and this project.",
    )
    options.add_argument(
        "--output",
        type=Path,
        help="Folder for the results; an interrupted suite is resumed from there. Default: runs/benchmark/ followed by "
        "the name of the suite, or frameworks.",
    )
    return options


def main(args: list[str]) -> None:
    """Run a suite, or compare the frameworks.

    Args:
        args: Arguments after ``python -m vit_finetune benchmark``.

    Raises:
        SystemExit: With code 1 if runs failed, and with code 2 if there is nothing to run or the suite is not valid.
    """
    with report_errors():
        options = parser().parse_args(args)
        expand_options(options)
        if options.frameworks == bool(options.suite):
            raise MisconfigurationException(
                "benchmark needs either --suite FILE, such as configs/benchmark/quick.yaml, or --frameworks."
            )
        if options.suite:
            failed = _run_suite(options.suite, options.output or FOLDER / options.suite.stem)
        else:
            from vit_finetune.benchmark.frameworks.compare import compare_frameworks  # imports timm

            failed = compare_frameworks(options.output or FOLDER / "frameworks")
    if failed:
        raise SystemExit(1)


def _run_suite(suite: Path, output: Path) -> int:
    from vit_finetune.benchmark import runner

    handlers = {number: signal.signal(number, _stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        failed = runner.run(suite, output)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    print(f"\n{(output / 'results.md').read_text(encoding='utf-8')}\n{output}  tensorboard --logdir {output}")
    return failed


def _stop(number: int, frame: FrameType | None) -> None:
    """Raise an exception, which ends the current process and writes the report."""
    print("\nInterrupted. Run the same command again to resume.", file=sys.stderr)
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main(sys.argv[1:])
