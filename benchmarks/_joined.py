"""Joined loops beside our own roles: rollouts per second of a run without a model, on both logs."""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from rftstream.contracts.versions import StepRecord
from rftstream.runs.folder import open_run
from rftstream.service.role import Log

STEPS, WARM_UP = 120, 20
REPEATS = 3
LEAVE_S = 30.0
"""Seconds that a process has to leave in order, when another one has failed."""
RUN_FILE = f"""
[run]
steps = {STEPS}
[model]
path = "fake"
dtype = "float32"
[tasksets.sums]
source = "arithmetic"
[feeder]
groups_per_batch = 8
group_size = 8
[explorer]
policy = "fake"
[trainer]
backend = "fake"
max_steps_without_signal = 0
[policies.fake]
answer_depends_on = "task"
"""
SAMPLER = """
with join(role="explorer") as me:
    while tasks := me.take(64):
        if me.new_version:
            me.weights_folder()
        for task in tasks:
            me.finish(task, tokens=[49, 0], logprobs=[-0.1, -0.1], version=me.version)
"""
TRAINER = """
with join(role="trainer") as me:
    weights = me.state()
    for batch in me.batches():
        weights = {name: one + 0.01 for name, one in weights.items()}
        me.step(batch, weights=weights)
        me.checkpoint({"model": weights})
"""
SCORER = """
with join(role="verifier") as me:
    while tasks := me.take(64):
        for task in tasks:
            me.score(task, float(task.rollout.completion.strip() == task.rollout.answer))
"""
LOOPS = {
    "sampler and trainer": (("explorer.count=0", "trainer.backend=joined"), (SAMPLER, TRAINER)),
    "verifier": (("verifier.count=0",), (SCORER,)),
}
"""What joins in place of our roles -> the settings of the run, and the loops."""
WHEN_THERE = """
import rftstream, sys, time
def join(**how):
    while True:
        try:
            return rftstream.join(sys.argv[1], **how)
        except rftstream.RftError:  # it has not begun
            time.sleep(0.2)
"""

_numbers = itertools.count()


def rate(what: str | None = None, servers: str = "") -> float:
    """Return the rollouts per second of a run after its beginning. `what`: loops that take the place of our roles.
    `servers`: on Kafka."""
    settings, loops = LOOPS[what] if what else ((), ())
    with tempfile.TemporaryDirectory(prefix="rftstream-bench-") as scratch:
        folder = Path(scratch)
        (folder / "run.toml").write_text(RUN_FILE)
        name = f"bench{next(_numbers)}"
        kafka = ("transport.kind=kafka", f"transport.servers={servers}")
        chosen = (f"run.name={name}", *settings, *(kafka if servers else ()))
        sets = [word for one in chosen for word in ("--set", one)]
        run = [sys.executable, "-m", "rftstream", "run", "run.toml", "--progress", "none", *sets]
        _see_through(run, *([sys.executable, "-c", WHEN_THERE + text, f"runs/{name}"] for text in loops), folder=folder)
        with closing(open_run(folder / "runs" / name).transport) as transport:
            steps = [one for _, one in Log(transport).in_force("steps") if isinstance(one, StepRecord)]
    first, last = (one for one in steps if one.name.version in (WARM_UP, STEPS) and not one.resumed)
    return (last.trained_rollouts - first.trained_rollouts) / (last.recorded_at - first.recorded_at)


def _see_through(*commands: Sequence[str], folder: Path) -> None:
    """Run the commands side by side to their ends. If one fails, the others are ended, too, and CalledProcessError is
    raised."""
    with ExitStack() as stack:
        started = []
        for command in commands:
            started.append(subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL))
            stack.callback(_end, started[-1])
        while any(one.poll() is None for one in started):
            for one in started:
                if one.poll():
                    raise subprocess.CalledProcessError(one.returncode, one.args)
            time.sleep(0.1)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(LEAVE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def rates(what: str, servers: str = "") -> tuple[float, float]:
    """Return the median rates of joined loops and of our own roles, measured in turn."""
    found = [(rate(what, servers), rate(servers=servers)) for _ in range(REPEATS)]
    return statistics.median(ours for ours, _ in found), statistics.median(theirs for _, theirs in found)
