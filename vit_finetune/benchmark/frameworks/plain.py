"""Plain PyTorch: nothing is done for you, and nothing is hidden.

You write the loop: epochs, moving batches to the device, forward, backward, the optimizer's and the schedule's step,
switching between training and evaluation. You also have to know the traps: the sampler must be told of each epoch or
every epoch has the same order, and ``loss.item()`` in a step makes a GPU wait for the host.

Mixed precision is two tools that you combine yourself:

- ``torch.autocast`` runs matrix products in 16 bits and what needs range or accuracy (softmax, norms, losses) in 32.
  Weights, their gradients and optimizer state stay in 32 bits. It covers forward pass and loss only; backward runs each
  operation in the type that its forward had.
- ``torch.amp.GradScaler`` is for float16 alone. The smallest float16 above zero is 6e-8; gradients of activations are
  often smaller: they underflow to zero, and layers stop learning. So the loss is multiplied by a large factor before
  backward, and gradients are divided by it before the step. Where the factor was too large, gradients overflow to
  infinity: the scaler then skips that step and halves the factor. bfloat16 has the range of float32, with fewer digits,
  and needs no scaling. Before gradients are clipped, ``scaler.unscale_(optimizer)`` must divide them.

Not here, and yours to write when you need it: several devices, accumulation, checkpoints, logging, resuming.
"""

import torch
import torch.nn.functional as F

from vit_finetune.benchmark.frameworks.record import accuracies, losses
from vit_finetune.benchmark.frameworks.task import Task

DTYPES = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def run(task: Task) -> None:
    """Trains and evaluates."""
    device = torch.device(task.device)
    data = task.data()
    model, optimizer = task.build()
    model.to(device)
    schedule = task.schedule(optimizer)
    autocast = torch.autocast(task.device, DTYPES[task.precision], enabled=task.precision != "32-true")
    scaler = torch.amp.GradScaler(task.device, enabled=task.precision == "16-mixed")
    loader = data.train_dataloader()

    step = 0
    for epoch in range(task.epochs):
        loader.sampler.set_epoch(epoch)
        for stored in loader:
            moved = {key: value.to(device, non_blocking=True) for key, value in stored.items()}
            batch = data.augment(moved, step)
            with autocast:
                loss = F.cross_entropy(model(batch["image"]).float(), batch["label"])
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            step += 1
            schedule.step_update(step)
            losses.append(loss.detach())

    model.eval()
    right = total = 0
    with torch.inference_mode(), autocast:
        for batch in data.val_dataloader():
            answers = model(batch["image"].to(device)).argmax(-1)
            right += int((answers == batch["label"].to(device)).sum())
            total += len(answers)
    accuracies.append(right / total)
