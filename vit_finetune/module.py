"""The LightningModule: one shared step, losses and metrics, and what a checkpoint holds.

To make it yours, edit this file, or subclass :class:`ViTClassifier` and pass your class to a Trainer. The three changes
that people ask for most, each with the lines to write:

Log a metric of your own; to monitor it, add its name to ``METRICS`` below::

    class WithEntropy(ViTClassifier):
        def validation_step(self, batch, batch_idx):
            outputs = super().validation_step(batch, batch_idx)  # logits, labels, index; without padding samples
            entropy = torch.distributions.Categorical(logits=outputs["logits"]).entropy()
            self.log("val/entropy", entropy.mean(), on_epoch=True, batch_size=len(entropy), sync_dist=True)
            return outputs

Change the loss; ``target`` holds class indices ``(B,)``, or probabilities ``(B, C)`` with mixup or cutmix, and
``self.class_weights`` the weights of ``--model.class_weights``, or ``None``::

    class WithPolyLoss(ViTClassifier):
        def training_loss(self, logits, target):
            cross_entropy = F.cross_entropy(logits, target, reduction="none")
            return (cross_entropy + 1 - torch.exp(-cross_entropy)).mean()  # Leng et al. 2022, arXiv:2204.12511

Swap the network for any module from normalized images ``(B, 3, H, W)`` to logits ``(B, C)``::

    class WithResNet(ViTClassifier):
        def build_network(self, pretrained):
            return timm.create_model("resnet18", pretrained=pretrained, num_classes=len(self.class_names))
"""

import inspect
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import FSDPPrecision, MixedPrecision
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from typing_extensions import Self, override

import vit_finetune
from vit_finetune.checkpoint import Checkpoint, begin_next_epoch, make_plain, public_items, read_header
from vit_finetune.data import position
from vit_finetune.data.datasets import Batch
from vit_finetune.evaluation import calibration
from vit_finetune.evaluation.find_checkpoint import find, monitored_now
from vit_finetune.evaluation.metrics import PredictionCollector, StageMetrics, StepLogger, require_finite
from vit_finetune.model import class_weights, gradients
from vit_finetune.model.config import ViTConfig
from vit_finetune.model.ema import WeightEMA
from vit_finetune.model.preprocess import Preprocess

# timm takes a third of a second to import, and `--help` reads this file. Modules that use timm are therefore imported
# where a network is built.

METRICS = (*(f"{stage}/{name}" for stage in ("train", "val") for name in ("loss", "acc", "acc_top5")), "val/acc_macro")
"""Metrics that fit logs per epoch and that callbacks can monitor; top-5 accuracy needs more than five classes."""


