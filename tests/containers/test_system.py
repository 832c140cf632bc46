"""docker-compose.yml on a real engine: a run is killed, stopped, moved and left without room, and balances."""

from __future__ import annotations

import time
from random import Random

import pytest

from tests.containers.engine import Engine, Project, until

pytestmark = [pytest.mark.long, pytest.mark.timeout(4 * 3600)]

RUN = """
run = { name = "tiny", steps = STEPS }
model.path = "fake"
tasksets.sums.source = "arithmetic"
sampling.max_tokens = 8
feeder = { groups_per_batch = 2, group_size = 3, max_staleness = 1 }
explorer.policy = "fake"
trainer = { backend = "fake", checkpoint_every = 5 }
backends.fake.step_s = 0.5
transport.partitions = 4
evaluations.held-out = { source = "arithmetic", every = 20 }
"""
KILLED = ("explorer", "trainer", "kafka", "s3", "buffer", "verifier", "trainer", "feeder", "evaluator", "kafka")
WORKERS = ("feeder", "buffer", "trainer", "evaluator", "explorer", "verifier")
SMALL = "volumes: { s3: { driver: local, driver_opts: { type: none, o: bind, device: FOLDER } } }"


class Story:
    """A run on compose, and what happened to it. Each moment waits for three more versions before."""

    def __init__(self, project: Project, say: list[str]) -> None:
        self.project, self._say = project, say

    def version(self) -> int:
        """Return the newest version that the object store has."""
        objects = self.project.volume("s3").glob("rftstream/tiny/versions/*")
        return max((int(path.stem.rpartition("-")[2]) for path in objects), default=0)

    def goes_on(self, steps: int = 3) -> None:
        """Wait for more versions. Nobody ends meanwhile."""
        first = self.version()
        until(lambda: self.version() >= first + steps, f"steps after {first}")
        assert self.project.deaths() == []

    def told(self, what: str, *awaited: tuple[str, int]) -> list[tuple[str, int]]:
        """Return who ended with which code since the last moment, and write it down. First wait for these ends."""
        deaths: list[tuple[str, int]] = []
        until(lambda: deaths.extend(self.project.deaths()) or set(awaited) <= set(deaths), f"{what}: {awaited}")
        deaths.sort()
        self._say.append(f"{what}: {', '.join(f'{service} {code}' for service, code in deaths) or 'nobody ended'}")
        return deaths

    def ends(self) -> None:
        """Wait for the end of the run; all workers left with 0, it balances, and its model is there."""
        project = self.project
        until(lambda: len(project.exit_codes(WORKERS)) == 9, "all nine workers' ends")
        assert set(project.exit_codes(WORKERS).values()) == {0}
        report = project.rftstream("audit", "/runs/tiny")
        assert "balanced" in report, report
        assert list((project.volume("runs") / "tiny" / "final").iterdir())
        self._say.append("the end: nine workers 0, audit balanced, final/ is there")


@pytest.fixture(autouse=True)
def cpu(engine: Engine, roles: str) -> None:
    """With `fake` parts the services of the image `cpu` need no PyTorch."""
    engine.docker("tag", roles, "rftstream:local-cpu")


def test_a_run_is_killed_stopped_and_moved(engine: Engine, say: list[str]) -> None:
    project = Project(engine, "kills", RUN.replace("STEPS", "150"))
    story, random = Story(project, say), Random("compose")
    up = ("up", "--detach", "--no-build", "--scale", "explorer=4")
    with project.watched():
        project.compose(*up)
        assert {code for _, code in story.told("up", ("create", 0))} == {0}
        for service in KILLED:
            story.goes_on(random.randint(1, 3))
            project.kill(service)
            assert story.told(f"kill -9 of {service}", (service, 137)) == [(service, 137)]
        story.goes_on()
        project.compose("stop")
        codes = story.told("stop", ("kafka", 143))
        assert {code for service, code in codes if service in WORKERS} == {0}
        project.compose("start")
        story.told("start", ("create", 0))
        story.goes_on()
        engine.stop()
        codes = story.told("the engine's end", ("kafka", 143))
        # The broker ends with them: who cannot finish without it ends itself after 40 s, or is killed after 45 s.
        assert {code for service, code in codes if service in WORKERS} <= {0, 1, 137}
    engine.start()
    with project.watched():
        project.compose(*up)
        story.told("up after it", ("create", 0))
        story.goes_on()
        project.compose("down")
        codes = story.told("down", ("kafka", 143))
        assert {code for service, code in codes if service in WORKERS} == {0}
        project.compose(*up)
        story.told("up after it", ("create", 0))
        story.goes_on()
        story.ends()
        project.compose("down", "--volumes")


def test_a_full_volume_is_waited_for(engine: Engine, say: list[str]) -> None:
    """The object store's. Versions cannot be written for a while, and nobody ends."""
    small = engine.folder / "small"
    engine.inside("sh", "-c", f"mkdir {small} && mount -t tmpfs -o size=64m tmpfs {small}")
    project = Project(engine, "full", RUN.replace("STEPS", "40"), SMALL.replace("FOLDER", str(small)))
    story = Story(project, say)
    with project.watched():
        project.compose("up", "--detach", "--no-build", "--scale", "explorer=4")
        story.told("up", ("create", 0))
        story.goes_on()
        since = str(int(time.time()))
        engine.inside("sh", "-c", f"cat /dev/zero >{small}/ballast", check=False)
        until(lambda: "again" in project.compose("logs", "--since", since, "trainer"), "the trainer to say so")
        assert story.told("the store's volume is full") == []
        engine.inside("rm", f"{small}/ballast")
        story.ends()
        project.compose("down", "--volumes")
