"""LightningCLI with a run folder, checkpoints in every run, and checkpoints as a source of defaults."""

import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse import Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from vit_finetune import callbacks, environment
from vit_finetune.checkpoint import AtomicCheckpointIO, read_header
from vit_finetune.cli import launch, preflight
from vit_finetune.cli.checkpoint_options import StoredOptions
from vit_finetune.cli.ckpt_path import experiment_name, peek, resolve
from vit_finetune.cli.parser import note_defaults, refuse_undecodable
from vit_finetune.cli.paths import expand_config_files, expand_options
from vit_finetune.cli.run_callbacks import as_list, run_callbacks, skip_empty_hooks
from vit_finetune.cli.run_dir import RunFolder, RunLogger, RunTrainer, SilentLogger, start_run
from vit_finetune.cli.subcommands import extra_commands
from vit_finetune.evaluation.find_checkpoint import describe
from vit_finetune.evaluation.metrics import direction

NO_CHECKPOINT_NEEDED = ("fit", "doctor", "check-data", "tune")
DEFAULT_DATA = {"class_path": "vit_finetune.CIFAR10"}


class ViTCLI(LightningCLI):
    """Command line of this project: model, data and trainer, and what every run has besides them."""

    # Options

    @staticmethod
    @override
    def subcommands() -> dict[str, set[str]]:
        return {**LightningCLI.subcommands(), **{name: {"model", "datamodule"} for name in extra_commands()}}

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--experiment",
            type=str | None,
            help="Folder under runs/ for this run and its repetitions. Default: the name of the first --config file, "
            "or of the dataset.",
        )
        parser.add_argument(
            "--auto_precision",
            type=bool,
            default=False,
            help="If --trainer.precision is not given: bf16-mixed on hardware with native bf16 support, 32-true "
            "elsewhere.",
        )
        parser.add_argument(
            "--matmul_precision",
            type=Literal["highest", "high", "medium"],
            default="highest",
            help="Precision of float32 matrix multiplications (torch.set_float32_matmul_precision).",
        )
        # Outside trainer.callbacks, so that --trainer.callbacks cannot drop them by accident.
        parser.add_class_arguments(callbacks.BestCheckpoint, "best_checkpoint")
        parser.add_class_arguments(callbacks.ResumeCheckpoint, "last_checkpoint")
        parser.add_class_arguments(callbacks.TensorBoard, "tensorboard")
        parser.add_class_arguments(callbacks.Projector, "projector")
        parser.set_defaults({"data": DEFAULT_DATA})

    @property
    def command_parsers(self) -> dict[str, LightningArgumentParser]:
        """The parsers of the commands by name."""
        return self._subcommand_parsers  # private: LightningCLI has no public way to change options of one command

    # Parsing

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the arguments; if a checkpoint is given, its options are the defaults.

        Arguments therefore override the checkpoint, the checkpoint overrides built-in defaults, and the saved config
        states what ran.

        Raises:
            MisconfigurationException: The checkpoint is missing or cannot be used.
        """
        self.checkpoint_path: Path | None = None
        self._args = args
        self.command_parsers["predict"].add_class_arguments(callbacks.PredictionWriter, "predictions")
        note_defaults(self.command_parsers.values())
        refuse_undecodable(args if args is not None else sys.argv[1:])
        if args is None or isinstance(args, list):
            args = expand_config_files(sys.argv[1:] if args is None else args)
        typed: Any = peek(args)
        if typed.ckpt_path == "":
            raise MisconfigurationException("--ckpt_path is empty; expected a file, best, last or restart.")
        if not typed.ckpt_path:
            self._parse(args)
            typed = self._options  # a config file of the whole command line may name a checkpoint
        if typed.ckpt_path:
            self._parse_with_checkpoint(typed, args)
        command = self.config["subcommand"]
        if self.checkpoint_path is None and command not in NO_CHECKPOINT_NEEDED:
            raise MisconfigurationException(f"{command} needs a trained model: --ckpt_path best, last, or a file.")

    def _parse_with_checkpoint(self, typed: Any, args: ArgsType) -> None:
        runs = Path(typed.trainer.default_root_dir if "trainer" in typed else typed.default_root_dir)
        self.checkpoint_path = resolve(typed.ckpt_path, runs, experiment_name(typed))
        if self.checkpoint_path is None:
            self._parse(args)
            self._options.ckpt_path = None
            return
        stored = StoredOptions(self.checkpoint_path, read_header(self.checkpoint_path))
        self._set_defaults(stored.model)
        if not typed.data:
            stored.require_data_class()
        if stored.importable:
            self._set_defaults({"data": stored.data()})
        self._parse(args)
        same_data = self._options.data.class_path == stored.data_class
        if stored.data_class and same_data != stored.importable:
            # Another class must not take over these options; a class from elsewhere may, now that the user named it.
            self._set_defaults({"data": stored.data() if same_data else DEFAULT_DATA})
            self._parse(args)
        stored.report(self.config["subcommand"], getattr(typed, "names", ()), same_data)
        self._options.ckpt_path = str(self.checkpoint_path)
        rank_zero_info(f"checkpoint: {describe(self.checkpoint_path)}")

    def _parse(self, args: ArgsType) -> None:
        super().parse_arguments(self.parser, args)
        expand_options(self._options)

    @property
    def _command_line(self) -> str | None:
        args = sys.argv[1:] if self._args is None else self._args
        return shlex.join(["python", "-m", __package__.partition(".")[0], *args]) if isinstance(args, list) else None

    def _set_defaults(self, defaults: dict[str, object]) -> None:
        for parser in self.command_parsers.values():
            parser.set_defaults(defaults)

    @property
    def _options(self) -> Namespace:
        options: Namespace = self.config[self.config["subcommand"]]
        return options

    @override
    def _parse_ckpt_path(self) -> None:
        """Do nothing: LightningCLI's own version (private) would let the checkpoint override arguments."""

    # Construction

    @override
    def before_instantiate_classes(self) -> None:
        options = self._options
        launch.check_slurm(options.trainer.devices, options.trainer.num_nodes)
        torch.set_float32_matmul_precision(options.matmul_precision)
        if options.auto_precision and options.trainer.precision is None:
            options.trainer.precision = "bf16-mixed" if environment.has_native_bf16() else "32-true"
        self._set_modes(as_list(options.trainer.callbacks))

    def _set_modes(self, given: list[Namespace]) -> None:
        """Let the mode of callbacks such as EarlyStopping follow from the metric, unless it is given."""
        modes = [direction(str(callback.get("init_args.monitor"))) for callback in given]
        if all(mode in (None, callback.get("init_args.mode")) for mode, callback in zip(modes, given, strict=True)):
            return
        args = self._args if isinstance(self._args, list) else None
        typed = self.parser.parse_args(args, defaults=False).get(f"{self.subcommand}.trainer.callbacks")
        for mode, callback, options in zip(modes, given, as_list(typed), strict=False):
            if mode and options.get("init_args.mode") is None and "mode" in callback.init_args:
                callback.init_args.mode = mode

    @override
    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except ValueError as error:  # jsonargparse wraps whatever a class raises; keep the message of a dataset
            if isinstance(error.__cause__, MisconfigurationException):
                raise error.__cause__ from None
            raise

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        options = self.config_init[self.subcommand]
        given = options.trainer
        experiment = experiment_name(options) or self._options.data.class_path.rpartition(".")[2].lower()
        run = RunFolder(given.default_root_dir, experiment, self.checkpoint_path)
        if given.logger in (None, True):
            kwargs["logger"] = SilentLogger(run) if self.subcommand == "predict" else RunLogger(run)
        plugins = as_list(given.plugins)
        if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            kwargs["plugins"] = [*plugins, AtomicCheckpointIO()]
        own = run_callbacks(str(self.subcommand), options, self._command_line)
        kwargs["callbacks"] = [*as_list(given.callbacks), *own]
        kwargs["enable_model_summary"] = False  # callbacks.NetworkSummary replaces it
        try:
            trainer = super().instantiate_trainer(**kwargs)
        except MisconfigurationException as error:
            if "interactive" in str(error):  # the strategy cannot start its processes from a notebook
                raise launch.notebook_error(str(self.subcommand)) from error
            raise
        except (ValueError, TypeError, ImportError) as error:  # Lightning's checks of accelerator, strategy and so on
            needs_gpu = "requires a GPU" in str(error)
            hint = " On a CPU FSDP2 works: --config configs/strategy/fsdp2.yaml." if needs_gpu else ""
            raise MisconfigurationException(f"{error}{hint}") from error
        except RuntimeError as error:
            if "more than one stateful callback" not in str(error):
                raise
            hint = "Remove one of them; --trainer.max_time adds a Timer."
            raise MisconfigurationException(f"{error} {hint}") from error
        chosen = any(isinstance(logger, TensorBoardLogger) for logger in as_list(given.logger)[:1])
        if isinstance(trainer, RunTrainer) and not given.fast_dev_run and not chosen:
            trainer.run = run
        skip_empty_hooks(trainer.callbacks)  # type: ignore[attr-defined]
        return trainer

    @override
    def after_instantiate_classes(self) -> None:
        """Pass what the model knows to the data, and refuse what the Trainer cannot run."""
        self.model.fetch_weights = self.checkpoint_path is None
        self.datamodule.known_classes = self.model.class_names
        with suppress(MisconfigurationException):  # an unknown --model.name is reported when the network is needed
            self.datamodule.input_size, self.datamodule.crop_pct = self.model.input_size, self.model.crop_pct
        launch.check_notebook(self.trainer, str(self.subcommand))
        launch.check_port(self.trainer)
        launch.check_shards(self.trainer, self.checkpoint_path)

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        with launch.end_together(self.trainer):  # private: LightningCLI has no public hook around a whole command
            super()._run_subcommand(subcommand)

    def before_fit(self) -> None:
        """Refuse what cannot work, on one process only, because all others would print the same."""
        if self.trainer.is_global_zero:
            preflight.check_fit(self.trainer, self.model, self.datamodule, self.checkpoint_path)
        start_run(self.trainer)

    def before_validate(self) -> None:
        """Create a run folder for a checkpoint that is not in one."""
        start_run(self.trainer)

    before_test = before_predict = before_validate
