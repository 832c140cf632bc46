"""A real SLURM of two nodes on this machine, with its own folder, ports and keys: its daemons run as whoever tests.

python -m tests.slurm_cluster runs all tests on it, and says what ran for real and how long it took.
"""

from __future__ import annotations

import getpass
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.loopback import free_ports
from tests.suite.told import run_and_tell

PATIENCE_S = 240.0
CPUS, GPUS = 8, 3
"""That each node says it has. SLURM looks only whether a GPU is a device."""

CONFIG = """\
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=5,sched_interval=3
ReturnToService=2
KillWait=60
SlurmctldTimeout=300
SlurmdTimeout=300
MessageTimeout=100
DefMemPerCPU=100
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=DEFAULT CPUs={cpus} RealMemory=24000 Gres=gpu:{gpus} State=UNKNOWN
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]}
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]}
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE PriorityTier=1 State=UP
PartitionName=urgent Nodes=n1,n2 MaxTime=INFINITE PriorityTier=2 State=UP
"""


class SlurmCluster:
    """A cluster whose daemons run. `slurm_cluster` makes it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, tuple[Sequence[str], subprocess.Popen[Any]]] = {}

    def start(self, *command: str) -> None:
        """Start a daemon. `kill_daemon` knows it by its words."""
        self._daemons[" ".join(command)] = command, start_daemon(command, self.environment)

    def kill_daemon(self, name: str) -> None:
        """Kill one, and start it again. What runs on a node goes on meanwhile."""
        command, process = self._daemons[name]
        process.kill()
        process.wait()
        self.start(*command)
        _wait_until(self, ("scontrol", "ping"), lambda said: " is UP" in said)

    def stop(self) -> None:
        """End all of them, the last one first."""
        for _, process in reversed(self._daemons.values()):
            end_daemon(process)

    def call(self, *command: str, env: Mapping[str, str] = {}) -> str:
        """Run one of SLURM's commands, and return what it says. AssertionError if it fails."""
        environment = {**os.environ, **self.environment, **env}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}{self.logs()}"
        return done.stdout.strip()

    def submit(self, script: Path, *options: str, env: Mapping[str, str] = {}) -> str:
        """Submit a batch script, and return the job's id."""
        return self.call("sbatch", "--parsable", *options, str(script), env=env)

    def job(self, job: str) -> dict[str, str]:
        """Return what SLURM knows of a job: JobState, Restarts, ExitCode and the like."""
        words = self.call("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.partition("=")[::2] for word in words)

    def steps(self, job: str) -> dict[str, str]:
        """Return the name of each step that runs -> its id."""
        lines = self.call("squeue", "--noheader", "--steps", "--format=%j %i").splitlines()
        found = [line.split() for line in lines]
        return {name: step for name, step in found if step.startswith(f"{job}.")}

    def tell(self, step: str, signum: int) -> None:
        """Send a signal to the processes of a step. scancel does it, and fails all the same."""
        command = ("scancel", f"--signal={signum}", step)
        subprocess.run(command, env={**os.environ, **self.environment}, capture_output=True, check=False)

    def cancel_all(self) -> None:
        """Cancel every job that has not ended."""
        self.call("scancel", f"--user={getpass.getuser()}")

    def wait_for_state(self, job: str, *states: str) -> dict[str, str]:
        """Wait until a job is in one of these states."""
        until = time.monotonic() + PATIENCE_S
        while (found := self.job(job))["JobState"] not in states:
            assert time.monotonic() < until, f"{found}\n{self.logs()}"
            time.sleep(0.1)
        return found

    def start_soon(self, job: str) -> None:
        """Let a job that was put back start: SLURM would wait two minutes. A node refuses a start in the second in
        which it revoked the job's credential."""
        self.call("scontrol", "update", f"JobId={job}", "StartTime=now+3")

    def logs(self) -> str:
        """Return the ends of the daemons' logs."""
        return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log")))


@contextmanager
def slurm_cluster() -> Iterator[SlurmCluster]:
    """Start the daemons, and end them afterwards."""
    with ExitStack() as stack:
        # below /tmp, since the path of a socket is short; munged wants that nobody else may write there
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp")))
        folder.chmod(0o755)
        for name in ("state", "spool-n1", "spool-n2"):
            (folder / name).mkdir()
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (folder / "munge.key").chmod(0o400)
        cluster = SlurmCluster(folder)
        config = CONFIG.format(
            host=socket.gethostname().partition(".")[0], folder=folder, user=getpass.getuser(),
            ports=free_ports(3), cpus=CPUS, gpus=GPUS,
        )  # fmt: skip
        for number in range(GPUS):
            (folder / f"gpu{number}").symlink_to("/dev/null")
        (folder / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu File={folder}/gpu[0-{GPUS - 1}]\n")
        (folder / "slurm.conf").write_text(config)
        munge = ("munged", "--foreground", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket",
                 f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed",
                 "--force")  # fmt: skip
        stack.callback(cluster.stop)
        for command in (munge, ("slurmctld", "-D"), ("slurmd", "-D", "-N", "n1"), ("slurmd", "-D", "-N", "n2")):
            cluster.start(*command)
        look = ("sinfo", "--noheader", "--partition=all", "--Node", "--format=%T")
        _wait_until(cluster, look, lambda said: said.split() == ["idle", "idle"])
        yield cluster


@contextmanager
def daemon(command: Sequence[str], env: Mapping[str, str]) -> Iterator[None]:
    """Run a process meanwhile."""
    process = start_daemon(command, env)
    try:
        yield
    finally:
        end_daemon(process)


def start_daemon(command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[Any]:
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    return subprocess.Popen(
        command, env={**os.environ, **env, "PATH": path}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip


def end_daemon(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_until(cluster: SlurmCluster, look: Sequence[str], is_so: Callable[[str], bool]) -> None:
    """Wait until a command of SLURM says what is waited for."""
    until = time.monotonic() + PATIENCE_S
    environment = {**os.environ, **cluster.environment}
    while True:
        said = subprocess.run(look, capture_output=True, text=True, env=environment, check=False)
        if is_so(said.stdout):
            return
        assert time.monotonic() < until, said.stdout + said.stderr + cluster.logs()
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(run_and_tell(
        Path(__file__).parent / "e2e" / "test_slurm.py",
        "machines: both nodes are daemons on this one",
        "GPUs: SLURM deals out three a node that are none; workers that need one were stand-ins",
    ))  # fmt: skip
