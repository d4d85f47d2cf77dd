"""Runs the five frameworks in turns and reports what they gave."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from vit_finetune.benchmark.frameworks import tables
from vit_finetune.benchmark.frameworks.run import WARM_UP, WINDOW, Measured
from vit_finetune.benchmark.frameworks.runs_of_frameworks import Run
from vit_finetune.benchmark.frameworks.task import Precision, Task

Framework = Literal["plain", "fabric", "accelerate", "hf_trainer", "ours"]
Device = Literal["auto", "cpu", "cuda"]

PACKAGES = {"accelerate": ("accelerate",), "hf_trainer": ("accelerate", "transformers")}
# Seen with accelerate 1.15 and transformers 5.24.
NO_FLOAT16 = "float16 on a CPU is not supported: the option is accepted, and trains in 32 bits without a word"
FAILED = "exit code"

# That of configs/quickstart.yaml at half its width: learns something in a few hundred steps.
LEARNING = {"patch_size": 8, "embed_dim": 64, "depth": 4, "num_heads": 4, "class_token": False, "global_pool": "avg"}
LEARNING_TASK = Task("", LEARNING, steps=150, epochs=2, batch=32, lr=1e-3, layer_decay=None)
# One block of width 16 hides nothing; twelve of them have a real network's number of tensors.
COST_TASKS = {
    depth: Task("", {"patch_size": 16, "embed_dim": 16, "depth": depth, "num_heads": 1}, record=False)
    for depth in (1, 12)
}


def compare(
    output: Path = Path("runs/frameworks"),
    frameworks: Sequence[Framework] = get_args(Framework),
    precisions: Sequence[Precision] = get_args(Precision),
    rounds: int = 5,
    steps: int = 1000,
    device: Device = "auto",
) -> None:
    """Compares the frameworks: lines of code, losses, accuracy, memory, and what a step costs beyond a plain loop.

    Args:
        output: Folder for results.csv, losses.csv, results.md, chart.png and chart.svg; created, and must be empty.
        frameworks: Which ones; plain PyTorch is always among them, the others are measured against it.
        precisions: Of the runs that compare losses, accuracy and memory. Steps are timed in 32-true.
        rounds: How often each step is timed; frameworks take turns, so that a change of the machine hits all alike.
        steps: How many steps a round times.
        device: Where to train; auto takes a GPU if there is one.

    Raises:
        MisconfigurationException: The folder holds something, or the steps are too few.
        SystemExit: With code 1, after the report, when a framework failed; that it cannot run here is no failure.
    """
    _check_length(rounds, steps)
    if output.exists() and any(output.iterdir()):
        raise MisconfigurationException(f"--output {output} is not empty; name a folder that is new.")
    output.mkdir(parents=True, exist_ok=True)
    runs = [*learn(frameworks, precisions, device), *time_steps(frameworks, rounds, steps, device)]
    tables.write(runs, output)
    print(f"\n{(output / 'results.md').read_text()}\nWritten to {output}")
    if any(run.reason.startswith(FAILED) for run in runs):
        raise SystemExit(1)


def learn(frameworks: Sequence[str], precisions: Sequence[Precision], device: Device) -> list[Run]:
    """Trains a small network once with each framework and precision, for losses, accuracy and memory."""
    runs = []
    for precision in precisions:
        task = replace(LEARNING_TASK, precision=precision, device=_device(device))
        runs += _take_turns(frameworks, {"learning": task}, rounds=1)
    return runs


def time_steps(frameworks: Sequence[str], rounds: int, steps: int, device: Device) -> list[Run]:
    """Times the steps of two tiny networks, frameworks in turns."""
    tasks = {str(depth): replace(task, steps=steps, device=_device(device)) for depth, task in COST_TASKS.items()}
    return _take_turns(frameworks, tasks, rounds)


def _check_length(rounds: int, steps: int) -> None:
    """Refuses steps that give no window after the warm-up."""
    least = (WARM_UP + 1) * WINDOW + 1
    if steps < least or rounds < 1:
        raise MisconfigurationException(f"--steps {steps} --rounds {rounds}: at least {least} and 1 are needed.")


def _device(asked: Device) -> str:
    return asked if asked != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def _take_turns(frameworks: Sequence[str], tasks: dict[str, Task], rounds: int) -> list[Run]:
    """Runs every framework on every task in each round, plain PyTorch first."""
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        tasks = {name: replace(task, weights=f"{folder}/{name}.safetensors") for name, task in tasks.items()}
        for task in tasks.values():
            task.write_weights()
        for number in range(rounds):
            for name, task in tasks.items():
                for framework in dict.fromkeys(["plain", *frameworks]):
                    run = Run(framework, name, task.precision, number, reason=why_not(framework, task))
                    runs.append(run if run.reason else start(run, task, Path(folder) / "result.json"))
                    print(runs[-1], flush=True)
    return runs


def why_not(framework: str, task: Task) -> str:
    """Says why a framework cannot do a task here; empty if nothing stands in the way."""
    missing = [name for name in PACKAGES.get(framework, ()) if find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed: pip install 'vit_finetune[benchmark]'"
    without = framework in PACKAGES and task.device == "cpu" and task.precision == "16-mixed"
    return NO_FLOAT16 if without else ""


def start(run: Run, task: Task, result: Path) -> Run:
    """Runs one framework in a process of its own."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("VIT_FINETUNE_")}
    first_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # the HF Trainer would take all there are
    environment = own | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": first_gpu}
    module = f"{__package__}.run"
    words = [sys.executable, "-m", module, run.framework, json.dumps(asdict(task)), str(result)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return replace(run, reason=f"{FAILED} {done.returncode}: {last}")
    return replace(run, measured=Measured(**json.loads(result.read_text())))
