"""A run on tasks of Harbor that are bad in all ways: each rollout ends with a reason, and nothing is left."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from pathlib import Path

import pytest

from rftstream.contracts.rollouts import Rollout, RolloutStatus
from rftstream.environments.places.bubblewrap import PREFIX
from tests.e2e.workplace import FAKE, Workplace
from tests.unit.data.test_harbor_tasks import task_at

pytestmark = [pytest.mark.slow, pytest.mark.law("lost")]

SOURCE = 'source = "harbor:tasks"\nenvironment = "harbor"\nreward = "environment"\npasses = 1'
RUN = (
    FAKE.replace('source = "arithmetic"', SOURCE)
    .replace("steps = 6\n", "")
    .replace("max_tokens = 8", "max_tokens = 400")
    .replace("groups_per_batch = 2\ngroup_size = 3", "groups_per_batch = 1\ngroup_size = 2")
) + """
[policies.fake]
mean_tokens = 8.0
[environments.harbor]
place = "bubblewrap"
root = "/"
command = 'eval "$INSTRUCTION"'
places = 4
disk_mb = 24
pids = 100
"""  # fmt: skip

ASK = r"""
body='{"model": "policy", "messages": [{"role": "user", "content": "1+1="}]}'
ask() {
  exec 3<>/dev/tcp/127.0.0.1/8900
  printf 'POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n' >&3
  printf 'Authorization: Bearer %s\r\nContent-Type: application/json\r\n' "$OPENAI_API_KEY" >&3
  printf 'Content-Length: %s\r\n\r\n%s' ${#body} "$body" >&3; cat <&3
}
ask
"""
"""The instruction of each task is what its agent does. It begins with a call."""
HARMLESS = "#!/bin/sh\necho 1 > /logs/verifier/reward.txt"

TASKS: dict[str, tuple[str, dict[str, str], str | float]] = {
    "calls-after-its-end": (ASK + "(while sleep 0.1; do ask; done) >/dev/null 2>&1 &", {}, 1.0),
    "forks": (ASK + "f() { f | f & }; f; sleep 2", {}, 1.0),
    "fills-its-disk": (
        ASK + "for i in 1 2 3 4; do head -c 10000000 /dev/zero > $i; done; sleep 100", {},
        "the place was ended: it wrote ",
    ),
    "hangs": (
        ASK, {"test": "#!/bin/sh\nsleep 100", "toml": "[verifier]\ntimeout_sec = 1.0"},
        "the tests took longer than 1 s",
    ),
    "never-calls": ("echo thinking", {}, "the agent never called the model: exit code 0: thinking"),
    "no-reward": (ASK, {"test": "#!/bin/sh\necho sorry; exit 4"}, "wrote no reward, "),
    "wants-a-network": (ASK + "timeout 5 bash -c 'exec 4<>/dev/tcp/1.1.1.1/80' || exit 9", {}, 1.0),
}  # fmt: skip
"""Task -> what its agent does, its other files, and its reward, or why it has none."""


def test_each_rollout_ends_with_its_reason_and_leaves_nothing(place: Workplace) -> None:
    for name, (agent, files, _) in TASKS.items():
        task_at(place.folder / "tasks" / name, **{"instruction": agent, "test": HARMLESS, **files})
    place.write("run.toml", RUN)
    done = place.call("run", "run.toml", "--json")
    assert done.code == 0 and done.result["reason"] == "taskset", done.err
    view = place.view("runs/tiny")
    view.assert_nothing_lost()
    found: dict[str, list[Rollout]] = defaultdict(list)
    names = {one.ids.rollout_id: str(one.problem.info["task"]) for one in view.messages("tasks")}  # type: ignore[attr-defined]
    for rollout in view.rollouts():
        found[names[rollout.ids.rollout_id]].append(rollout)
    assert set(found) == set(TASKS)
    for name, (_, _, end) in TASKS.items():
        for rollout in found[name]:
            if isinstance(end, str):
                assert rollout.status is RolloutStatus.failed and end in str(rollout.error), name
            else:
                assert rollout.posted is not None and rollout.posted.reward == end, (name, rollout.error)
                assert len(rollout.calls) == 1
                assert (rollout.metrics["agent_exit_code"] == 9.0) == (name == "wants-a-network")
    place.assert_nobody_left()
    left = [path.name for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*")]
    assert not [name for name in left if not Path("/proc", name.split("-")[-3]).exists()], left
