"""Lightning Fabric: your own loop, without the code for device, precision and strategy.

It does for you: moving the model and the batches, autocast around the model's ``forward``, scaling the loss in
``fabric.backward``, unscaling and skipping in ``optimizer.step``, setting the epoch of the sampler, wrapping for DDP,
FSDP and tensor parallel, saving and loading under all of these. To change precision or strategy, change an argument of
the constructor.

It leaves to you: the loop, the schedule, gradient accumulation (``fabric.no_backward_sync``), clipping
(``fabric.clip_gradients``, which unscales), logging, validation, saving.

Mixed precision: autocast covers the model, not the loss that you compute outside of it; outputs are converted to
float32. ``precision="16-mixed"`` includes a ``GradScaler``. On a CPU it is replaced by bf16-mixed, with a warning; real
float16 there needs an explicit plugin, as below.
"""

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision

from vit_finetune.benchmark.frameworks.task import Task, record


def run(task: Task) -> None:
    """Train and evaluate."""
    float16_on_cpu = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    by_plugin = task.precision == "16-mixed" and task.device == "cpu"
    precision = {"plugins": float16_on_cpu} if by_plugin else {"precision": task.precision}
    fabric = Fabric(accelerator=task.device, devices=1, **precision)
    data = task.data()
    model, optimizer = fabric.setup(*task.build())
    schedule = task.schedule(optimizer)
    train, val = fabric.setup_dataloaders(data.train_dataloader(), data.val_dataloader(), use_distributed_sampler=False)

    step = 0
    for _ in range(task.epochs):
        for stored in train:
            data.seed_step(fabric.device, step)
            batch = data.augment(stored)
            loss = F.cross_entropy(model(batch["image"]), batch["label"])
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            step += 1
            schedule.step_update(step)
            record.losses.append(loss.detach())

    model.eval()
    correct = total = 0
    with torch.inference_mode():
        for batch in val:
            correct += int((model(batch["image"]).argmax(-1) == batch["label"]).sum())
            total += len(batch["label"])
    record.accuracy = correct / total
