"""The command line: ``python -m vit_finetune {fit,validate,test,predict}``."""

import argparse
import io
import os
import signal
import sys
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from jsonargparse import Namespace, set_parsing_settings
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyExperiment
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

import vit_finetune
from vit_finetune import callbacks, environment
from vit_finetune.benchmark import __main__ as benchmark
from vit_finetune.checkpoint import AtomicCheckpointIO, SaveConfig, option_defaults, read_header, resolve, run_folder
from vit_finetune.cli import failures, log_filters, preflight
from vit_finetune.cli.parser import ReadableParser
from vit_finetune.cli.subcommands import EXTRA_COMMANDS, ViTTrainer
from vit_finetune.data import ImageDataModule
from vit_finetune.model import memory
from vit_finetune.module import ViTClassifier

RUNS = "runs"
NEED_NO_MODEL = ("fit", "doctor", "check-data", "tune")
DEFAULT_DATA = {"class_path": "vit_finetune.CIFAR10"}


def main(args: ArgsType = None) -> None:
    """Runs a command; ``main(["fit", "--config", "configs/quickstart.yaml"])`` does the same from Python.

    Args:
        args: The words after ``python -m vit_finetune``; by default those of this process.

    Raises:
        SystemExit: With code 2 after a user's mistake, which is explained in a line on standard error.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that the terminal has no letters for must not end a run
            stream.reconfigure(errors="backslashreplace")
    log_filters.filter_library_chatter()
    _use_new_port_after_restart()
    set_parsing_settings(add_print_completion_argument=True)
    try:
        _run(args)
    except SIGTERMException as error:  # outside training, where ResumeCheckpoint has nothing to save
        raise SystemExit(128 + signal.SIGTERM) from error
    except MisconfigurationException as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    except (RuntimeError, MemoryError, OSError) as error:
        message = failures.explain(error)
        if message is None:
            raise
        print(f"error: {message}", file=sys.stderr)
        raise SystemExit(1) from error


def _run(args: ArgsType) -> None:
    words = sys.argv[1:] if args is None else args
    if isinstance(words, list) and words[:1] == ["benchmark"]:  # has no model, data and trainer to configure
        benchmark.run(words[1:])
        return
    ViTCLI(
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
            "description": "Fine-tune a Vision Transformer. Each command explains its options with --help.",
            "version": f"vit-finetune {vit_finetune.__version__}",
            "allow_abbrev": False,  # --model.layer must not silently mean --model.layer_decay
            "default_env": True,
            "env_prefix": "VIT_FINETUNE",
        },
        args=args,
    )


def _use_new_port_after_restart() -> None:
    """Lets processes that torchrun has started again meet at a new address.

    At the old one torch 2.14 still tells where the processes of the attempt before were, and the first to arrive waits
    for those in vain.
    """
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if attempt and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + attempt)


class ViTCLI(LightningCLI):
    """LightningCLI with a run folder, checkpoints that are always kept, and checkpoints as a source of defaults."""

    def _add_subcommands(self, parser: LightningArgumentParser, **kwargs: Any) -> None:
        """Lists ``benchmark`` among the commands; ``main`` runs it."""
        super()._add_subcommands(parser, **kwargs)
        light = benchmark.parser()
        assert parser._subcommands_action is not None
        parser._subcommands_action.add_subcommand("benchmark", light, help=light.description)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds what this project has beyond model, data and trainer."""
        parser.add_argument(
            "--experiment",
            type=str | None,
            help="Folder under runs/ for this run and its repeats. By default the first --config file's name, "
            "or the dataset's.",
        )
        parser.add_argument(
            "--auto_precision",
            type=bool,
            default=False,
            help="Where --trainer.precision is not given: bf16-mixed on processors and GPUs with units for it, "
            "32-true elsewhere.",
        )
        parser.add_argument(
            "--matmul_precision",
            type=Literal["highest", "high", "medium"],
            default="highest",
            help="How exactly products of 32-bit matrices are computed: highest in 32 bits, high in TF32 on NVIDIA "
            "GPUs from Ampere on, medium in bfloat16.",
        )
        # Outside trainer.callbacks, so that --trainer.callbacks cannot drop them by accident.
        parser.add_class_arguments(ModelCheckpoint, "best_checkpoint")
        parser.add_class_arguments(callbacks.ResumeCheckpoint, "last_checkpoint")
        parser.add_class_arguments(callbacks.TensorBoard, "tensorboard")
        parser.add_class_arguments(callbacks.Projector, "projector")
        parser.set_defaults(
            {
                "data": DEFAULT_DATA,
                "best_checkpoint.monitor": "val/acc",
                "best_checkpoint.mode": "max",
                "best_checkpoint.filename": "best-epoch{epoch:02d}-acc{val/acc:.4f}",
                "best_checkpoint.save_weights_only": True,
                "best_checkpoint.auto_insert_metric_name": False,
                "best_checkpoint.enable_version_counter": False,
            }
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parses; where a checkpoint is given, its options are the defaults.

        So what is typed wins over the checkpoint, the checkpoint wins over built-in defaults, and the saved config
        states what ran.

        Raises:
            MisconfigurationException: The checkpoint is missing or unusable.
        """
        self.checkpoint_path: Path | None = None
        self.checkpoint: dict[str, Any] | None = None
        self._add_options_of_commands()
        words = sys.argv[1:] if args is None else args
        _refuse_bytes(words)
        typed = _peek(words)
        if not typed.ckpt_path:
            super().parse_arguments(parser, args)
            typed = self._options  # a config file or the environment may name one
        if typed.ckpt_path:
            self._parse_with_checkpoint(typed, args)
        if self.checkpoint_path is None and self.config["subcommand"] not in NEED_NO_MODEL:
            raise MisconfigurationException(
                f"{self.config['subcommand']} needs a trained model: --ckpt_path best, last, or a file."
            )

    def _add_options_of_commands(self) -> None:
        """What single commands have beyond, or otherwise than, the others."""
        for name, command in self._subcommand_parsers.items():
            if name not in EXTRA_COMMANDS:
                command.set_defaults({"weights_only": True})
        predict = self._subcommand_parsers["predict"]
        predict.set_defaults({"return_predictions": False})
        predict.add_class_arguments(callbacks.PredictionWriter, "predictions")
        self._subcommand_parsers["test"].set_defaults({"verbose": False})  # the report has more than Lightning's table

    def _parse_with_checkpoint(self, typed: Any, args: ArgsType) -> None:
        runs = Path(typed.trainer.default_root_dir if "trainer" in typed else typed.default_root_dir)
        self.checkpoint_path = resolve(typed.ckpt_path, runs, _experiment(typed))
        if self.checkpoint_path is None:
            super().parse_arguments(self.parser, args)
            self._options.ckpt_path = None
            return
        self.checkpoint = read_header(self.checkpoint_path)
        model, data = option_defaults(self.checkpoint)
        self._set_defaults(model | ({"data": data} if data else {}))
        super().parse_arguments(self.parser, args)
        if data and self._options.data.class_path != data["class_path"]:
            self._set_defaults({"data": DEFAULT_DATA})  # another class: no option of the old one carries over
            super().parse_arguments(self.parser, args)
        self._options.ckpt_path = str(self.checkpoint_path)
        rank_zero_info(f"checkpoint: {self.checkpoint_path}")

    def _set_defaults(self, defaults: dict[str, Any]) -> None:
        for command in self._subcommand_parsers.values():
            command.set_defaults(defaults)

    @property
    def _options(self) -> Namespace:
        """The options of the command that was given."""
        options: Namespace = self.config[self.config["subcommand"]]
        return options

    def _parse_ckpt_path(self) -> None:
        """Done in ``parse_arguments``; the inherited way lets the checkpoint win over what was typed."""

    def before_instantiate_classes(self) -> None:
        """Chooses the precision where that was left to the machine; refuses to wait for SLURM in vain."""
        options = self._options
        preflight.check_slurm(options.trainer.devices, options.trainer.num_nodes)
        torch.set_float32_matmul_precision(options.matmul_precision)
        if options.auto_precision and options.trainer.precision is None:
            options.trainer.precision = "bf16-mixed" if environment.has_native_bf16() else "32-true"

    def instantiate_classes(self) -> None:
        """Builds data, model and trainer; what a dataset refuses keeps its own message."""
        try:
            super().instantiate_classes()
        except ValueError as error:  # jsonargparse's, around whatever a class raises
            if isinstance(error.__cause__, MisconfigurationException):
                raise error.__cause__ from None
            raise

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Builds the Trainer with the run folder and the callbacks that every run has."""
        options = self.config_init[self.subcommand]
        trainer = options.trainer
        if trainer.logger in (None, True):
            trainer.logger = self._logger(options)
        extra: list[Callback] = []  # only what the command needs: each costs some microseconds a step
        if self.subcommand == "fit":
            extra += [callbacks.ThroughputLogger(), callbacks.RunSummary(trainer.default_root_dir), options.tensorboard]
        if self.subcommand == "predict":
            extra.append(options.predictions)
        if self.subcommand == "test":
            extra.append(callbacks.TestReport())
            extra += [options.projector] if options.projector.images else []
        given = trainer.callbacks if isinstance(trainer.callbacks, list) else [trainer.callbacks]
        if trainer.enable_progress_bar is not False and not any(isinstance(c, ProgressBar) for c in given):
            extra.append(callbacks.progress_bar())
        if trainer.enable_checkpointing is not False:
            extra += [options.best_checkpoint, options.last_checkpoint]
        plugins = trainer.plugins if isinstance(trainer.plugins, list) else [trainer.plugins]
        if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            trainer.plugins = [*(plugin for plugin in plugins if plugin), AtomicCheckpointIO()]
        try:
            return self._instantiate_trainer({**trainer, **kwargs}, extra)
        except MisconfigurationException as error:
            raise preflight.explain_notebook(error, str(self.subcommand)) from error
        except (ValueError, TypeError) as error:  # Lightning's checks of accelerator, devices, strategy and so on
            needs_gpu = "requires a GPU" in str(error)
            hint = " On a CPU FSDP2 works: --config configs/strategy/fsdp2.yaml." if needs_gpu else ""
            raise MisconfigurationException(f"{error}{hint}") from error

    def after_instantiate_classes(self) -> None:
        """Refuses a checkpoint that the strategy cannot read, and processes that a notebook cannot start."""
        preflight.check_notebook(self.trainer, str(self.subcommand))
        preflight.check_shards(self.trainer, self.checkpoint_path)

    def _logger(self, options: Namespace) -> TensorBoardLogger:
        """Goes on in the folder of the checkpoint, or starts a new one."""
        kind = SilentLogger if self.subcommand == "predict" else TensorBoardLogger
        run = run_folder(self.checkpoint_path) if self.checkpoint_path else None
        if run is not None:
            run = Path(os.path.relpath(run))
            return kind(run.parent.parent, run.parent.name, run.name, default_hp_metric=False)
        experiment = _experiment(options) or self._options.data.class_path.rpartition(".")[2].lower()
        return kind(options.trainer.default_root_dir, experiment, default_hp_metric=False)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The commands, and which of their arguments are not options."""
        return {**LightningCLI.subcommands(), **{name: {"model", "datamodule"} for name in EXTRA_COMMANDS}}

    def before_doctor(self) -> None:
        """Runs the checks of ``fit`` after saying what machine this is."""
        print(environment.describe(), flush=True)
        self.before_fit()
        names = self.model.class_names or self.datamodule.class_names or range(10)  # a folder's are not known yet
        forecast = memory.of_fit(self.trainer, self.model.hparams, len(names), self.datamodule.batch_size)
        print(f"{'memory':13s} forecast for each device: {forecast}")
        print("fit        nothing stands in the way", flush=True)

    def before_tune(self) -> None:
        """Runs the checks of ``fit``: a trial is one, from the beginning."""
        if self.checkpoint is not None:
            raise MisconfigurationException("tune starts as a fresh fit does: --model.weights instead of --ckpt_path.")
        self.before_fit()

    def before_fit(self) -> None:
        """Refuses what cannot work; in one process only, the others would say the same."""
        self.model.fresh = self.checkpoint is None
        if self.trainer.is_global_zero:
            preflight.check_fit(self.trainer, self.model, self.datamodule, self.checkpoint_path, self.checkpoint)
        self.checkpoint = None  # lets go of the mapped file


def _refuse_bytes(args: ArgsType) -> None:
    """Refuses words that no configuration file can hold, since they are no text in this locale."""
    for word in args if isinstance(args, list) else []:
        if not word.isascii() and word != word.encode(errors="replace").decode():
            raise MisconfigurationException(
                f"{word!r} holds bytes that are no text here. Set LC_ALL=C.UTF-8 if it is UTF-8; otherwise go into the "
                "folder and name it by a dot, or by a link."
            )


class SilentLogger(TensorBoardLogger):
    """Knows the run's folder and opens no event file: ``predict`` has nothing to put into one."""

    @property
    def experiment(self) -> Any:
        """Takes everything and does nothing."""
        return DummyExperiment()


def _peek(args: ArgsType) -> argparse.Namespace:
    """Reads from the command line what decides on the checkpoint, before its options can be parsed by its classes."""
    words = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    words.add_argument("--ckpt_path")
    words.add_argument("--experiment")
    words.add_argument("--trainer.default_root_dir", dest="default_root_dir")
    words.add_argument("-c", "--config", action="append")
    found = words.parse_known_args(args if isinstance(args, list) else [])[0]
    for path in reversed(found.config or []):  # the later files win, and what is typed over all
        options = _read(path)
        trainer = options.get("trainer")
        root = trainer.get("default_root_dir") if isinstance(trainer, dict) else None
        found.experiment = found.experiment or options.get("experiment")
        found.default_root_dir = found.default_root_dir or root
    found.default_root_dir = found.default_root_dir or RUNS
    return found


def _read(path: str) -> dict[str, Any]:
    """A config file's options; none of a file that the parser will refuse, saying why."""
    try:
        options = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return options if isinstance(options, dict) else {}


def _experiment(options: Any) -> str | None:
    """Name of the folder for a run and its repeats: as given, or the recipe's, which is the first --config file."""
    named: str | None = options.experiment
    return named or (Path(str(options.config[0])).stem if options.config else None)
