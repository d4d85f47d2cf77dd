"""Processes of a run: how they are started (SLURM, notebooks, torchrun), and that they end together."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.elastic.utils.distributed import get_free_port

from vit_finetune.errors import ProcessFailedError

LAUNCHER = "VIT_FINETUNE_LAUNCHER_PID"  # environment variable of the processes that the first one of a run starts
GRACE = 10.0  # seconds in which a process ends by itself after the first one, as it does at the end of a run
FAILING = 5.0  # seconds in which a process whose connection broke has ended
LOST_CONNECTION = (RuntimeError, dist.DistError, dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)


def check_slurm(devices: int | str | list[int], nodes: int) -> None:
    """Refuse to wait for other tasks of a SLURM job if srun did not start this process.

    Raises:
        MisconfigurationException: Names the variable and the remedies.
    """
    tasks, job = os.environ.get("SLURM_NTASKS", "1"), os.environ.get("SLURM_JOB_NAME")
    if tasks == "1" or job in ("bash", "interactive") or "SLURM_STEP_ID" in os.environ:
        return
    if str(devices) != "1" or nodes > 1 or "SLURM_NTASKS_PER_NODE" not in os.environ:
        raise MisconfigurationException(
            f"SLURM_NTASKS is {tasks}, but this process was not started by srun, so it would wait forever for the "
            "other tasks. In a job: srun python -m vit_finetune ... with --ntasks-per-node equal to --trainer.devices "
            "(configs/strategy/slurm.sh). To run independently within an allocation, set SLURM_JOB_NAME=bash."
        )


def notebook_error(command: str) -> MisconfigurationException:
    """Return the error for a run on several devices that was started from a notebook."""
    return MisconfigurationException(
        "Runs on several devices cannot be started from a notebook. Run the command in its own process, in a cell as "
        f"!python -m vit_finetune {command} ... or in a terminal; or use one device: --trainer.devices 1 and no "
        "--trainer.strategy."
    )


def check_notebook(trainer: Trainer, command: str) -> None:
    """Refuse the forked processes that Lightning would start from a notebook.

    They hang once a cell has run PyTorch on several threads, and fail once a cell has initialized CUDA. Lightning
    itself refuses all other ways to start processes from a notebook.

    Raises:
        MisconfigurationException: Names the command that works.
    """
    if hasattr(sys, "ps1") and trainer.strategy.launcher is not None:
        raise notebook_error(command)


def check_port(trainer: Trainer) -> None:
    """Refuse a rendezvous port that is not a port.

    Raises:
        MisconfigurationException: Names the variable and what is allowed.
    """
    port = os.environ.get("MASTER_PORT")
    if port and trainer.strategy.launcher is not None and not (port.isdecimal() and 0 < int(port) < 2**16):
        raise MisconfigurationException(
            f"MASTER_PORT is {port!r}; expected a number from 1 to 65535. On a single machine leave it unset."
        )


def check_shards(trainer: Trainer, path: Path | None) -> None:
    """Refuse a sharded checkpoint that the strategy cannot read.

    Raises:
        MisconfigurationException: Names the command that consolidates it.
    """
    readers = (FSDPStrategy, ModelParallelStrategy)
    if path is not None and path.is_dir() and not isinstance(trainer.strategy, readers):
        raise MisconfigurationException(
            f"--ckpt_path {path} is a sharded checkpoint, which only the FSDP and ModelParallel strategies can read. "
            f"Consolidate it into one file first: python -m vit_finetune.checkpoint {path}"
        )


def use_new_port_after_restart() -> None:
    """Let processes that torchrun restarted meet at a new port.

    With torch 2.14, the store at the old port still holds the addresses of the previous attempt's processes, and the
    first process to connect waits for them forever.
    """
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if attempt and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + attempt)


# The processes that Lightning starts end together


def exit_with_launcher() -> None:
    """In a process that the first one of a run has started: exit if that one has ended, however it ended."""
    launcher = os.environ.get(LAUNCHER)
    if launcher and os.environ.get("LOCAL_RANK", "0") != "0":
        threading.Thread(target=_wait_for_end_of, args=(int(launcher),), daemon=True).start()


def _wait_for_end_of(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    time.sleep(GRACE)
    os.kill(os.getpid(), signal.SIGKILL)  # an exception would not end the main thread, which waits for that process


@contextmanager
def end_together(trainer: Trainer) -> Iterator[None]:
    """End the processes that Lightning starts in this block with this one.

    After an error they are killed, since they would wait for this process for half an hour; otherwise they may finish.
    The other direction, a process that ends before this one, is observed by Lightning's launcher.

    Raises:
        ProcessFailedError: The connection to another process broke because that one failed.
    """
    if "LOCAL_RANK" not in os.environ:  # this process is the first one of a run
        os.environ[LAUNCHER] = str(os.getpid())
    try:
        yield
    except BaseException as error:
        # Only these types, not those derived from them: all other errors have reasons of their own.
        reason = _failure(_started(trainer)) if type(error) in LOST_CONNECTION else None
        if not isinstance(error, SystemExit):  # of a signal: all processes have agreed to end
            for process in _started(trainer):
                process.kill()
        if reason:
            raise ProcessFailedError(reason) from error
        raise
    finally:
        os.environ.pop(LAUNCHER, None)


def _started(trainer: Trainer) -> list[subprocess.Popen[bytes]]:
    """Return the processes that the launcher of a Trainer has started."""
    processes = getattr(trainer.strategy.launcher, "procs", ())  # of another type if they were spawned or forked
    return [process for process in processes if isinstance(process, subprocess.Popen)]


def _failure(processes: list[subprocess.Popen[bytes]]) -> str | None:
    """Return which process failed, ``None`` if all of them are still running after some seconds."""
    deadline = time.monotonic() + FAILING
    while processes and time.monotonic() < deadline:
        for rank, process in enumerate(processes, 1):
            if code := process.poll():
                killed = code < 0 and f"was killed by {signal.Signals(-code).name}, as when memory runs out"
                end = killed or f"failed with exit code {code}; its own message is above"
                return f"Process {rank} of the run {end}. All processes of the run were ended."
        time.sleep(0.1)
    return None


def port_problem(error: dist.DistNetworkError) -> str | None:
    """Return the message for a port at which the processes cannot meet, ``None`` for other errors."""
    if "failed to listen" not in str(error):
        return None
    port, reason = os.environ.get("MASTER_PORT"), "in use" if "EADDRINUSE" in str(error) else "not available"
    return (
        f"MASTER_PORT {port}, at which the processes of the run meet, is {reason}, perhaps by another run. Set a free "
        f"one, such as MASTER_PORT={get_free_port()}, or on a single machine leave MASTER_PORT unset."
    )
