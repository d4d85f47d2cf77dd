"""This project's command line: no code to write; every choice is an option.

It does for you: everything that Lightning's Trainer does (devices, strategies, precision, gradient accumulation,
clipping, checkpoints, resuming), the network, its preprocessing, optimizer, layer decay and schedule, metrics,
TensorBoard, progress, calibration, and checks before training starts. Shuffling and augmentation are functions of seed,
epoch and step, so another loop can use the same batches, as here.

It leaves to you: the options, and code only for what is not an option, such as your own dataset.

Mixed precision is ``--trainer.precision``. Lightning replaces 16-mixed on a CPU by bf16-mixed; real float16 there is
``configs/precision/16-mixed-cpu.yaml``, the same plugin as below. The schedule advances when the loss scaler skips a
step. The whole training step is under autocast, and the loss is computed from float32 logits.
"""

import json
import tempfile

from vit_finetune import main
from vit_finetune.benchmark.frameworks.task import MIN_LR, NAME, PIXELS, WARMUP, WEIGHT_DECAY, Task

FLOAT16_ON_CPU = {
    "class_path": "lightning.pytorch.plugins.MixedPrecision",
    "init_args": {
        "precision": "16-mixed",
        "device": "cpu",
        "scaler": {"class_path": "torch.amp.GradScaler", "init_args": {"device": "cpu"}},
    },
}


def run(task: Task) -> None:
    """Train and evaluate."""
    model = {"name": NAME, "img_size": PIXELS, "timm_kwargs": task.timm_kwargs, "weights": task.weights}
    model |= {"lr": task.lr, "layer_decay": task.layer_decay}
    model |= {"weight_decay": WEIGHT_DECAY, "warmup": WARMUP, "min_lr": MIN_LR}
    trainer = {"max_epochs": task.epochs, "accelerator": task.device, "devices": 1, "num_sanity_val_steps": 0}
    if task.precision == "16-mixed" and task.device == "cpu":
        trainer["plugins"] = [FLOAT16_ON_CPU]
    else:
        trainer["precision"] = task.precision
    if task.record:
        trainer["callbacks"] = ["vit_finetune.benchmark.frameworks.task.Recorder"]
    data = {"class_path": "vit_finetune.benchmark.frameworks.task.TimedShapes", "init_args": task.data_options}
    with tempfile.TemporaryDirectory() as folder:
        trainer["default_root_dir"] = folder
        options = {"model": model, "trainer": trainer, "data": data, "seed_everything": task.seed}
        main(["fit", *(f"--{name}={json.dumps(value)}" for name, value in options.items())])
