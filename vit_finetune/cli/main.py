"""Entry point of the command line, and the errors and warnings that a user sees."""

import io
import logging
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch
import yaml
from jsonargparse import set_parsing_settings
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch.cli import ArgsType, LightningArgumentParser
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed import DistNetworkError
from typing_extensions import override

import vit_finetune
from vit_finetune.cli import launch
from vit_finetune.cli.lightning_cli import ViTCLI
from vit_finetune.cli.parser import ReadableParser
from vit_finetune.cli.run_dir import SaveConfig
from vit_finetune.cli.subcommands import ViTTrainer
from vit_finetune.data import ImageDataModule
from vit_finetune.errors import ExportMismatchError, NonFiniteLossError, ProcessFailedError
from vit_finetune.evaluation.find_checkpoint import RUNS
from vit_finetune.module import ViTClassifier

DESCRIPTION = "Fine-tune a Vision Transformer with PyTorch Lightning."
BENCHMARK = (
    " One more command, benchmark, runs configurations side by side and compares time, memory and accuracy; see "
    "vit-finetune benchmark --help."
)
OUT_OF_MEMORY = (
    "Out of memory. Try, in this order: --trainer.precision bf16-mixed; a smaller --data.batch_size, with "
    "--trainer.accumulate_grad_batches to keep the global batch size; --model.grad_checkpointing true; a smaller "
    "--model.img_size; --config configs/strategy/fsdp.yaml on several GPUs."
)
NO_SHARED_MEMORY = (
    "The DataLoader workers ran out of shared memory (/dev/shm). Give the container more (docker run --shm-size 2g, or "
    "--ipc host), or load in the main process: --data.num_workers 0."
)


def main(args: ArgsType = None) -> None:
    """Run a command; ``main(["fit", "--config", "configs/quickstart.yaml"])`` does the same from Python.

    Args:
        args: The arguments after ``python -m vit_finetune``. Default: those of this process.

    Raises:
        SystemExit: With code 2 after a mistake in the arguments and code 1 after an error that has a known remedy; the
            message is on standard error.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a class name that the terminal cannot print must not end a run
            stream.reconfigure(errors="backslashreplace")
    launch.exit_with_launcher()
    launch.use_new_port_after_restart()
    with report_errors():
        _start(ViTCLI, args)


def parse(args: list[str]) -> dict[str, object]:
    """Parse a command without running it.

    Args:
        args: The command and its options, such as ``["fit", "--model.lr", "0.01"]``.

    Returns:
        All options with their values, including defaults, nested as in ``config.yaml``.

    Raises:
        MisconfigurationException: An option or a value is not valid.
    """
    try:
        _start(_ParserOnly, args)
    except _ParsedError as parsed:
        return parsed.options
    raise MisconfigurationException(f"{args} is not a command that runs.")


class _ParsedError(Exception):
    """Carry the options out of the constructor of LightningCLI, which would go on to run the command."""

    def __init__(self, options: dict[str, object]) -> None:
        super().__init__()
        self.options = options


class _ParserOnly(ViTCLI):
    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        super().parse_arguments(parser, args)
        command = self.config["subcommand"]
        dumped = self.command_parsers[command].dump(self.config[command], skip_unset=False)
        raise _ParsedError(yaml.safe_load(dumped))


def _start(cli: type[ViTCLI], args: ArgsType) -> None:
    filter_library_messages()
    set_parsing_settings(add_print_completion_argument=True)
    cli(
        ViTClassifier,
        ImageDataModule,
        subclass_mode_data=True,
        trainer_class=ViTTrainer,
        save_config_callback=SaveConfig,
        seed_everything_default=0,
        auto_configure_optimizers=False,
        trainer_defaults={"max_epochs": 3, "default_root_dir": RUNS, "use_distributed_sampler": False},
        parser_class=ReadableParser,
        parser_kwargs={
            "prog": "vit-finetune",
            "description": DESCRIPTION + (BENCHMARK if find_spec("vit_finetune.benchmark") else ""),
            "version": f"vit-finetune {vit_finetune.__version__}",
            "allow_abbrev": False,  # --model.layer must not silently mean --model.layer_decay
            "default_env": True,
            "env_prefix": "VIT_FINETUNE",
        },
        args=args,
    )


# Errors


@contextmanager
def report_errors() -> Iterator[None]:
    """Print an error that has a remedy as one message on standard error, without a traceback, and exit.

    Raises:
        SystemExit: With code 2 after a mistake of configuration, 1 after another error, 143 after SIGTERM.
    """
    try:
        yield
    except SIGTERMException as error:  # outside training, where ResumeCheckpoint has nothing to save
        raise SystemExit(128 + signal.SIGTERM) from error
    except MisconfigurationException as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    except (RuntimeError, MemoryError, OSError) as error:
        message = explain(error)
        if message is None:
            raise
        print(f"error: {message}", file=sys.stderr)
        raise SystemExit(1) from error


def explain(error: Exception) -> str | None:
    """Return the message for a known error, ``None`` if its traceback is needed."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        reason = str(error).partition("\n")[0]  # empty for Python's own MemoryError
        return f"{OUT_OF_MEMORY} ({reason})" if reason else OUT_OF_MEMORY
    if "shared memory" in str(error):  # raised by torch's and by Python's multiprocessing
        return NO_SHARED_MEMORY
    if isinstance(error, DistNetworkError):
        return launch.port_problem(error)
    # OSError: a full disk, a file in place of a folder, no permission.
    known = (NonFiniteLossError, ProcessFailedError, ExportMismatchError, TrainingSpikeException, OSError)
    if isinstance(error, known):
        return str(error)
    return None


# Warnings


def filter_library_messages() -> None:
    """Silence known messages of the libraries that ask nothing of the user; all others stay."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_DROP)
    # Lightning's own use of a function that PyTorch is about to rename.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated.*")
    # Images in memory need no workers; data/README.md explains when to add some for files.
    warnings.filterwarnings("ignore", message=".*does not have many workers which may be a bottleneck.*")
    # The module logs at the end of each epoch, however short it is.
    warnings.filterwarnings("ignore", message=".*is smaller than the logging interval.*")
    # In every command on a login node of a cluster; check_slurm refuses the case that cannot work.
    warnings.filterwarnings("ignore", message=".*`srun` command is available on your system but is not used.*")
    # Remarks about readable images; an unreadable image raises an error with its name.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    # main([...]) in a notebook: the other arguments that Lightning warns of are those of the kernel.
    warnings.filterwarnings("ignore", message=".*args parameter is intended to run from within Python.*")


class _Drop(logging.Filter):
    def __init__(self, *fragments: str) -> None:
        super().__init__()
        self.fragments = fragments

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        return not any(fragment in record.getMessage() for fragment in self.fragments)


# Advertisements, a device that hardly any user has, and the length of the data read for the schedule.
_DROP = _Drop("litlogger", "litmodels", "TPU available", "to estimate number of stepping batches")
