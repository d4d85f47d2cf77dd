"""``python -m vit_finetune``: see :mod:`vit_finetune.cli.lightning_cli`."""

from vit_finetune.cli.lightning_cli import main

if __name__ == "__main__":
    main()
