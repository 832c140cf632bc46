"""A run as a batch job: the script that `launch slurm` writes, run by bash with an srun that starts processes here."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rftstream.config import loader
from rftstream.config.sections import RunConfig
from rftstream.errors import ConfigError
from rftstream.launch.slurm import JobSettings, job_script, plan_steps
from tests.e2e.workplace import FAKE, Process, Workplace

SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do
  printf '%s ' "$1" >>"$TOLD"
  shift
done
echo "$@" >>"$TOLD"
exec "$@"
"""
SCONTROL = '#!/usr/bin/env bash\necho "scontrol $*" >>"$TOLD"\n'
SBATCH = '#!/usr/bin/env bash\necho "Submitted batch job 7 of $1"\n'


class Cluster:
    """A folder with the commands of SLURM, and what they were told."""

    def __init__(self, place: Workplace) -> None:
        self._place = place
        self.told = place.folder / "told"
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("sbatch", SBATCH)):
            place.write(f"bin/{name}", text).chmod(0o755)

    @property
    def path(self) -> str:
        """Where commands are looked for: whatever the machine has of SLURM stands behind what is here."""
        return f"{self._place.folder / 'bin'}:{os.environ['PATH']}"

    def environment(self, attempt: int = 0) -> dict[str, str]:
        return {"PATH": self.path, "TOLD": str(self.told), "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(attempt)}

    def job(self, attempt: int = 0) -> Process:
        return self._place.start(self._place.folder / "job.sh", command=("bash",), env=self.environment(attempt))


@pytest.fixture
def cluster(place: Workplace) -> Cluster:
    return Cluster(place)


def write_job(place: Workplace, *options: str) -> str:
    done = place.look("launch", "slurm", "tiny.toml", "--dry-run", *options)
    assert done.code == 0, done.err
    place.write("job.sh", done.out)
    return done.out


@pytest.mark.law("lost")
def test_a_job_goes_on_with_the_run_when_its_time_was_up(place: Workplace, cluster: Cluster) -> None:
    """A trainer that dies is started again meanwhile; each attempt has logs of its own."""
    place.write("tiny.toml", FAKE.replace("steps = 6", "steps = 100000").replace(
        "[trainer]", "[backends.fake]\nstep_s = 0.3\n[trainer]"
    ))  # fmt: skip
    write_job(place)
    first = cluster.job()
    view = place.view("runs/tiny")
    place.wait_for(lambda: view.curve().version >= 3, "steps")
    (trainer,) = [one for one in place.processes("trainer") if one.cmdline()[-1] == "trainer"]
    trainer.kill()
    place.wait_for(lambda: view.curve().version >= 6, "steps of the second trainer")
    first.send(signal.SIGTERM)  # as SLURM does with --signal=B:TERM
    done = first.finish()
    assert done.code == 0, done.err
    assert "trainer-0: exit 137; it is started again in 1 s" in done.out
    assert "the time is up" in done.out
    assert cluster.told.read_text().splitlines()[-1] == "scontrol requeue 7"
    place.assert_nobody_left()
    version = view.assert_nothing_lost().version

    job = cluster.job(attempt=1)
    place.wait_for(lambda: view.curve().version > version, "steps of the second attempt")
    assert place.look("drain", "runs/tiny").code == 0
    second = job.finish()
    assert second.code == 0, second.out + second.err + place.report()
    assert "the run has ended" in second.out
    place.assert_nobody_left()
    assert view.assert_nothing_lost().version > version
    assert not (place.folder / "runs" / "tiny-2").exists()
    logs = place.folder / "runs" / "slurm" / "tiny"
    names = {"run.log", *(f"{role}-0.log" for role in ("feeder", "explorer", "verifier", "buffer", "trainer"))}
    for attempt in (0, 1):
        assert {file.name for file in (logs / f"attempt-{attempt}").iterdir()} == names
    third = cluster.job(attempt=2).finish()
    assert (third.code, "the run has ended" in third.out) == (0, True), (
        "a node that fails at the end begins no other run"
    )
    assert not (place.folder / "runs" / "tiny-2").exists()


def test_what_another_try_cannot_mend_ends_the_job(place: Workplace, cluster: Cluster) -> None:
    write_job(place)
    file = place.folder / "tiny.toml"
    place.write("bin/srun", SRUN.replace("exec", '[[ "$*" != *verifier* ]] || exit 2\nexec')).chmod(0o755)
    done = cluster.job().finish()
    assert done.code == 1, done.out + done.err
    assert "verifier-0: exit 2, which another try cannot mend" in done.out
    assert "submit the job once more" in done.out
    place.assert_nobody_left()
    assert "scontrol" not in cluster.told.read_text()
    place.write("tiny.toml", file.read_text().replace('backend = "fake"', 'backend = "fake"\nlrr = 1'))
    broken = cluster.job(attempt=1).finish()
    assert broken.code == 2
    assert "trainer.lrr" in broken.out


def test_it_is_submitted(place: Workplace, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(place.folder / "nothing"))
    refused = place.look("launch", "slurm", "tiny.toml")
    assert (refused.code, "no sbatch here" in refused.err) == (2, True)
    monkeypatch.undo()
    monkeypatch.setenv("PATH", cluster.path)
    done = place.look("launch", "slurm", "tiny.toml", "--sbatch=--partition=gpu", "--before", "module load cuda")
    assert done.code == 0, done.err
    script = place.folder / "runs" / "slurm" / "tiny" / "job.sh"
    assert done.out.startswith(f"Submitted batch job 7 of {script}; its logs are in {script.parent}")
    lines = script.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert "#SBATCH --partition=gpu" in lines
    assert lines.index("module load cuda") > max(n for n, line in enumerate(lines) if line.startswith("#SBATCH"))


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
    script = job_script(config, [tmp_path / "a b.toml"], tmp_path, settings)
    assert "#SBATCH --gpus=7" in script
    assert f"files=('{tmp_path}/a b.toml')" in script
    assert "--relative=2" in script
    with pytest.raises(ConfigError, match=r"--nodes 3: the log of transport\.kind 'embedded' is on one host"):
        plan_steps(make_config(transport={}), settings)
    with pytest.raises(ConfigError, match=r"--set run\.steps=3: .*write them there"):
        job_script(config, [tmp_path / "a.toml"], tmp_path, settings, sets=["run.steps=3"])


def test_shellcheck_finds_nothing(place: Workplace) -> None:
    script = write_job(place, "--explorers", "2")
    done = subprocess.run(["shellcheck", "-"], input=script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
