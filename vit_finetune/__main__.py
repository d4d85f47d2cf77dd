"""``python -m vit_finetune``: the command line."""

import sys
from importlib.util import find_spec

from lightning.pytorch.cli import ArgsType


def main(args: ArgsType = None) -> None:
    """Run a command; ``main(["fit", "--config", "configs/quickstart.yaml"])`` does the same from Python.

    Args:
        args: The arguments after ``python -m vit_finetune``. Default: those of this process.

    Raises:
        SystemExit: With code 2 after a mistake in the arguments and code 1 after an error that has a known remedy; the
            message is on standard error.
    """
    from vit_finetune.cli import main as cli

    given = sys.argv[1:] if args is None else args
    # A command of its own, without model, data and trainer; the package can be deleted.
    if isinstance(given, list) and given[:1] == ["benchmark"] and find_spec("vit_finetune.benchmark"):
        from vit_finetune.benchmark.__main__ import main as benchmark

        benchmark(given[1:])
    else:
        cli.main(args)


if __name__ == "__main__":
    main()
