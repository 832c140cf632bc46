"""A run as a batch job of a real SLURM of two nodes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rftstream.config import loader
from rftstream.config.sections import RunConfig
from rftstream.errors import ConfigError
from rftstream.integrations.slurm import JobRun, JobSettings, job_script, plan_steps
from tests.broker.conftest import OwnBroker
from tests.e2e.workplace import FAKE, Workplace
from tests.moments import goes_on, moments
from tests.slurm_cluster import SlurmCluster, slurm_cluster
from tests.warm import MARK

LONG = FAKE.replace("steps = 6", "steps = 100000").replace("[trainer]", "[backends.fake]\nstep_s = 0.3\n[trainer]")
ROLES = ("feeder", "explorer", "verifier", "buffer", "trainer")
STANDS_IN = """#!/usr/bin/env bash
case "$1" in
  status) echo '{"state": "running"}' ;;
  worker) echo "$SLURMD_NODENAME" "${CUDA_VISIBLE_DEVICES-none}"; exec sleep 1000 ;;
esac
"""
"""A command in the place of rftstream, for a run that no worker ever ends."""


@pytest.fixture(scope="module")
def daemons() -> Iterator[SlurmCluster]:
    with slurm_cluster() as started:
        yield started


@pytest.fixture
def cluster(place: Workplace, daemons: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """A cluster that the test's commands of SLURM are for, and of which no job is left afterwards."""
    for name, value in daemons.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(MARK, str(place.folder))  # by which the workplace knows what comes from here
    yield daemons
    daemons.cancel_all()


def submit(place: Workplace, cluster: SlurmCluster, *options: str) -> str:
    """Submit the run file's job by the command, and return the job's id."""
    done = place.look("launch", "slurm", "tiny.toml", *options)
    assert done.code == 0, done.err
    job, _, rest = done.out.removeprefix("Submitted batch job ").partition(";")
    assert rest.startswith(" its logs are in "), done.out
    return job


def output(place: Workplace, job: str, run: str = "tiny") -> str:
    path = place.folder / "runs" / "slurm" / run / f"job-{job}.log"
    return path.read_text(encoding="utf-8") if path.exists() else ""


def assert_told(place: Workplace, attempt: int) -> None:
    """Nobody was killed in this attempt: each worker finished what it had in hand."""
    logs = place.folder / "runs" / "slurm" / "tiny" / f"attempt-{attempt}"
    for role in ROLES:
        assert "left: stopped" in (logs / f"{role}-0.log").read_text(), role


@pytest.mark.sampled(2, "slurm")
@pytest.mark.law("lost")
def test_a_job_goes_on_with_the_run_when_its_time_was_up(place: Workplace, cluster: SlurmCluster) -> None:
    """A trainer that dies and an explorer that leaves are started again meanwhile. Each attempt has its own logs."""
    place.write("tiny.toml", LONG)
    job = submit(place, cluster)
    view = place.view("runs/tiny")
    place.wait_for(lambda: view.curve().version >= 3, "steps")
    told = json.loads(place.look("status", "runs/tiny", "--json").out)
    answers = {worker["process"]: worker["reachable"] for worker in told["workers"]}
    assert (told["state"], answers) == ("running", {f"{role}-0": True for role in ROLES})
    cluster.tell(cluster.steps(job)["trainer-0"], signal.SIGKILL)
    cluster.tell(cluster.steps(job)["explorer-0"], signal.SIGTERM)
    for text in ("trainer-0: exit 137; it is started again", "explorer-0: exit 0; it is started again"):
        place.wait_for(lambda text=text: text in output(place, job), text)  # type: ignore[misc]
    version = view.curve().version
    place.wait_for(lambda: view.curve().version >= version + 3, "steps of the second trainer")
    cluster.call("scancel", "--batch", "--signal=USR2", job)  # as SLURM does with --signal=B:USR2
    cluster.wait_for_state(job, "PENDING")
    said = output(place, job)
    assert "the time is up" in said
    assert said.count("started again") == 2, "who was told to leave was not killed"
    logs = place.folder / "runs" / "slurm" / "tiny"
    assert_told(place, 0)
    place.assert_nobody_left()
    version = view.assert_nothing_lost().version

    cluster.start_soon(job)
    place.wait_for(lambda: view.curve().version > version, "steps of the second attempt")
    assert place.look("drain", "runs/tiny").code == 0
    ended = cluster.wait_for_state(job, "COMPLETED")
    assert (ended["Restarts"], ended["ExitCode"]) == ("1", "0:0"), output(place, job)
    assert "the run has ended" in output(place, job)
    place.assert_nobody_left()
    assert view.assert_nothing_lost().version > version
    names = {"run.log", *(f"{role}-0.log" for role in ROLES)}
    for attempt in (0, 1):
        assert {file.name for file in (logs / f"attempt-{attempt}").iterdir()} == names
    again = cluster.submit(logs / "job.sh", env={"SLURM_RESTART_COUNT": "2"})
    assert cluster.wait_for_state(again, "COMPLETED", "FAILED")["ExitCode"] == "0:0"
    assert not (place.folder / "runs" / "tiny-2").exists(), "a node that fails at the end begins no other run"


