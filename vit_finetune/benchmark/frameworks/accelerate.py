"""Hugging Face Accelerate: your own loop, with model, optimizer and loaders wrapped by ``prepare``.

It does for you: moving the model and the batches, autocast around ``forward``, scaling in ``accelerator.backward``,
unscaling and skipping in ``optimizer.step``, setting the epoch of the sampler, DDP, FSDP and DeepSpeed by an external
configuration file (``accelerate config``), gathering results of several processes without padding samples.

It leaves to you: the loop, logging, saving, evaluation, and gradient accumulation as a context
(``accelerator.accumulate``).

Good to know: a prepared loader reads one batch ahead, to detect the last one. A PyTorch scheduler can be prepared too
and is then skipped when the scaler skips a step; timm's schedule is a function of the step number and is used as it is.
Settings are a singleton: a second ``Accelerator`` in the same process cannot have another precision. Environment
variables and the file written by ``accelerate config`` change what the constructor does not set.

Mixed precision: autocast covers the model, whose outputs are converted to float32; use ``accelerator.autocast()`` for a
loss with computations of its own. ``mixed_precision="fp16"`` includes a ``GradScaler`` on a GPU. On a CPU, version 1.15
accepts it without a warning and trains in float32.
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator

from vit_finetune.benchmark.frameworks.task import Task, record

MODES = {"32-true": "no", "bf16-mixed": "bf16", "16-mixed": "fp16"}


def run(task: Task) -> None:
    """Train and evaluate."""
    accelerator = Accelerator(mixed_precision=MODES[task.precision], cpu=task.device == "cpu")
    data = task.data()
    model, optimizer = task.build()
    schedule = task.schedule(optimizer)
    model, optimizer, train, val = accelerator.prepare(model, optimizer, data.train_dataloader(), data.val_dataloader())

    step = 0
    for _ in range(task.epochs):
        for stored in train:
            data.seed_step(accelerator.device, step)
            batch = data.augment(stored)
            loss = F.cross_entropy(model(batch["image"]), batch["label"])
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            schedule.step_update(step)
            record.losses.append(loss.detach())

    model.eval()
    correct = total = 0
    with torch.inference_mode():
        for batch in val:
            predictions, labels = accelerator.gather_for_metrics((model(batch["image"]).argmax(-1), batch["label"]))
            correct += int((predictions == labels).sum())
            total += len(labels)
    record.accuracy = correct / total
