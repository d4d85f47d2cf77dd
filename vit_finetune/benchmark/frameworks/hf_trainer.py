"""The Hugging Face Trainer: no loop; you hand over a model that returns its own loss, and about a hundred settings.

It does for you: what Accelerate does, on which it is built, and the loop, logging, evaluation, saving, resuming.

It leaves to you a model whose ``forward`` takes the batch's keys as arguments and returns a dictionary with ``loss``,
and the defaults that are in your way. Here these were:

- ``max_grad_norm`` is 1.0: gradients are clipped unless you say 0.
- Optimizer and schedule are its own: AdamW at 5e-5 without weight decay and warm-up, falling linearly to zero. Another
  optimizer is passed in ``optimizers``. Another schedule must be one of PyTorch's, and is not stepped where the loss
  scaler skipped a step, while timm's is a function of the step number. So the schedule is ``constant`` here, and a
  callback sets the rates before each step.
- Batches are collated from single images, without columns that ``forward`` has no argument for. Our loaders have
  whole batches, so the methods that make loaders are overridden. What they return must go through
  ``accelerator.prepare``, or nobody tells the sampler of the epoch.
- Augmentation on the device has no place of its own; ``training_step`` is overridden for it.
- It saves every 500 steps (``save_strategy``), seeds the process with 42 (``seed``), and before version 5 reports to
  every tracker that is installed (``report_to``).
- It takes a GPU if there is one, and all there are by ``DataParallel`` (``use_cpu``, ``CUDA_VISIBLE_DEVICES``).
- It looks at every loss and replaces one that is not a number in its log (``logging_nan_inf_filter``), which makes a
  GPU wait at each step. Left as it is: a user who does not know of it has it.

Mixed precision: ``bf16=True`` or ``fp16=True``, then as in Accelerate, float16 on a CPU included.
"""

import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import EvalPrediction, Trainer, TrainerCallback, TrainingArguments

from vit_finetune.benchmark.frameworks.record import TimedShapes, accuracies, losses
from vit_finetune.benchmark.frameworks.task import Task
from vit_finetune.model.optim import WarmupCosine


class WithLoss(nn.Module):
    """The model in the form that the Trainer asks for."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: torch.Tensor, label: torch.Tensor, index: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the mean loss and the logits ``(B, C)``."""
        logits = self.model(image).float()
        return {"loss": F.cross_entropy(logits, label), "logits": logits}


class Schedule(TrainerCallback):
    """Sets the rates for each step."""

    def __init__(self, schedule: WarmupCosine) -> None:
        self.schedule = schedule

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called with the number of steps done."""
        self.schedule.step_update(state.global_step)


class ImageTrainer(Trainer):
    """With whole batches from our loaders, augmented on the device."""

    data: TimedShapes

    def get_train_dataloader(self) -> Any:
        """Returns shuffled batches."""
        return self.accelerator.prepare(self.data.train_dataloader())

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Returns held-out images."""
        return self.accelerator.prepare(self.data.val_dataloader())

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Augments, then goes on as always; returns the loss."""
        batch = self.data.augment(self._prepare_inputs(inputs), self.state.global_step)
        loss: torch.Tensor = super().training_step(model, batch, *args, **kwargs)
        losses.append(loss)
        return loss


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Share of right answers."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def run(task: Task) -> None:
    """Trains and evaluates."""
    model, optimizer = task.build()
    schedule = task.schedule(optimizer)
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            output_dir=folder,
            num_train_epochs=task.epochs,
            bf16=task.precision == "bf16-mixed",
            fp16=task.precision == "16-mixed",
            use_cpu=task.device == "cpu",
            seed=task.seed,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            label_names=["label"],
            prediction_loss_only=False,
            per_device_eval_batch_size=task.batch,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer = ImageTrainer(
            WithLoss(model),
            options,
            optimizers=(optimizer, None),
            callbacks=[Schedule(schedule)],
            compute_metrics=accuracy,
        )
        trainer.data = task.data()
        trainer.train()
        accuracies.append(trainer.evaluate()["eval_accuracy"])
