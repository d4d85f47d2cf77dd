"""Plain PyTorch: you write everything yourself, and nothing is hidden.

You write the loop: epochs, moving batches to the device, forward, backward, the step of the optimizer and the schedule,
switching between training and evaluation. You also need to know the pitfalls: without ``sampler.set_epoch`` every epoch
has the same order, and ``loss.item()`` in every step makes the CPU wait for the GPU.

Mixed precision combines two tools:

- ``torch.autocast`` runs matrix products in 16 bits, and operations that need range or accuracy (softmax, norms,
  losses) in 32 bits. Weights, their gradients and the optimizer state stay in 32 bits. It covers only the forward pass
  and the loss; in the backward pass each operation runs in the dtype of its forward.
- ``torch.amp.GradScaler`` is needed for float16 only. The smallest positive float16 is 6e-8; gradients of activations
  are often smaller, underflow to zero, and layers stop training. So the loss is multiplied by a large factor before
  backward, and gradients are divided by it before the optimizer step. If the factor was too large, gradients overflow
  to infinity: the scaler skips that step and halves the factor. bfloat16 has the range of float32 with fewer digits and
  needs no scaling. Call ``scaler.unscale_(optimizer)`` before clipping gradients.

Not included here, and yours to write when you need it: several devices, gradient accumulation, checkpoints, logging,
resuming.
"""

import torch
import torch.nn.functional as F

from vit_finetune.benchmark.frameworks.task import Task, record
from vit_finetune.data.datasets import Batch

DTYPES = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch to the device without waiting for it."""
    image, label, index = (batch[key].to(device, non_blocking=True) for key in ("image", "label", "index"))
    return {"image": image, "label": label, "index": index}


def run(task: Task) -> None:
    """Train and evaluate."""
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
            data.seed_step(device, step)
            batch = data.augment(to_device(stored, device))
            with autocast:
                loss = F.cross_entropy(model(batch["image"]).float(), batch["label"])
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            step += 1
            schedule.step_update(step)
            record.losses.append(loss.detach())

    model.eval()
    correct = total = 0
    with torch.inference_mode(), autocast:
        for batch in data.val_dataloader():
            predictions = model(batch["image"].to(device)).argmax(-1)
            correct += int((predictions == batch["label"].to(device)).sum())
            total += len(predictions)
    record.accuracy = correct / total