@pytest.mark.sampled(2, "slurm")
@pytest.mark.law("lost")
def test_a_job_that_is_cancelled_stays_cancelled(place: Workplace, cluster: SlurmCluster) -> None:
    place.write("tiny.toml", LONG)
    job = submit(place, cluster)
    view = place.view("runs/tiny")
    place.wait_for(lambda: view.curve().version >= 2, "steps")
    cluster.call("scancel", job)
    place.assert_nobody_left()
    ended = cluster.wait_for_state(job, "CANCELLED")
    assert ended["Restarts"] == "0"
    assert_told(place, 0)
    assert "the job was cancelled" in output(place, job)
    assert view.assert_nothing_lost().version >= 2


@pytest.mark.sampled(2, "slurm")
@pytest.mark.law("lost")
def test_a_job_whose_node_is_taken_away_goes_on(place: Workplace, cluster: SlurmCluster) -> None:
    """For a job that is more urgent, by an administrator, and because the node is down. Nobody can tell workers then;
    otherwise they are told."""
    place.write("tiny.toml", LONG)
    job = submit(place, cluster)
    view = place.view("runs/tiny")
    for attempt, reason in enumerate(("preempted", "requeued", "down")):
        version = view.curve().version
        place.wait_for(lambda version=version: view.curve().version >= version + 2, "steps")  # type: ignore[misc]
        node = cluster.job(job)["BatchHost"]
        if reason == "preempted":
            urgent = ("--partition=urgent", "--exclusive", f"--nodelist={node}", "--wrap=exec sleep 1000")
            other = cluster.call("sbatch", "--parsable", "--output=/dev/null", *urgent)
            cluster.wait_for_state(other, "RUNNING")
            cluster.call("scancel", other)
        elif reason == "requeued":
            cluster.call("scontrol", "requeue", job)
        else:
            cluster.call("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
        cluster.wait_for_state(job, "PENDING")
        place.assert_nobody_left()
        if reason != "down":
            assert_told(place, attempt)
        version = view.assert_nothing_lost().version
        cluster.start_soon(job)
        place.wait_for(lambda version=version: view.curve().version > version, f"steps after {reason}")  # type: ignore[misc]
    assert place.look("drain", "runs/tiny").code == 0
    ended = cluster.wait_for_state(job, "COMPLETED")
    assert (ended["Restarts"], ended["ExitCode"]) == ("3", "0:0"), output(place, job)
    view.assert_nothing_lost()


KILLED = (*(f"{role}-0" for role in (*ROLES, "evaluator")), "srun", "script", "slurmctld -D", "kafka")


@pytest.mark.long
@pytest.mark.broker
@pytest.mark.law("lost", "twice", "conservation")
def test_a_job_of_two_nodes_is_killed_at_ten_moments(
    place: Workplace, cluster: SlurmCluster, own_broker: OwnBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its workers' steps, `srun` of one, the batch script with all of them, the controller and the broker."""
    name = f"slurm-{os.getpid()}"
    kafka = f'kind = "kafka"\nservers = "{own_broker.address}"\noptions = {{ replication_factor = 1 }}\n'
    text = LONG.replace("[transport]\n", f"[transport]\n{kafka}").replace('"tiny"', f'"{name}"')
    place.write("tiny.toml", f'{text}[evaluations.held-out]\nsource = "arithmetic"\nevery = 20\n')
    job = submit(place, cluster, "--nodes", "2", "--explorers", "2")
    monkeypatch.delenv(MARK)  # daemons that start again are nobody's
    view = place.view(f"runs/{name}")

    def step_of(job: str, worker: str) -> str:
        return cluster.steps(job).get(worker, "")

    def killed(what: str, kill: Callable[[], None]) -> None:
        deaths = output(place, job, name).count("exit 137")
        kill()
        place.wait_for(lambda: output(place, job, name).count("exit 137") > deaths, f"the end of {what}")

    for victim in moments(view, place.wait_for, KILLED, "slurm"):
        match victim:
            case "kafka":
                own_broker.kill()
                own_broker.start()
            case "slurmctld -D":
                cluster.kill_daemon(victim)
            case "script":
                [script] = [one for one in place.processes() if (one.parent() or one).name() == "slurmstepd"
                            and one.cmdline()[-1].endswith("slurm_script")]  # fmt: skip
                script.kill()
                cluster.wait_for_state(job, "FAILED")
                place.assert_nobody_left()
                written = place.folder / "runs" / "slurm" / name / "job.sh"
                job = cluster.submit(written, env={MARK: str(place.folder)})
            case "srun":
                [srun] = [one for one in place.processes() if one.name() == "srun" and "trainer-0" in one.cmdline()
                          and (one.parent() or one).name() != "srun"]  # fmt: skip
                killed(victim, srun.kill)
            case _:
                step = place.wait_for(partial(step_of, job, victim), victim)
                killed(victim, partial(cluster.tell, step, signal.SIGKILL))
    goes_on(view, place.wait_for)
    assert place.look("drain", f"runs/{name}").code == 0
    assert cluster.wait_for_state(job, "COMPLETED")["ExitCode"] == "0:0", output(place, job, name)
    place.assert_nobody_left()
    view.assert_nothing_lost()


@pytest.mark.sampled(2, "slurm")
@pytest.mark.law("lost")
def test_runs_of_an_array_are_apart(place: Workplace, cluster: SlurmCluster) -> None:
    """SLURM takes the id of one of them for that of all: what ends that one ends no other."""
    place.write("base.toml", LONG)
    each = [
        word for name in ("a", "b") for word in ("--each", str(place.write(f"{name}.toml", f'run.name = "{name}"')))
    ]
    done = place.look("launch", "slurm", "base.toml", *each)
    assert done.code == 0, done.err
    job = done.out.removeprefix("Submitted batch job ").partition(";")[0]
    views = [place.view(f"runs/{name}") for name in ("a", "b")]
    place.wait_for(lambda: all(view.curve().version >= 2 for view in views), "steps of both")
    (last,) = (number for number in (0, 1) if cluster.job(f"{job}_{number}")["JobId"] == job)
    cluster.call("scancel", "--batch", "--signal=USR2", f"{job}_{last}")
    cluster.wait_for_state(f"{job}_{last}", "PENDING")
    version = views[1 - last].curve().version
    place.wait_for(lambda: views[1 - last].curve().version >= version + 2, "steps of the other one")
    assert cluster.job(f"{job}_{1 - last}")["JobState"] == "RUNNING"
    logs = place.folder / "runs" / "slurm" / "a"
    assert "started again" not in (logs / f"job-{job}_{1 - last}.log").read_text()
    assert place.look("drain", f"runs/{'ab'[1 - last]}").code == 0
    cluster.wait_for_state(f"{job}_{1 - last}", "COMPLETED")
    cluster.call("scancel", job)
    place.assert_nobody_left()
    for view in views:
        view.assert_nothing_lost()


@pytest.mark.sampled(2, "slurm")
def test_what_another_try_cannot_mend_ends_the_job(place: Workplace, cluster: SlurmCluster) -> None:
    place.write("tiny.toml", LONG)
    call = f'#!/usr/bin/env bash\n[[ "$*" != *verifier* ]] || exit 2\nexec {sys.executable} -m rftstream "$@"\n'
    command = place.write("refuses", call)
    command.chmod(0o755)
    job = submit(place, cluster, "--command", str(command))
    ended = cluster.wait_for_state(job, "FAILED")
    said = output(place, job)
    assert ended["ExitCode"] == "1:0", said
    assert "verifier-0: exit 2, which another try cannot mend" in said
    assert "submit the job once more" in said
    place.assert_nobody_left()
    place.write("tiny.toml", LONG.replace('backend = "fake"', 'backend = "fake"\nlrr = 1'))
    again = cluster.submit(place.folder / "runs" / "slurm" / "tiny" / "job.sh")
    assert cluster.wait_for_state(again, "FAILED")["ExitCode"] == "2:0"
    assert "trainer.lrr" in output(place, again)


@pytest.mark.sampled(2, "slurm")
def test_workers_start_on_their_nodes_all_at_once(place: Workplace, cluster: SlurmCluster) -> None:
    """Also where nodes have no more than one of them needs. Each that needs a GPU sees one of its own."""
    kafka = '[transport]\nkind = "kafka"\nservers = "localhost:1"\n'
    text = FAKE.replace("[transport]\n", kafka).replace("[explorer]", '[explorer]\nthreads = 2\ndevices = ["cuda:0"]')
    place.write("tiny.toml", text.replace("[trainer]", '[trainer]\ndevice = "cuda:0"'))
    command = place.write("stands-in", STANDS_IN)
    command.chmod(0o755)
    job = submit(place, cluster, "--nodes", "2", "--explorers", "3", "--verifiers", "2", "--command", str(command))
    started = ("feeder-0", "buffer-0", "trainer-0", *(f"explorer-{n}" for n in range(3)), "verifier-0", "verifier-1")
    place.wait_for(lambda: set(started) <= cluster.steps(job).keys(), "all steps at once")
    logs = place.folder / "runs" / "slurm" / "tiny" / "attempt-0"
    place.wait_for(lambda: all((logs / f"{name}.log").read_text() for name in started), "a line of each")
    told = {name: (logs / f"{name}.log").read_text().split() for name in started}
    config = loader.load([place.folder / "tiny.toml"])
    planned = plan_steps(config, JobSettings(nodes=2, counts=(("explorer", 3), ("verifier", 2))))
    assert {name: node for name, (node, _) in told.items()} == {step.name: f"n{step.node + 1}" for step in planned}
    gpus = [(node, gpu) for node, gpu in told.values() if gpu != "none"]
    assert {name for name, (_, gpu) in told.items() if gpu != "none"} == {step.name for step in planned if step.gpus}
    assert len(gpus) == len(set(gpus)) == 4, told
    assert {len(gpu.split(",")) for _, gpu in gpus} == {1}


@pytest.mark.sampled(2, "slurm")
def test_a_script_that_was_printed_can_be_submitted(place: Workplace, cluster: SlurmCluster) -> None:
    options = ("--sbatch=--partition=all", "--before", "echo loaded")
    done = place.look("launch", "slurm", "tiny.toml", "--dry-run", *options)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert "#SBATCH --partition=all" in lines
    assert lines.index("echo loaded") > max(n for n, line in enumerate(lines) if line.startswith("#SBATCH"))
    job = cluster.submit(place.write("job.sh", done.out))
    assert cluster.wait_for_state(job, "COMPLETED")["ExitCode"] == "0:0", output(place, job)
    assert output(place, job).startswith("loaded")
    assert place.view("runs/tiny").assert_nothing_lost().version == 6
    shellcheck = subprocess.run(["shellcheck", "-"], input=done.out, capture_output=True, text=True, check=False)
    assert shellcheck.returncode == 0, shellcheck.stdout + shellcheck.stderr


def test_without_slurm_a_submission_is_refused(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(place.folder / "nothing"))
    refused = place.look("launch", "slurm", "tiny.toml")
    assert (refused.code, "no sbatch here" in refused.err) == (2, True)


class OwnBackend:
    """A backend of somebody's own that trains in several processes, and says by which setting."""

    processes_setting = "ranks"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        ranks: int = 1


def make_config(**changed: Any) -> RunConfig:
    return loader.from_dict({
        "run": {"name": "big", "steps": 1},
        "model": {"path": "fake"},
        "tasksets": {"sums": {"source": "arithmetic"}},
        "explorer": {"count": 3, "devices": ["cuda:0", "cuda:1"], "threads": 4},
        "trainer": {"device": "cuda:0", "backend": "deepspeed"},
        "backends": {"deepspeed": {"processes": 4}},
        "verifier": {"processes": 6},
        "transport": {"kind": "kafka", "servers": "k:9092"},
        **changed,
    })  # fmt: skip


def test_roles_are_dealt_to_nodes(tmp_path: Path) -> None:
    config, settings = make_config(), JobSettings(nodes=3, counts=(("verifier", 2),), command=("rftstream",))
    steps = {one.name: one for one in plan_steps(config, settings)}
    assert {one.node for one in steps.values() if one.role in ("feeder", "buffer", "trainer")} == {0}
    assert [steps[f"explorer-{number}"].node for number in range(3)] == [2, 1, 0]
    assert [steps[f"verifier-{number}"].node for number in range(2)] == [2, 1]
    assert (steps["trainer-0"].gpus, steps["explorer-2"].gpus, steps["verifier-0"].gpus) == (4, 1, 0)
    assert (steps["explorer-0"].cpus, steps["verifier-0"].cpus) == (4, 7)
    script = job_script([JobRun(config=config, files=[tmp_path / "a b.toml"])], tmp_path, settings)
    assert "#SBATCH --gpus-per-node=5" in script, "as many as the node needs that needs most"
    assert "#SBATCH --cpus-per-task=11" in script
    assert f"files=('{tmp_path}/a b.toml')" in script
    assert "--relative=2" in script
    own = {"device": "cuda:0", "backend": "tests.e2e.test_slurm:OwnBackend"}
    config = make_config(trainer=own, backends={own["backend"]: {"ranks": 3}})
    (trainer,) = (one for one in plan_steps(config, JobSettings(nodes=1)) if one.role == "trainer")
    assert trainer.gpus == 3
    with pytest.raises(ConfigError, match=r"--nodes 3: the log of transport\.kind 'embedded' is on one host"):
        plan_steps(make_config(transport={}), settings)
    with pytest.raises(ConfigError, match=r"--set run\.steps=3: .*write them there"):
        job_script([], tmp_path, settings, sets=["run.steps=3"])
    with pytest.raises(ConfigError, match=r"--each: several runs are named 'big', expected a run\.name of its own"):
        job_script([JobRun(config=config, files=[])] * 2, tmp_path, JobSettings(), is_array=True)
