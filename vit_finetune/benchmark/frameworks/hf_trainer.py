"""The Hugging Face Trainer: no loop; you provide a model that returns its own loss, and about a hundred settings.

It does for you: everything that Accelerate does, on which it is built, and the loop, logging, evaluation, saving,
resuming.

It leaves to you a model whose ``forward`` takes the batch's keys as arguments and returns a dictionary with ``loss``,
and defaults that may not be what you want. In this comparison these mattered:

- ``max_grad_norm`` is 1.0: gradients are clipped unless you set it to 0.
- Optimizer and schedule are its own: AdamW at 5e-5 without weight decay and warm-up, with linear decay to zero. Another
  optimizer is passed in ``optimizers``. Another schedule must be a PyTorch scheduler, and is not stepped when the loss
  scaler skips a step, while timm's is a function of the step number. So the schedule is ``constant`` here, and a
  callback sets the learning rates before each step.
- Batches are collated from single images, without columns that ``forward`` has no argument for. Our loaders return
  whole batches, so the methods that create loaders are overridden. Their loaders must go through
  ``accelerator.prepare``, which sets the epoch of the sampler.
- There is no hook for augmentation on the device; ``training_step`` is overridden for it.
- It saves every 500 steps (``save_strategy``), seeds the process with 42 (``seed``), and before version 5 reports to
  every installed tracker (``report_to``).
- It uses a GPU if there is one, and all of them by ``DataParallel`` (``use_cpu``, ``CUDA_VISIBLE_DEVICES``).
- It checks every loss and replaces NaN and inf in its log (``logging_nan_inf_filter``), which makes the CPU wait for
  the GPU at each step. This is left on, as it is for users who have not changed it.

Mixed precision: ``bf16=True`` or ``fp16=True``, then as in Accelerate, including float16 on a CPU.
"""

import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import EvalPrediction, Trainer, TrainerCallback, TrainingArguments
from typing_extensions import override

from vit_finetune.benchmark.frameworks.task import Task, TimedShapes, record
from vit_finetune.model.optim import WarmupCosine


class WithLoss(nn.Module):
    """The model in the form that the Trainer expects."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: torch.Tensor, label: torch.Tensor, index: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the mean loss and the logits ``(B, C)``."""
        logits = self.model(image).float()
        return {"loss": F.cross_entropy(logits, label), "logits": logits}


class Schedule(TrainerCallback):
    """Set the learning rates before each step."""

    def __init__(self, schedule: WarmupCosine) -> None:
        self.schedule = schedule

    @override
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.schedule.step_update(state.global_step)


class ImageTrainer(Trainer):
    """Trainer with whole batches from our loaders, augmented on the device."""

    data: TimedShapes

    @override
    def get_train_dataloader(self) -> Any:
        return self.accelerator.prepare(self.data.train_dataloader())

    @override
    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self.accelerator.prepare(self.data.val_dataloader())

    @override
    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        # Private, but the place where the Trainer itself moves a batch to its device.
        batch = self._prepare_inputs(inputs)
        self.data.seed_step(self.args.device, self.state.global_step)
        loss: torch.Tensor = super().training_step(model, self.data.augment(batch), *args, **kwargs)
        record.losses.append(loss)
        return loss


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Return the fraction of correct predictions."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def run(task: Task) -> None:
    """Train and evaluate."""
    model, optimizer = task.build()
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
        callbacks = [Schedule(task.schedule(optimizer))]
        trainer = ImageTrainer(
            WithLoss(model), options, optimizers=(optimizer, None), callbacks=callbacks, compute_metrics=accuracy
        )
        trainer.data = task.data()
        trainer.train()
        record.accuracy = trainer.evaluate()["eval_accuracy"]
