"""A finished run in memory that asks people, a Label Studio over loopback, and bridges between the two."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rftstream.contracts.feedback import Feedback, FeedbackKind
from rftstream.contracts.questions import Question
from rftstream.integrations.label_studio.bridge import Bridge, RoundReport
from rftstream.integrations.label_studio.bridged_run import BridgedRun
from rftstream.integrations.label_studio.client import LabelStudio, PersonalToken
from rftstream.runs.folder import OpenRun
from rftstream.testing import Simulation
from tests.label_studio_server import PERSONAL, FakeLabelStudio
from tests.unit.studio.studio_scene import make_config

SECRET = "a secret of at least sixteen bytes"
RATING, PAIR = FeedbackKind.rating, FeedbackKind.pair


class Killed(BaseException):
    """A simulated SIGKILL of the bridge."""


class Scene:
    def __init__(self, folder: Path, fake: FakeLabelStudio, url: str, **feedback: Any) -> None:
        settings = {"ask": "rating", "share": 1.0, "pairs": 1.0, "quorum": 2, **feedback}
        self.run = Simulation(make_config(feedback=settings), folder=folder, seed=3)
        self.run.run()
        (self.run.folder.path / "config.toml").write_text("")  # a run folder, so that its index lies in it
        self.fake, self.url = fake, url
        self.token = folder / "token"
        self.token.write_text(PERSONAL)
        self.token.chmod(0o600)
        self._sides: list[BridgedRun] = []

    def bridge(
        self, *, timeout_s: float = 300.0, step: Callable[[str], None] | None = None, source: str = "label-studio"
    ) -> StartedBridge:
        """`step` is called before and after each request and each commit, and may raise Killed."""
        run = OpenRun(self.run.folder, self.run.config, self.run.transport(f"bridge-{len(self._sides)}"))
        side = SteppedSide(run, source, step or (lambda point: None))
        self._sides.append(side)
        server = SteppedServer(self.url, PersonalToken(self.token), timeout_s=timeout_s)
        server.step = step or (lambda point: None)
        return StartedBridge(side, server, self.run.clock.now)

    def close(self) -> None:
        for side in self._sides:
            side.close()

    # ------------------------------------------------------------------------------------------ looking

    def questions(self, kind: FeedbackKind) -> list[Question]:
        return [one for one in self.run.messages("questions") if isinstance(one, Question) and one.kind is kind]

    def votes(self) -> list[Feedback]:
        return [one for one in self.run.messages("feedback") if isinstance(one, Feedback)]

    def said(self, question_id: str) -> list[tuple[str, Any, int]]:
        """Kind, answer and revision of each vote on a question, in order."""
        return [
            (str(one.kind), one.choice if one.choice is not None else one.correction or one.reward, one.revision)
            for one in self.votes()
            if one.question_id == question_id
        ]

    def assert_no_twin(self, *, tasks: int = 1) -> None:
        """Each vote stands once, revisions are dense, each question has as many tasks."""
        votes = self.votes()
        assert len({one.feedback_id for one in votes}) == len(votes)
        revisions: dict[tuple[str, str], list[int]] = defaultdict(list)
        for one in votes:
            revisions[one.question_id, one.annotator].append(one.revision)
        assert all(found == list(range(len(found))) for found in revisions.values()), revisions
        per_question = Counter(row["data"]["question"] for row in self.fake.tasks.values())
        assert not per_question or max(per_question.values()) <= tasks
        kinds = Counter(row["description"].splitlines()[0] for row in self.fake.projects.values())
        assert not kinds or max(kinds.values()) == 1


class StartedBridge:
    def __init__(self, side: BridgedRun, server: LabelStudio, now: Callable[[], float]) -> None:
        self.side, self.server = side, server
        self.bridge = Bridge(side, server, now=now)
        self._has_begun = False

    def round(self) -> RoundReport:
        if not self._has_begun:
            self.side.begin()
            self._has_begun = True
        return self.bridge.round()


class SteppedServer(LabelStudio):
    """Tells a test of each request."""

    step: Callable[[str], None]

    def _sent_once(self, method: str, path: str, body: Any, access: str) -> Any:
        self.step(f"before {method} {path.partition('?')[0]}")
        answer = super()._sent_once(method, path, body, access)
        self.step(f"after {method} {path.partition('?')[0]}")
        return answer


class SteppedSide(BridgedRun):
    """Tells a test of each start of the producer and each commit."""

    def __init__(self, run: OpenRun, source: str, step: Callable[[str], None]) -> None:
        super().__init__(run, source)
        self._step = step

    def begin(self) -> None:
        super().begin()
        producer = self._producer
        assert producer is not None
        commit = producer.commit

        def stepped(records: Any, **more: Any) -> None:
            self._step("before commit")
            commit(records, **more)
            self._step("after commit")

        producer.commit = stepped  # type: ignore[method-assign]
        self._step("begun")
