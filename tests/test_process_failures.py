"""Runs of two processes of which one fails, or whose port is taken: all processes end, with a message."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import TINY_MODEL, make_tree
from tests.test_fault_tolerance import LIMIT, start

SECONDS = (
    90  # in which all processes of a failed run have ended, on a busy machine; left alone they wait for half an hour
)
FAILING = """
import os, signal, time
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy

def reach(point):
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    if point != os.environ["FAIL_AT"]:
        return
    open(f"{point}-{rank}", "w").close()
    if rank == int(os.environ["FAIL_RANK"]):
        if os.environ["FAIL_BY"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyError("injected")

class DDP(DDPStrategy):
    def setup_environment(self):
        reach("launch")
        super().setup_environment()

class Fails(Callback):
    def setup(self, *args, **kwargs):
        reach("setup")

    def on_train_batch_start(self, *args):
        reach("step")

    def on_validation_batch_start(self, *args, **kwargs):
        reach("validation")
"""
CONFIG = "trainer: {strategy: {class_path: failing.DDP}, callbacks: [{class_path: failing.Fails}]}"


@pytest.fixture
def two(tmp_path: Path) -> list[str]:
    """A run of two processes."""
    tree = make_tree(tmp_path / "images", {"train": 6, "val": 3})
    (tmp_path / "failing.py").write_text(FAILING)
    (tmp_path / "failing.yaml").write_text(CONFIG)
    options = ["fit", *TINY_MODEL, "--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.max_epochs=100000"]
    return [*options, "--data=ImageFolder", f"--data.root={tree}", "--data.batch_size=4"]


def living(group: int) -> list[str]:
    """Lines of ``ps`` for the processes of a group that run, without those that only wait to be collected."""
    out = subprocess.run(["ps", "-eo", "pgid,stat,pid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(maxsplit=3) for line in out.splitlines()[1:]]
    return [" ".join(row) for row in rows if row[0] == str(group) and not row[1].startswith("Z")]


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for the end of a run and of all of its processes; return exit code and output."""
    try:
        output, _ = process.communicate(timeout=LIMIT)
        deadline = time.monotonic() + SECONDS
        while left := living(process.pid):
            assert time.monotonic() < deadline, left
            time.sleep(0.2)
    finally:
        if living(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output


@pytest.mark.parametrize("by", ["error", "kill"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("point", ["launch", "setup", "step", "validation"])
@pytest.mark.slow
def test_all_processes_end_if_one_fails(
    point: str, rank: int, by: str, two: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"FAIL_AT": point, "FAIL_RANK": str(rank), "FAIL_BY": by}.items():
        monkeypatch.setenv(name, value)
    process = start([*two, "--config=failing.yaml"], tmp_path)
    code, output = end(process)
    assert (tmp_path / f"{point}-{rank}").exists(), output
    seconds = time.time() - (tmp_path / f"{point}-{rank}").stat().st_mtime
    assert code != 0 and seconds < SECONDS, output
    if by == "error":
        assert output.count("KeyError: 'injected'") == 1 and output.count("Traceback") == 1
    if rank == 1:
        assert "Process 1 of the run" in output or "Child process with PID" in output
    assert not list(tmp_path.rglob("*.tmp"))


def test_port_that_is_taken(two: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        process = start([*two, "--trainer.strategy=ddp"], tmp_path, variables={"MASTER_PORT": port})
        code, output = end(process)
    assert code == 1 and "Traceback" not in output
    (error,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert f"MASTER_PORT {port}" in error and "in use" in error and "such as MASTER_PORT=" in error
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("port", ["abc", "0", "70000"])
def test_port_that_is_not_one(
    port: str, folder_args: list[str], fails: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", port)
    message = fails("fit", *folder_args, "--trainer.devices=2", "--trainer.strategy=ddp")
    assert f"MASTER_PORT is {port!r}; expected a number from 1 to 65535" in message
