"""The command ``benchmark``, which has neither model, data nor trainer to configure and so a parser of its own."""

import signal
import sys
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from vit_finetune.cli.parser import ReadableParser


def parser() -> ReadableParser:
    """The options of ``benchmark``."""
    options = ReadableParser(
        prog="vit-finetune benchmark",
        description="Run configurations side by side and report time, memory and accuracy.",
        allow_abbrev=False,
    )
    options.add_argument(
        "--suite", type=Path, help="Run the variants of this file, such as configs/benchmark/quick.yaml."
    )
    options.add_argument("--frameworks", action="store_true", help="Compare five ways to write the same fine-tune.")
    options.add_argument(
        "--output",
        type=Path,
        help="Folder of the results; a suite that was stopped goes on there. By default runs/benchmark/ and the "
        "suite's name.",
    )
    return options


def run(words: list[str]) -> None:
    """Runs a suite, or the frameworks.

    Raises:
        MisconfigurationException: There is nothing to run, or the suite has a mistake.
        SystemExit: With code 1 when runs failed.
    """
    options = parser().parse_args(words)
    folder = Path("runs") / "benchmark"
    if options.frameworks and options.suite:
        raise MisconfigurationException("--suite and --frameworks are two comparisons: give one of them.")
    if options.frameworks:
        from vit_finetune.benchmark import frameworks

        frameworks.compare(options.output or folder / "frameworks")
    elif options.suite:
        from vit_finetune.benchmark import runner

        output = options.output or folder / options.suite.stem
        before = {number: signal.signal(number, _stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            failed = runner.run(options.suite, output)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        print(f"\n{(output / 'results.md').read_text(encoding='utf-8')}\n{output}  tensorboard --logdir {output}")
        if failed:
            raise SystemExit(1)
    else:
        raise MisconfigurationException(
            "benchmark needs --suite FILE, such as configs/benchmark/quick.yaml, or --frameworks."
        )


def _stop(number: int, frame: Any) -> None:
    """Leaves by an exception, which ends the process under way and writes the report."""
    print("\nstopped; the same command goes on from here", file=sys.stderr)
    raise SystemExit(128 + number)
