"""Hosts, their guards and the explorer are killed at random moments. Nothing of them is left."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from rftstream.environments.hosts.guard import descendants, parents
from tests.unit.environments.hosts.scene import FOREIGN
from tests.waiting import wait_until

ROOT = Path(__file__).parents[4]
EXPLORER = """
import asyncio, sys
sys.path[:0] = [{root!r}]
from rftstream.environments.hosted import HostedEnvironment
from rftstream.errors import HostedCodeError, HostError
from tests.unit.environments.hosts.scene import PROBLEM, say

async def rollouts():
    config = HostedEnvironment.Config(target={target!r}, processes=2)
    while True:
        environment = HostedEnvironment(config, problem=PROBLEM, seed=0)
        try:
            await environment.start()
            for words in ("children", "forked", "children"):
                await environment.reply(say(words))
        except (HostError, HostedCodeError):  # the latter where a child of the code was killed, which it then missed
            print("lost", flush=True)
        await environment.close()

async def main():
    print("begun", flush=True)
    await asyncio.gather(*(rollouts() for _ in range(3)))

asyncio.run(main())
"""


def marked(mark: str) -> set[int]:
    """Return the processes that have the mark in their environment, as all descendants of a marked one do."""
    found = set()
    for pid, _, _ in parents():
        try:
            if mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.add(pid)
        except OSError:
            pass
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_kills_at_any_moment(tmp_path: Path, seed: int) -> None:
    (tmp_path / "foreign.py").write_text(FOREIGN)
    code = EXPLORER.format(root=str(ROOT), target=f"{tmp_path}/foreign.py:Told")
    mark, chosen = uuid.uuid4().hex, random.Random(seed)
    environment = {**os.environ, "MARK_OF_THE_TEST": mark}
    command = [sys.executable, "-c", code]
    log = tmp_path / "explorer.log"
    with (
        log.open("w") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, env=environment) as explorer,
    ):
        assert explorer.stdout
        explorer.stdout.readline()
        for _ in range(seed % 3 + 1):
            time.sleep(chosen.random() * 0.4)  # any moment will do: that is the point
            if found := sorted(descendants(explorer.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(chosen.choice(found), signal.SIGKILL)
        time.sleep(chosen.random() * 0.3)
        assert explorer.poll() is None, log.read_text()
        explorer.kill()
    wait_until(lambda: not marked(f"MARK_OF_THE_TEST={mark}"))
