"""``python -m vit_finetune.benchmark.frameworks``."""

import sys

from jsonargparse import auto_cli
from lightning.fabric.utilities.exceptions import MisconfigurationException

from vit_finetune.benchmark.frameworks.compare import compare

if __name__ == "__main__":
    try:
        auto_cli(compare, as_positional=False, prog="python -m vit_finetune.benchmark.frameworks")
    except MisconfigurationException as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