class ViTClassifier(LightningModule):
    """A Vision Transformer with its preprocessing, fine-tuned as a classifier.

    Args:
        name: Any Vision Transformer of timm, with the tag of its pretrained weights.
        img_size: Size of the input in pixels, one number for a square, or height and width such as [32, 64]; images
            are resized to it on the device. Default: the size of the pretrained weights.
        pretrained: Start from the pretrained weights of that name, downloaded once.
        weights: Start from this local file instead: .safetensors, .pth, or a checkpoint of this project; or from
            "embedded", the weights bundled with this package for the network of configs/quickstart.yaml.
        timm_kwargs: Extra arguments of the network, such as {depth: 6, embed_dim: 96, num_heads: 3, patch_size: 4}.
        class_names: Class names in the order of the labels. Default: those of the dataset, or of the checkpoint.
        mean: Channel means on a 0-1 scale. Default: those the weights were trained with.
        std: Channel standard deviations on a 0-1 scale. Default: those the weights were trained with.
        drop_path: Stochastic depth: probability of skipping the last block; it decreases linearly to 0 at the first.
        label_smoothing: Label smoothing of the training loss. Validation and test loss are plain cross-entropy.
        class_weights: Weights of the classes in the training loss: balanced for the inverse of their numbers of
            training images, or a list of one positive number per class, in the order of the class names. Validation
            and test loss have no weights. Default: none.
        optimizer: Any first-order optimizer of timm.
        lr: Peak learning rate. With layer_decay it is the learning rate of the head; lower blocks get less.
        lr_for_batch: Global batch size that lr is meant for. Another one (batch size per device times devices times
            accumulation) scales lr: linearly for sgd, by the square root for adaptive optimizers. Default: no scaling.
        weight_decay: Weight decay of weight matrices; norms, biases, tokens and position embeddings have none.
        layer_decay: Factor on the learning rate from each block to the one below it; null for one learning rate.
        warmup: Fraction of all optimizer steps used for linear warm-up.
        min_lr: Learning rate at the end of the cosine schedule.
        head_lr_scale: Extra factor on the learning rate of the head.
        freeze_backbone: Train only the head (linear probe).
        unfreeze_by: Gradual unfreezing: train only the head in epoch 0, then unfreeze blocks from the top down, and
            train everything from this epoch on.
        lora_rank: LoRA: train only the head and low-rank updates of this rank to the attention matrices, such as 8.
        grad_checkpointing: Recompute activations in the backward pass: less memory, more time.
        compile: Compile the network with torch.compile. The first step takes minutes.
        ema: Decay of an exponential moving average (EMA) of the weights, at least 0 and below 1, such as 0.999. The EMA
            weights are validated, saved in checkpoints, tested and exported. Default: no EMA.
        tta: Test-time augmentation of validate, also within fit, test and predict: flip averages the probabilities of
            each image and its horizontal mirror image, in twice the time. Training and exported files do not use it.
            Default: none.
    """

    net: nn.Module | None
    preprocess: Preprocess
    train_metrics: StageMetrics
    val_metrics: StageMetrics
    test_metrics: StageMetrics
    val_predictions: PredictionCollector

    def __init__(
        self,
        name: str = "vit_base_patch16_224.augreg_in21k",
        img_size: int | list[int] | None = None,
        pretrained: bool = True,
        weights: str | None = None,
        timm_kwargs: dict[str, Any] | None = None,
        class_names: list[str] | None = None,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        drop_path: float = 0.0,
        label_smoothing: float = 0.0,
        class_weights: Literal["balanced"] | list[float] | None = None,
        optimizer: str = "adamw",
        lr: float = 1.5e-4,
        lr_for_batch: int | None = None,
        weight_decay: float = 0.05,
        layer_decay: float | None = 0.75,
        warmup: float = 0.1,
        min_lr: float = 1e-6,
        head_lr_scale: float = 1.0,
        freeze_backbone: bool = False,
        unfreeze_by: int | None = None,
        lora_rank: int | None = None,
        grad_checkpointing: bool = False,
        compile: bool = False,
        ema: float | None = None,
        tta: Literal["flip"] | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        make_plain(self.hparams)
        self.fetch_weights = True  # False when a checkpoint is about to fill the network
        self.net = None
        self.temperature = 1.0  # see evaluation/calibration.py
        self.class_weights: Tensor | None = None  # of the training loss, set where training starts
        self.ema_callback: WeightEMA | None = None
        self.train_log = StepLogger()

    @classmethod
    def load(cls, source: str | os.PathLike[str] = "best", runs: str | os.PathLike[str] = "runs") -> "ViTClassifier":
        """Load a trained model on the CPU, in evaluation mode, without any download.

        ``model.probabilities(model(images))`` returns the class probabilities of uint8 images ``(B, 3, h, w)`` of any
        size, in the order of ``model.class_names``.

        Args:
            source: A run folder, a folder of runs (the newest is taken), a checkpoint file, ``best`` or ``last``. Of a
                folder, the best weights are loaded, or the last ones if there was no validation.
            runs: Folder in which ``best`` and ``last`` are searched.

        Raises:
            MisconfigurationException: The checkpoint does not exist or cannot be read.
        """
        return cls.from_checkpoint(find(source, Path(runs))).eval()

    @classmethod
    def from_checkpoint(cls, path: Path, **options: object) -> Self:
        """Load a checkpoint on the CPU, also one of another version.

        Lightning's ``load_from_checkpoint`` imports what the file names and fails if this class has lost an option.

        Args:
            path: The checkpoint.
            options: Override those of the checkpoint.

        Raises:
            MisconfigurationException: The checkpoint cannot be read.
        """
        checkpoint = read_header(path)
        if path.is_dir():
            raise MisconfigurationException(
                f"{path} is a sharded checkpoint. Consolidate it first: python -m vit_finetune.checkpoint {path}"
            )
        stored, known = public_items(checkpoint.get("hyper_parameters", {})), inspect.signature(cls).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
        if unknown := [] if takes_all else [f"{name}={stored.pop(name)!r}" for name in [*stored] if name not in known]:
            rank_zero_warn(f"{path} was trained with options that are left out: {', '.join(unknown)}.")
        model = cls(**{**stored, **options})
        model.configure_model()
        model.on_load_checkpoint(checkpoint)
        model.load_state_dict(checkpoint["state_dict"])
        return model

    # The network

    @property
    def class_names(self) -> list[str] | None:
        """Class names in the order of the labels; ``None`` until data or a checkpoint is loaded."""
        names: list[str] | None = self.hparams["class_names"]
        return names

    @property
    def config(self) -> ViTConfig:
        """The hyperparameters that define the network, its input and its memory."""
        return ViTConfig.from_hparams(self.hparams)

    @property
    def preprocessing(self) -> dict[str, Any]:
        """Size, mean, standard deviation and interpolation of the input."""
        from vit_finetune.model import vit

        return vit.data_config(self.config)

    @property
    def input_size(self) -> tuple[int, int]:
        """Height and width of the input in pixels."""
        size: tuple[int, int] = self.preprocessing["size"]
        return size

    @property
    def crop_pct(self) -> float:
        """Fraction of height and width that remains where an image is cropped for evaluation, as for its weights."""
        from vit_finetune.model import vit

        return vit.crop_pct(self.config)

    @property
    def attached_trainer(self) -> Trainer | None:
        """The Trainer, ``None`` when the module is used without one."""
        return self._trainer  # private: the public property raises where there is no Trainer

    @override
    def setup(self, stage: str) -> None:
        """Take the class names from the data module before the network is built, and for fit the class weights.

        Raises:
            MisconfigurationException: The classes of model and data differ, or the class weights do not fit them.
        """
        self._update_name()
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        names = getattr(data, "class_names", None)
        if names is not None and self.class_names not in (None, list(names)):
            raise MisconfigurationException(
                f"The model's classes are {', '.join(self.class_names or [])}; the data's are {', '.join(names)}."
            )
        if names is not None:
            self.hparams["class_names"] = list(names)
        if stage == "fit":
            # From the whole training split, so that all processes have the same weights.
            counts = getattr(data, "class_counts", {}).get("train")
            option, device = self.hparams["class_weights"], self.trainer.strategy.root_device
            self.class_weights = class_weights.for_training(option, self.class_names or (), counts, device)

    def _update_name(self) -> None:
        from vit_finetune.model import vit

        old, name = self.hparams["name"], vit.current_name(self.hparams["name"])
        if name != old:
            rank_zero_info(f"--model.name {old} is now called {name}")
            self.hparams["name"] = name

    @override
    def configure_model(self) -> None:
        """Build the network; called by the Trainer, and before the weights of a checkpoint are loaded."""
        from vit_finetune.model import precision, vit

        trainer = self.attached_trainer
        if self.net is None:
            self.net = self._prepare_network(bool(trainer and trainer.state.fn == "fit" and self.fetch_weights))
        if trainer is not None:
            dtype = precision.compute_dtype(precision.trainer_precision(trainer))
            vit.set_attention_kernel(self.net, trainer.strategy.root_device, dtype)

    def build_network(self, pretrained: bool) -> nn.Module:
        """Build the network.

        Args:
            pretrained: Load the pretrained weights of ``name``.

        Returns:
            A module from normalized images ``(B, 3, H, W)`` to logits ``(B, C)``.
        """
        from vit_finetune.model import vit

        return vit.build(self.config, len(self.class_names or ()), pretrained=pretrained)

    def _prepare_network(self, fetch_weights: bool) -> nn.Module:
        """Build the network, then apply weights, freezing, LoRA, sharding and compilation in this order."""
        from vit_finetune.model import local_weights, lora, optim, parallel, vit

        h = self.hparams
        if self.class_names is None:
            raise MisconfigurationException("No class names: set --model.class_names, or use data that has them.")
        net = self.build_network(pretrained=fetch_weights and h["pretrained"] and not h["weights"])
        if fetch_weights and h["weights"]:
            local_weights.load(net, h["weights"])
        if h["freeze_backbone"]:
            vit.freeze_backbone(net)
        if h["lora_rank"]:
            lora.add(net, h["lora_rank"], vit.head_names(net))
        # Before sharding: afterwards names and shapes no longer tell which parameters have weight decay.
        self._rules = optim.parameter_rules(net, h["weight_decay"], h["layer_decay"], h["head_lr_scale"])
        if h["grad_checkpointing"]:
            net.set_grad_checkpointing(True)  # type: ignore[operator]
        if self.device_mesh is not None:
            parallel.shard(net, self.device_mesh)
        if h["compile"]:
            net.compile()  # in place: wrapping would put a prefix before every key of a checkpoint
        self.preprocess = Preprocess(**self.preprocessing)
        classes = len(self.class_names)
        self.train_metrics = StageMetrics(classes)
        self.val_metrics, self.test_metrics = (StageMetrics(classes, macro=True) for _ in range(2))
        self.val_predictions = PredictionCollector()
        return net

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Classify images.

        Args:
            images: uint8, shape ``(B, 3, h, w)``, any size.

        Returns:
            Logits, shape ``(B, C)``, in the precision of the run.
        """
        assert self.net is not None
        logits: Tensor = self.net(self.preprocess(images))
        return logits

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return calibrated probabilities, float32 in the shape of the logits; see evaluation/calibration.py."""
        return (logits.float() / self.temperature).softmax(-1)

    def evaluation_logits(self, images: Tensor) -> Tensor:
        """Classify images as validate, test and predict do: with the test-time augmentation of ``--model.tta``.

        Args:
            images: As for :meth:`forward`.

        Returns:
            Logits, float32 ``(B, C)``; with augmentation the logarithm of the mean probability. The temperature
            applies to these: averaged first, calibrated second (Rahaman and Thiery 2021, arXiv:2007.08792).
        """
        logits: Tensor = self(images).float()
        if self.hparams["tta"] is None:
            return logits
        # A second pass, since a batch of double size could need more memory than training has left.
        mirrored = self(images.flip(-1)).float()
        return torch.logaddexp(logits.log_softmax(-1), mirrored.log_softmax(-1)) - math.log(2)

    def merge_lora(self) -> None:
        """Merge the LoRA updates into the weights, which leaves a plain network with equal predictions."""
        if self.hparams["lora_rank"]:
            from vit_finetune.model import lora

            assert self.net is not None
            lora.merge(self.net)
            self.hparams["lora_rank"] = None

    # Training

    @override
    def configure_callbacks(self) -> list[Callback]:
        """Return the callbacks that options of the model need; called by the Trainer before each command."""
        own: list[Callback] = []
        if self.trainer.state.fn == "fit" and self.hparams["unfreeze_by"]:
            from vit_finetune.model.unfreeze import GradualUnfreeze

            own.append(GradualUnfreeze(self.hparams["unfreeze_by"]))
        if self.trainer.state.fn == "fit" and self.hparams["ema"] is not None:
            self.ema_callback = WeightEMA(self.hparams["ema"])
            own.append(self.ema_callback)
        return own

    def training_loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the mean training loss of a batch, a scalar.

        With class weights, the weighted sum is divided by the number of images, not by the sum of the weights as in
        PyTorch's mean. Each image then counts the same in every batch, and several processes or accumulated batches
        equal one large batch.

        Args:
            logits: float32, shape ``(B, C)``.
            target: Class indices, int64 ``(B,)``; with mixup or cutmix probabilities, float32 ``(B, C)``.
        """
        smoothing = self.hparams["label_smoothing"]
        if self.class_weights is None:
            return F.cross_entropy(logits, target, label_smoothing=smoothing)
        total = F.cross_entropy(logits, target, self.class_weights, label_smoothing=smoothing, reduction="sum")
        return total / len(logits)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss; metrics are computed once per logging interval, which keeps the step cheap."""
        logits = self(batch["image"]).float()
        loss = self.training_loss(logits, batch["target"] if "target" in batch else batch["label"])
        self.train_log.add(loss, logits, batch["label"])
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if self.trainer.is_last_batch or (every and (batch_idx + 1) % every == 0):
            self.train_log.log(self, self.train_metrics, self.global_step)
        return loss

    @override
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Average over the batches that are left where an epoch ends within an accumulation window.

        Lightning has divided the loss by ``accumulate_grad_batches``, however many batches follow.
        """
        window, batches = self.trainer.accumulate_grad_batches, int(self.trainer.num_training_batches)
        rest = batches % window
        if rest and self.trainer.fit_loop.epoch_loop.batch_idx >= batches - rest:
            loss = loss * (window / rest)
        super().backward(loss, *args, **kwargs)

    @override
    def on_train_start(self) -> None:
        """Set the length of the schedule; typed options override the optimizer state of a checkpoint."""
        trainer = self.trainer
        begin_next_epoch(trainer)
        position.skip_trained_batches(trainer)
        for group, options in zip(trainer.optimizers[0].param_groups, self._group_options, strict=True):
            group.update(options, initial_lr=options["lr"])
        steps = int(trainer.estimated_stepping_batches)
        self._schedule.set_length(steps, steps - position.steps_left(trainer) - self.global_step)
        self._schedule.step_update(self.global_step)

    @override
    def on_train_epoch_start(self) -> None:
        self.train_log.clear()

    @override
    def on_train_epoch_end(self) -> None:
        """Log loss and accuracy of the whole epoch."""
        # Steps are left where --trainer.max_steps ended the epoch early.
        self.train_log.log(self, self.train_metrics, self.global_step - 1)
        self.train_metrics.log(self, "train")

    @override
    def configure_optimizers(self) -> Any:
        """Build the optimizer, and the schedule, whose length is set in ``on_train_start``.

        The Trainer's estimate of optimizer steps would set up the loader here, before a checkpoint has restored its
        position.

        Raises:
            MisconfigurationException: Neither epochs nor steps are limited.
        """
        from vit_finetune.model import optim

        trainer, h = self.trainer, self.hparams
        if trainer.max_epochs == -1 and trainer.max_steps == -1:
            raise MisconfigurationException(
                "The schedule needs an end: set --trainer.max_epochs or --trainer.max_steps."
            )
        # Lightning cannot clip the gradients of a fused optimizer under mixed precision.
        scales = isinstance(trainer.precision_plugin, (MixedPrecision, FSDPPrecision))
        clips = bool(trainer.gradient_clip_val) and scales
        fused = not clips and self.device.type in ("cpu", "cuda")
        assert self.net is not None
        lr = optim.scaled_lr(trainer, h["optimizer"], h["lr"], h["lr_for_batch"])
        optimizer = optim.build_optimizer(self.net, self._rules, h["optimizer"], lr, fused)
        self._group_options = [
            {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]
        self._schedule = optim.WarmupCosine(optimizer, h["warmup"], h["min_lr"])
        return [optimizer], [{"scheduler": self._schedule, "interval": "step"}]

    @override
    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Set the learning rate of the next optimizer step."""
        scheduler.step_update(self.global_step)

    @override
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip as the Trainer does, except by norm where FSDP or tensor parallel splits parameters."""
        strategy, by_norm = self.trainer.strategy, gradient_clip_val and gradient_clip_algorithm != "value"
        if by_norm and isinstance(strategy, FSDPStrategy):
            strategy.model.clip_grad_norm_(gradient_clip_val)  # type: ignore[operator,union-attr]
        elif by_norm and self.device_mesh is not None and self.device_mesh["tensor_parallel"].size() > 1:
            assert gradient_clip_val is not None
            gradients.clip_norm([p.grad for p in self.parameters() if p.grad is not None], gradient_clip_val)
        else:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    # Evaluation

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Evaluate a validation batch; return ``logits``, ``labels`` and ``index`` without padding samples."""
        outputs = self._evaluate(self.val_metrics, batch)
        self.val_predictions.update(**outputs)
        return outputs

    @override
    def test_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Evaluate a test batch; return ``logits``, ``labels`` and ``index`` without padding samples."""
        return self._evaluate(self.test_metrics, batch)

    def _evaluate(self, metrics: StageMetrics, batch: Batch) -> dict[str, Tensor]:
        logits = self.evaluation_logits(batch["image"])
        real = batch["index"] >= 0  # padding samples even out the batches of several processes
        logits, labels, index = logits[real], batch["label"][real], batch["index"][real]
        metrics.add(F.cross_entropy(logits, labels, reduction="none"), logits, labels)
        return {"logits": logits, "labels": labels, "index": index}

    @override
    def on_validation_epoch_end(self) -> None:
        """Log loss and accuracy of the validation images; in fit, fit the temperature."""
        if self.trainer.training or self.trainer.validating:
            require_finite(self.trainer, float(self.val_metrics.loss.compute()), "validation")
        self.val_metrics.log(self, "val")
        if self.trainer.state.fn == "fit" and not self.trainer.sanity_checking:
            logits, labels, _ = self.val_predictions.predictions()
            self.temperature = calibration.fit_temperature(logits, labels)
        self.val_predictions.reset()

    @override
    def on_test_epoch_end(self) -> None:
        self.test_metrics.log(self, "test")

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return ``index`` int64 ``(B,)``, -1 for padding samples, and ``probability`` float32 ``(B, C)``."""
        return {"index": batch["index"], "probability": self.probabilities(self.evaluation_logits(batch["image"]))}

    # Checkpoints

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the weights.

        Raises:
            MisconfigurationException: The checkpoint belongs to another network.
        """
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except RuntimeError as error:
            details = "; ".join(line.strip() for line in str(error).splitlines()[1:4])
            raise MisconfigurationException(
                "The checkpoint does not match the network of --model.name, img_size and timm_kwargs. Leave these "
                "options out to use those of the checkpoint, or start a new run from its weights: fit --model.weights "
                f"FILE. {details}"
            ) from error

    @override
    def on_load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Restore the temperature; warn if a resumed run has another training split.

        Raises:
            MisconfigurationException: The checkpoint was trained on other classes.
        """
        stored = checkpoint.get("vit_finetune", {})
        self.temperature = stored.get("temperature", 1.0)
        trained = stored.get("class_names", self.class_names)
        if trained != self.class_names:
            raise MisconfigurationException(
                f"The checkpoint's classes are {', '.join(trained)}; --model.class_names or the data has "
                f"{', '.join(self.class_names or [])}. For new classes start from its weights: fit --model.weights FILE"
            )
        trainer = self.attached_trainer
        if trainer is not None and trainer.state.fn == "fit":
            before = stored.get("split_fingerprint")
            if before != getattr(trainer.datamodule, "split_fingerprint", None):  # type: ignore[attr-defined]
                rank_zero_warn(
                    "The training split is not that of the checkpoint: validation metrics are not comparable."
                )

    @override
    def on_save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Add what makes the file usable by itself: class names, preprocessing, temperature, training split."""
        if self.ema_callback is not None:
            self.ema_callback.save_to(checkpoint)
        datamodule = getattr(self.trainer, "datamodule", None)
        checkpoint["vit_finetune"] = {
            "version": vit_finetune.__version__,
            "class_names": self.class_names,
            "preprocessing": self.preprocessing,
            "temperature": self.temperature,
            "split_fingerprint": getattr(datamodule, "split_fingerprint", None),
            "class_counts": getattr(datamodule, "class_counts", None),
            "monitored": monitored_now(self.trainer),
        }
