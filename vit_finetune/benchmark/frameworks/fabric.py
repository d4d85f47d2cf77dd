"""Lightning Fabric: your loop, with device, precision and strategy taken out of it.

It does for you: moving the model and the batches, autocast around the model's ``forward``, scaling the loss in
``fabric.backward``, unscaling and skipping in ``optimizer.step``, telling the sampler of each epoch, wrapping for DDP,
FSDP and tensor parallel, saving and loading under all of these. Another precision or strategy is another argument of
the constructor.

It leaves to you: the loop, the schedule, accumulation (``fabric.no_backward_sync``), clipping
(``fabric.clip_gradients``, which unscales), logging, validation, when to save.

Mixed precision: autocast covers the model, not the loss that you compute outside of it; outputs come back in float32.
``precision="16-mixed"`` brings a ``GradScaler``. On a CPU it is replaced by bf16-mixed, with a warning; real float16
there needs the plugin spelled out, as below.
"""

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision

from vit_finetune.benchmark.frameworks.record import accuracies, losses
from vit_finetune.benchmark.frameworks.task import Task


def run(task: Task) -> None:
    """Trains and evaluates."""
    if task.precision == "16-mixed" and task.device == "cpu":
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
        fabric = Fabric(accelerator="cpu", devices=1, plugins=plugin)
    else:
        fabric = Fabric(accelerator=task.device, devices=1, precision=task.precision)
    data = task.data()
    model, optimizer = fabric.setup(*task.build())
    schedule = task.schedule(optimizer)
    train, val = fabric.setup_dataloaders(data.train_dataloader(), data.val_dataloader(), use_distributed_sampler=False)

    step = 0
    for _ in range(task.epochs):
        for stored in train:
            batch = data.augment(stored, step)
            loss = F.cross_entropy(model(batch["image"]), batch["label"])
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            step += 1
            schedule.step_update(step)
            losses.append(loss.detach())

    model.eval()
    right = total = 0
    with torch.inference_mode():
        for batch in val:
            right += int((model(batch["image"]).argmax(-1) == batch["label"]).sum())
            total += len(batch["label"])
    accuracies.append(right / total)
