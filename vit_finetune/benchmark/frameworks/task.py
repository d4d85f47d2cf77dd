"""What the five frameworks share: network, weights, data, optimizer and schedule, all from this project's functions."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim import Optimizer

from vit_finetune.benchmark.frameworks.record import TimedShapes
from vit_finetune.model import optim, vit

Precision = Literal["32-true", "bf16-mixed", "16-mixed"]

NAME = "vit_tiny_patch16_224"
CLASSES = 10
PIXELS = 32
HELD_OUT = 200  # validation images
WEIGHT_DECAY, WARMUP, MIN_LR = 0.05, 0.1, 1e-6  # as in ViTClassifier


@dataclass(frozen=True)
class Task:
    """A fine-tune of generated images, described by plain values so that another process can be told of it.

    Args:
        weights: File of the initial weights, see :meth:`write_weights`.
        timm_kwargs: The shape of the network.
        steps: Optimizer steps an epoch.
        epochs: Each in another order of the images.
        batch: Images a step.
        lr: Peak learning rate of the head.
        layer_decay: Factor on the rate from each block to the one below it.
        precision: As in ``--trainer.precision``.
        device: ``cpu`` or ``cuda``.
        seed: Of shuffling and augmentation.
        record: Note loss and accuracy; off where only time is measured, because our command line needs a callback
            for it that its users don't have.
    """

    weights: str
    timm_kwargs: dict[str, Any] = field(default_factory=dict)
    steps: int = 100
    epochs: int = 1
    batch: int = 8
    lr: float = 3e-4
    layer_decay: float | None = 0.75
    precision: Precision = "32-true"
    device: str = "cpu"
    seed: int = 0
    record: bool = True

    def write_weights(self) -> None:
        """Draws the initial weights from the seed and writes them, once for all frameworks."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            net = vit.build(NAME, CLASSES, PIXELS, 0.0, self.timm_kwargs)
        Path(self.weights).parent.mkdir(parents=True, exist_ok=True)
        save_file(net.state_dict(), self.weights)

    @property
    def data_options(self) -> dict[str, Any]:
        """Arguments of :class:`TimedShapes`."""
        size = self.steps * self.batch + HELD_OUT
        return {"train_size": size, "val_fraction": HELD_OUT / size, "batch_size": self.batch}

    def data(self) -> TimedShapes:
        """Draws the images."""
        data = TimedShapes(**self.data_options)
        data.setup("fit")
        return data

    def build(self) -> tuple[nn.Module, Optimizer]:
        """Builds the model and its optimizer.

        Returns:
            A module from uint8 ``(B, 3, H, W)`` to logits ``(B, 10)`` on the CPU, and fused AdamW with the parameter
            groups of layer decay.
        """
        net = vit.build(NAME, CLASSES, PIXELS, 0.0, self.timm_kwargs)
        vit.load_local_weights(net, self.weights)
        vit.choose_attention(net, torch.device(self.device), self.precision)
        rules = optim.parameter_rules(net, WEIGHT_DECAY, self.layer_decay)
        optimizer = optim.build_optimizer(net, rules, "adamw", self.lr, fused=True)
        preprocess = vit.preprocessing(vit.data_config(NAME, PIXELS, self.timm_kwargs, None, None))
        return nn.Sequential(preprocess, net), optimizer

    def schedule(self, optimizer: Optimizer) -> optim.WarmupCosine:
        """Builds the schedule; its ``step_update(n)`` sets the rates after ``n`` optimizer steps."""
        return optim.WarmupCosine(optimizer, self.steps * self.epochs, WARMUP, MIN_LR)
