"""The LightningModule: one shared step, losses and metrics, and what a checkpoint holds."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins.precision import FSDPPrecision, MixedPrecision
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

import vit_finetune
from vit_finetune.checkpoint import begin_next_epoch, find, make_plain, read_header
from vit_finetune.data.datasets import Batch
from vit_finetune.evaluation import calibration
from vit_finetune.evaluation.metrics import PredictionCollector, StageMetrics, StepLogger, require_finite
from vit_finetune.model import gradients
from vit_finetune.model.ema import WeightEMA
from vit_finetune.model.preprocess import Preprocess

# timm takes a third of a second to import; `--help` reads this file and must not wait for it. What uses timm lives in
# vit.py and optim.py, which are imported where a network is really built.


METRICS = tuple(f"{stage}/{name}" for stage in ("train", "val") for name in ("loss", "acc", "acc_top5"))
"""What a fit logs by epoch; top-5 accuracy where there are more than five classes."""


class ViTClassifier(LightningModule):
    """A Vision Transformer with its preprocessing, fine-tuned as a classifier.

    Args:
        name: Any Vision Transformer of timm, with the tag of its pretrained weights.
        img_size: Side of the input in pixels; images are resized to it on the device. By default the model's own.
        pretrained: Start from the weights of that name, downloaded once.
        weights: Start from this local file instead: .safetensors, .pth, or a checkpoint of this project; or from
            "embedded", weights that come with this package, for the network of configs/quickstart.yaml.
        timm_kwargs: More arguments for the network, such as {depth: 6, embed_dim: 96, num_heads: 3, patch_size: 4}.
        class_names: Names in the order of the labels. By default the data's, or the checkpoint's.
        mean: Channel means on a 0-1 scale; by default those the weights were trained with.
        std: Channel standard deviations on a 0-1 scale; by default those the weights were trained with.
        drop_path: Largest probability that a block is skipped in training (stochastic depth).
        label_smoothing: Share of the training target that is spread over all classes. Validation and test loss are
            plain cross-entropy.
        optimizer: Any optimizer of timm that needs first derivatives only.
        lr: Peak learning rate; with layer_decay that of the head, with each block below at a lower one.
        lr_for_batch: The global batch that lr is meant for. Another one (per device times devices times accumulation)
            scales it: by the ratio for sgd and its relatives, by the square root of the ratio for adaptive optimizers.
            By default lr is taken as it is.
        weight_decay: Weight decay of the weight matrices; norms, biases, tokens and position embeddings have none.
        layer_decay: Factor on the learning rate from each block to the one below it; null for one rate.
        warmup: Share of all optimizer steps spent on linear warm-up.
        min_lr: Learning rate at the end of the cosine.
        head_lr_scale: One more factor on the learning rate of the head.
        freeze_backbone: Train the head only.
        unfreeze_by: Train the head alone in the first epoch, let the blocks join from the top down in equal shares an
            epoch, and train everything from this epoch on, counted from 0.
        lora_rank: Train the head and updates of this rank to the attention matrices only (LoRA); 8 is usual.
        grad_checkpointing: Compute activations twice instead of keeping them: less memory, more time.
        compile: Compile the network with torch.compile; takes minutes before the first step.
        ema: Decay of a moving average of the weights, such as 0.999, below 1. The average is what is validated, kept
            as best and last, tested and exported. By default there is none.
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
        img_size: int | None = None,
        pretrained: bool = True,
        weights: str | None = None,
        timm_kwargs: dict[str, Any] | None = None,
        class_names: list[str] | None = None,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        drop_path: float = 0.0,
        label_smoothing: float = 0.0,
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
    ) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        make_plain(self.hparams)
        self.fresh = True  # False when a checkpoint is about to fill the network, so that no weights are fetched for it
        self.net = None
        self.temperature = 1.0  # see calibration.py
        self.average: WeightEMA | None = None
        self.window = StepLogger()

    @classmethod
    def load(cls, source: str | os.PathLike[str] = "best", runs: str | os.PathLike[str] = "runs") -> "ViTClassifier":
        """Loads a trained model, ready to be asked: on the CPU, in evaluation mode, nothing downloaded.

        ``model.probabilities(model(images))`` answers for uint8 images ``(B, 3, h, w)`` of any size, in the order
        of ``model.class_names``.

        Args:
            source: A run's folder; a folder of runs, whose newest is taken; a checkpoint file; or ``best`` or ``last``.
                Of a folder, the best weights are taken, the last ones where validation was off.
            runs: Where ``best`` and ``last`` are looked for.

        Raises:
            MisconfigurationException: There is no such checkpoint, or it cannot be read.
        """
        path = find(source, Path(runs))
        read_header(path)  # says in words what is wrong with a file
        return cls.load_from_checkpoint(path, map_location="cpu", weights_only=True).eval()

    # The network

    @property
    def class_names(self) -> list[str] | None:
        """Names in the order of the labels; known once data or a checkpoint was seen."""
        names: list[str] | None = self.hparams["class_names"]
        return names

    @property
    def preprocessing(self) -> dict[str, Any]:
        """Size, mean, standard deviation and interpolation of the input."""
        from vit_finetune.model import vit

        return vit.data_config(*(self.hparams[key] for key in ("name", "img_size", "timm_kwargs", "mean", "std")))

    @property
    def input_size(self) -> tuple[int, int]:
        """Height and width of the input in pixels."""
        size: tuple[int, int] = self.preprocessing["size"]
        return size

    def setup(self, stage: str) -> None:
        """Learns the classes from the data before the network is built.

        Raises:
            MisconfigurationException: The model has other classes than the data.
        """
        self._use_current_name()
        names = getattr(self.trainer.datamodule, "class_names", None)  # type: ignore[attr-defined]
        if names is not None and self.class_names not in (None, list(names)):
            raise MisconfigurationException(
                f"The model's classes are {', '.join(self.class_names or [])}; the data's are {', '.join(names)}."
            )
        if names is not None:
            self.hparams["class_names"] = list(names)

    def _use_current_name(self) -> None:
        from vit_finetune.model import vit

        old, name = self.hparams["name"], vit.current_name(self.hparams["name"])
        if name != old:
            rank_zero_info(f"--model.name {old} is now called {name}")
            self.hparams["name"] = name

    def configure_model(self) -> None:
        """Builds the network; called by the Trainer, and when a checkpoint is loaded, before the weights are read."""
        from vit_finetune.model import vit

        trainer = self._trainer
        if self.net is None:
            self.net = self._build_network(fetch_weights=bool(trainer and trainer.state.fn == "fit" and self.fresh))
        if trainer is not None:
            vit.choose_attention(self.net, trainer.strategy.root_device, str(trainer.precision))

    def _build_network(self, fetch_weights: bool) -> nn.Module:
        from vit_finetune.model import optim, vit

        h: Any = self.hparams
        if self.class_names is None:
            raise MisconfigurationException("Give the classes: --model.class_names, or data that has them.")
        from_hub = fetch_weights and h.pretrained and not h.weights
        net = vit.build(h.name, len(self.class_names), h.img_size, h.drop_path, h.timm_kwargs, from_hub)
        if fetch_weights and h.weights:
            vit.load_local_weights(net, h.weights)
        if h.freeze_backbone:
            vit.freeze_backbone(net)
        if h.lora_rank:
            from vit_finetune.model import lora

            lora.add(net, h.lora_rank)
        self._rules = optim.parameter_rules(net, h.weight_decay, h.layer_decay, h.head_lr_scale)
        if h.grad_checkpointing:
            net.set_grad_checkpointing(True)  # type: ignore[operator]
        if self.device_mesh is not None:
            from vit_finetune.model import parallel

            parallel.shard(net, self.device_mesh)
        if h.compile:
            net.compile()  # in place: wrapping would put a prefix before every key of a checkpoint
        self.preprocess = vit.preprocessing(self.preprocessing)
        self.train_metrics, self.val_metrics, self.test_metrics = (
            StageMetrics(len(self.class_names)) for _ in range(3)
        )
        self.val_predictions = PredictionCollector()
        return net

    def forward(self, images: Tensor) -> Tensor:
        """Classifies images.

        Args:
            images: uint8, shape ``(B, 3, h, w)``, any size.

        Returns:
            Logits, shape ``(B, C)``, in the precision of the run.
        """
        assert self.net is not None
        logits: Tensor = self.net(self.preprocess(images))
        return logits

    def probabilities(self, logits: Tensor) -> Tensor:
        """Calibrated probabilities, float32 of the shape of the logits; see :mod:`vit_finetune.evaluation.calibration`."""
        return (logits.float() / self.temperature).softmax(-1)

    def merge_lora(self) -> None:
        """Folds the updates of ``lora_rank`` into the weights: the same answers from a plain network, for export."""
        if self.hparams["lora_rank"]:
            from vit_finetune.model import lora

            assert self.net is not None
            lora.merge(self.net)
            self.hparams["lora_rank"] = None

    # Training

    def configure_callbacks(self) -> list[Callback]:
        """Callbacks that belong to options of the model; asked for by the Trainer before each command."""
        own: list[Callback] = []
        if self.trainer.state.fn == "fit" and self.hparams["unfreeze_by"]:
            from vit_finetune.model.unfreeze import GradualUnfreeze

            own.append(GradualUnfreeze(self.hparams["unfreeze_by"]))
        if self.trainer.state.fn == "fit" and self.hparams["ema"] is not None:
            self.average = WeightEMA(self.hparams["ema"])
            own.append(self.average)
        return own

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Returns the loss; metrics are fed once per logging interval, which keeps the step free of their cost."""
        logits = self(batch["image"]).float()
        # Under mixing the targets are shares of the classes.
        target = batch["target"] if "target" in batch else batch["label"]
        loss = F.cross_entropy(logits, target, label_smoothing=self.hparams["label_smoothing"])
        self.window.add(loss, logits, batch["label"])
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if self.trainer.is_last_batch or (every and (batch_idx + 1) % every == 0):
            self.window.log(self, self.train_metrics, self.global_step)
        return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Makes the last optimizer step of an epoch an average too, where fewer batches than usual are left for it.

        Lightning has divided the loss by ``accumulate_grad_batches``, however many batches follow.
        """
        window, batches = self.trainer.accumulate_grad_batches, int(self.trainer.num_training_batches)
        rest = batches % window
        if rest and self.trainer.fit_loop.epoch_loop.batch_idx >= batches - rest:
            loss = loss * (window / rest)
        super().backward(loss, *args, **kwargs)

    def on_train_start(self) -> None:
        """Gives the schedule its length, and lets what was typed win over the optimizer state of a checkpoint."""
        from vit_finetune.model import optim

        trainer = self.trainer
        begin_next_epoch(trainer)
        for group, options in zip(trainer.optimizers[0].param_groups, self._group_options, strict=True):
            group.update(options, initial_lr=options["lr"])
        steps = int(trainer.estimated_stepping_batches)
        schedule = optim.WarmupCosine(trainer.optimizers[0], steps, self.hparams["warmup"], self.hparams["min_lr"])
        schedule.step_update(self.global_step)
        trainer.lr_scheduler_configs[0].scheduler = schedule  # type: ignore[assignment]

    def on_train_epoch_start(self) -> None:
        """Starts the epoch with an empty window."""
        self.window.clear()

    def on_train_epoch_end(self) -> None:
        """Logs loss and accuracy over the whole epoch."""
        # Something is left where --trainer.max_steps cut the epoch short.
        self.window.log(self, self.train_metrics, self.global_step - 1)
        self.train_metrics.log(self, "train")

    def configure_optimizers(self) -> Any:
        """Builds the optimizer, and a schedule that gets its length in ``on_train_start``.

        The trainer's estimate of optimizer steps, asked for here already, would set up the loader before a checkpoint
        has told it where to go on.

        Raises:
            MisconfigurationException: The run has no end.
        """
        from vit_finetune.model import optim

        trainer = self.trainer
        h: Any = self.hparams
        if trainer.max_epochs == -1 and trainer.max_steps == -1:
            raise MisconfigurationException("A schedule needs an end: --trainer.max_epochs or --trainer.max_steps.")
        # Lightning cannot clip the gradients of a fused optimizer under mixed precision.
        scales = isinstance(trainer.precision_plugin, (MixedPrecision, FSDPPrecision))
        clips = bool(trainer.gradient_clip_val) and scales
        fused = not clips and self.device.type in ("cpu", "cuda")
        assert self.net is not None
        lr = optim.scaled_lr(trainer, h.optimizer, h.lr, h.lr_for_batch)
        optimizer = optim.build_optimizer(self.net, self._rules, h.optimizer, lr, fused)
        self._group_options = [
            {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]
        schedule = optim.WarmupCosine(optimizer, 2, h.warmup, h.min_lr)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Sets the rate for the next optimizer step."""
        scheduler.step_update(self.global_step)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clips as the Trainer does, except by norm where parameters are cut up in a way that it cannot add up."""
        strategy, by_norm = self.trainer.strategy, gradient_clip_val and gradient_clip_algorithm != "value"
        if by_norm and isinstance(strategy, FSDPStrategy):
            strategy.model.clip_grad_norm_(gradient_clip_val)  # type: ignore[operator,union-attr]
        elif by_norm and self.device_mesh is not None and self.device_mesh["tensor_parallel"].size() > 1:
            assert gradient_clip_val is not None
            gradients.clip_norm([p.grad for p in self.parameters() if p.grad is not None], gradient_clip_val)
        else:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    # Evaluation

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Scores held-out images."""
        self.val_predictions.update(*self._score(self.val_metrics, batch))

    def test_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Scores test images; returns ``logits``, ``labels`` and ``index`` for the report, fillers left out."""
        return dict(zip(("logits", "labels", "index"), self._score(self.test_metrics, batch), strict=True))

    def _score(self, scores: StageMetrics, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Counts a batch; returns logits, labels and positions of its images."""
        logits = self(batch["image"]).float()
        real = batch["index"] >= 0  # leaves out the fillers that even out several processes
        logits, labels, index = logits[real], batch["label"][real], batch["index"][real]
        losses = F.cross_entropy(logits, labels, reduction="none")
        scores.add(losses, logits, labels)
        return logits, labels, index

    def on_validation_epoch_end(self) -> None:
        """Logs ``val/loss``, ``val/acc`` and, with more than five classes, ``val/acc_top5``; fits the temperature."""
        if self.trainer.training or self.trainer.validating:
            require_finite(self.trainer, float(self.val_metrics.loss.compute()), "validation")
        self.val_metrics.log(self, "val")
        if self.trainer.state.fn == "fit" and not self.trainer.sanity_checking:
            logits, labels, _ = self.val_predictions.compute()
            self.temperature = calibration.fit_temperature(logits, labels)
        self.val_predictions.reset()

    def on_test_epoch_end(self) -> None:
        """Logs the same for ``test/``."""
        self.test_metrics.log(self, "test")

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Returns ``index`` int64 ``(B,)``, -1 for fillers, and ``probability`` float32 ``(B, C)``."""
        return {"index": batch["index"], "probability": self.probabilities(self(batch["image"]))}

    # Checkpoints

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Fills the network.

        Raises:
            MisconfigurationException: The tensors are those of another network.
        """
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except RuntimeError as error:
            details = "; ".join(line.strip() for line in str(error).splitlines()[1:4])
            raise MisconfigurationException(
                "The checkpoint does not fit the network that --model.name, img_size and timm_kwargs describe. Leave "
                "them out to take the checkpoint's, or start anew from its weights by fit --model.weights FILE. "
                f"{details}"
            ) from error

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Reads the temperature; says when a resumed run would train on images that were held out before.

        Raises:
            MisconfigurationException: The checkpoint was trained on other classes.
        """
        stored = checkpoint.get("vit_finetune", {})
        self.temperature = stored.get("temperature", 1.0)
        trained = stored.get("class_names", self.class_names)
        if trained != self.class_names:
            raise MisconfigurationException(
                f"The checkpoint's classes are {', '.join(trained)}; --model.class_names or the data asks for "
                f"{', '.join(self.class_names or [])}. For new classes start from its weights: fit --model.weights FILE"
            )
        trainer = self._trainer
        if trainer is not None and trainer.state.fn == "fit":
            before = stored.get("split_fingerprint")
            if before != getattr(trainer.datamodule, "split_fingerprint", None):  # type: ignore[attr-defined]
                rank_zero_warn("The training images are not those of the checkpoint: validation is not comparable.")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what makes the file usable by itself: classes, input format, which images were trained on."""
        if self.average is not None:
            self.average.enter(checkpoint)
        datamodule = getattr(self.trainer, "datamodule", None)
        checkpoint["vit_finetune"] = {
            "version": vit_finetune.__version__,
            "class_names": self.class_names,
            "preprocessing": self.preprocessing,
            "temperature": self.temperature,
            "split_fingerprint": getattr(datamodule, "split_fingerprint", None),
            "class_counts": getattr(datamodule, "class_counts", None),
        }
