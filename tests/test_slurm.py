"""configs/strategy/slurm.sh on a SLURM of its own: SIGUSR1 before the time limit, requeue, resume, equal weights."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.conftest import REPOSITORY, only, run_command, weights

COMMANDS = ("sbatch", "scontrol", "munged", "slurmctld", "slurmd")
MISSING = [name for name in COMMANDS if shutil.which(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"needs SLURM and munge: {', '.join(MISSING)} not found"),
    pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() != 0, reason="slurmd runs as root"),
]
OPTIONS = ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.max_epochs=30"]
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobRequeue=1
MpiDefault=none
SlurmdParameters=config_overrides
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def wait_for(condition: str, *command: str, seconds: float) -> str:
    """Repeat a command until its output matches; return the output."""
    end = time.monotonic() + seconds
    while True:
        output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        if re.search(condition, output):
            return output
        assert time.monotonic() < end, f"{command} printed {output}"
        time.sleep(1)


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One node with two CPUs, with key, sockets, ports and files of its own."""
    folder = Path("/tmp") / f"vit-slurm-{os.getpid()}"  # the path of a socket must be short
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    values = {"host": socket.gethostname().partition(".")[0], "controller": free_port(), "daemon": free_port()}
    (folder / "slurm.conf").write_text(CONF.format(folder=folder, **values))
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    commands = (
        ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", "localhost"],
    )
    daemons = []
    try:
        for command in commands:
            with (folder / f"{command[0]}.txt").open("w") as log:
                daemons.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
            time.sleep(2)
        wait_for("idle", "sinfo", seconds=60)
        yield
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(timeout=60)
        shutil.rmtree(folder)


def test_job_is_requeued_before_its_time_limit_and_resumes(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, step and epoch equal those of an uninterrupted run of two processes, bit for bit."""
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    for name in [name for name in os.environ if name.startswith(("PL_", "MASTER_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RECIPE", "configs/quickstart.yaml")
    # SLURM may send the signal up to a minute early: 20 to 80 seconds after the start.
    resources = ["--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=0", "--cpus-per-task=1"]
    limits = ["--time=3", "--signal=SIGUSR1@100", f"--chdir={tmp_path}", "--output=job.txt", "--open-mode=append"]
    script = [str(REPOSITORY / "configs" / "strategy" / "slurm.sh"), *OPTIONS, "--trainer.num_nodes=1"]
    job = subprocess.check_output(["sbatch", "--parsable", *resources, *limits, *script], text=True).strip()
    show = ["scontrol", "--oneliner", "show", "job", job]
    wait_for("JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT)", *show, seconds=900)
    log = (tmp_path / "job.txt").read_text(errors="replace")
    state = subprocess.check_output(show, text=True)
    assert "JobState=COMPLETED" in state and re.search("Restarts=[1-9]", state), log
    assert len(re.findall("SIGUSR1 after step", log)) >= 1, log

    strategy = ["--config=configs/strategy/ddp_cpu.yaml", "--experiment=one"]
    run_command("fit", "--config=configs/quickstart.yaml", *strategy, *OPTIONS, folder=tmp_path)
    left, right = (only(tmp_path / "runs" / name, "last.ckpt") for name in ("one", f"quickstart-{job}"))
    expected, resumed = weights(left), weights(right)
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(value, resumed[key]) for key, value in expected.items())
