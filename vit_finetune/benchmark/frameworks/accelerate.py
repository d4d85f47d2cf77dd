"""Hugging Face Accelerate: your loop again, with its objects wrapped by ``prepare``.

It does for you: moving the model and the batches, autocast around ``forward``, scaling in ``accelerator.backward``,
unscaling and skipping in ``optimizer.step``, telling the sampler of each epoch, DDP, FSDP and DeepSpeed by an outside
configuration file (``accelerate config``), gathering results of several processes without what padding repeated.

It leaves to you: the loop, logging, when to save, evaluation, and accumulation as a context
(``accelerator.accumulate``).

To know: a prepared loader reads one batch ahead, to know which is the last. A schedule of PyTorch can be prepared too
and is then skipped when the scaler skips a step; timm's counts steps by itself and stays as it is. Settings are a
singleton: a second ``Accelerator`` in one process cannot have another precision. Environment variables and the file
that ``accelerate config`` wrote change what the constructor does not fix.

Mixed precision: autocast covers the model, whose outputs come back in float32; ``accelerator.autocast()`` is there for
a loss that has arithmetic of its own. ``mixed_precision="fp16"`` brings a ``GradScaler`` on a GPU. On a CPU
version 1.15 accepts it, says nothing, and trains in float32.
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator

from vit_finetune.benchmark.frameworks.record import accuracies, losses
from vit_finetune.benchmark.frameworks.task import Task

MODES = {"32-true": "no", "bf16-mixed": "bf16", "16-mixed": "fp16"}


def run(task: Task) -> None:
    """Trains and evaluates."""
    accelerator = Accelerator(mixed_precision=MODES[task.precision], cpu=task.device == "cpu")
    data = task.data()
    model, optimizer = task.build()
    schedule = task.schedule(optimizer)
    model, optimizer, train, val = accelerator.prepare(model, optimizer, data.train_dataloader(), data.val_dataloader())

    step = 0
    for _ in range(task.epochs):
        for stored in train:
            batch = data.augment(stored, step)
            loss = F.cross_entropy(model(batch["image"]), batch["label"])
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            schedule.step_update(step)
            losses.append(loss.detach())

    model.eval()
    right = total = 0
    with torch.inference_mode():
        for batch in val:
            answers, labels = accelerator.gather_for_metrics((model(batch["image"]).argmax(-1), batch["label"]))
            right += int((answers == labels).sum())
            total += len(labels)
    accuracies.append(right / total)
