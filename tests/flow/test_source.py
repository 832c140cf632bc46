"""Sources: what wakes them, and that each thing from outside is written once, whatever happens around a commit."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from rftstream.contracts import codec
from rftstream.contracts.control import DesiredState, RunFinished
from rftstream.contracts.feedback import Feedback
from rftstream.contracts.records import NewRecord
from rftstream.contracts.versions import VersionName
from rftstream.errors import ProducerLost, TransactionAborted, TransportError
from rftstream.service.loops.self_pipe import SelfPipe
from rftstream.service.role import FOREVER, Publish, Received, Role, RoleContext, Wakeup
from rftstream.service.role_spec import RoleKind, RoleSpec
from rftstream.testing import Faults, RoleDriver, Simulation
from rftstream.testing.faults import Kill
from tests.flow.scene import Scene, make_config

SPEC = RoleSpec(
    name="listener",
    kind=RoleKind.source,
    build="tests:nothing",
    summary="a socket -> feedback",
    follows=("feedback",),
    produces=("feedback",),
)


class Listener:
    """Each datagram is an id to be written once; it is sent back when it is on the log."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.written: set[str] = set()
        self.in_hand: list[str] = []
        """Taken in, and not handed out."""
        self.slow = False
        """Whether what is taken in is handed out later."""
        self.leaving = False

    def follow(self, received: Received) -> None:
        assert isinstance(received.message, Feedback)
        self.written.add(received.message.feedback_id)

    def advance(self) -> tuple[Publish, ...]:
        while not self.leaving:
            try:
                name = self.end.recv(100).decode()
            except BlockingIOError:
                break
            if name in self.written:
                self.end.send(name.encode())
            elif name not in self.in_hand:
                self.in_hand.append(name)
        if self.slow:
            return ()
        names, self.in_hand = self.in_hand, []
        return tuple(Publish("feedback", 0, feedback(name)) for name in names)

    def committed(self, outputs: tuple[Publish, ...]) -> None:
        for output in outputs:
            assert isinstance(output.message, Feedback)
            self.written.add(output.message.feedback_id)
            self.end.send(output.message.feedback_id.encode())

    def wakeups(self) -> Sequence[Wakeup]:
        return (self.end,)

    def idle_s(self) -> float:
        return FOREVER

    def draining(self) -> None:
        self.leaving = True

    @property
    def busy(self) -> bool:
        return bool(self.in_hand)

    def health(self) -> Mapping[str, object]:
        return {"written": len(self.written)}

    def close(self) -> None:
        pass


def feedback(name: str) -> Feedback:
    return Feedback(feedback_id=name, rollout_id="0", source="somebody")


class SourceAlone(Simulation):
    """The other roles have nothing to do with what a source does."""

    def _counts(self) -> Mapping[str, int]:
        return {SPEC.name: 1}


class Stage:
    """A run, a source, and the other end of its socket."""

    def __init__(self, folder: Path) -> None:
        self.scene = Scene(folder)
        self.outside, self.inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.outside.setblocking(False)
        self.inside.setblocking(False)
        self.steps: list[Listener] = []
        self.driver = RoleDriver(self.scene, SPEC, build=self._build)

    def _build(self, context: RoleContext) -> Role:
        self.steps.append(Listener(self.inside))
        return Role(spec=SPEC, step=self.steps[-1])

    @property
    def step(self) -> Listener:
        return self.steps[-1]

    def send(self, *names: str) -> None:
        for name in names:
            self.outside.send(name.encode())

    def answers(self) -> list[str]:
        found = []
        while True:
            try:
                found.append(self.outside.recv(100).decode())
            except BlockingIOError:
                return found

    def send_until_answered(self, name: str) -> None:
        for _ in range(200):
            self.send(name)
            self.driver.work()
            self.scene.clock.advance(1.0)
            if name in self.answers():
                return
        raise AssertionError(f"no answer: {self.driver.service.health()}")

    def written(self) -> list[str]:
        return [one.feedback_id for one in self.scene.messages("feedback") if isinstance(one, Feedback)]

    def fail_once(self, point: str, error: BaseException) -> None:
        def fail(at: str, process: str) -> None:
            if at == point and process == self.driver.process:
                self.scene.log.fault = None
                raise error

        self.scene.log.fault = fail

    def close(self) -> None:
        self.outside.close()
        self.inside.close()


class Inbox:
    """What somebody outside sends again and again until it is answered; in place of a socket."""

    def __init__(self) -> None:
        self.waiting: list[str] = []
        self.answered: set[str] = set()


INBOX = Inbox()


class InboxListener(Listener):
    """As Listener, for processes that are simulated."""

    def __init__(self) -> None:
        self.written = set()
        self.leaving = False
        self.in_hand = []

    def advance(self) -> tuple[Publish, ...]:
        names = [] if self.leaving else [name for name in INBOX.waiting if name not in self.written][:3]
        INBOX.answered |= {name for name in INBOX.waiting if name in self.written}
        return tuple(Publish("feedback", 0, feedback(name)) for name in names)

    def committed(self, outputs: tuple[Publish, ...]) -> None:
        for output in outputs:
            assert isinstance(output.message, Feedback)
            self.written.add(output.message.feedback_id)

    def wakeups(self) -> Sequence[Wakeup]:
        return ()

    def idle_s(self) -> float:
        return 0.05


def build_inbox_listener(context: RoleContext) -> Role:
    return Role(spec=SPEC, step=InboxListener())


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.close()


def test_what_comes_from_outside_is_written_and_answered(stage: Stage) -> None:
    stage.send("a", "b")
    stage.driver.work()
    assert stage.written() == stage.answers() == ["a", "b"]
    stage.send("a")
    stage.driver.work()
    assert stage.written() == ["a", "b"]
    assert stage.answers() == ["a"]


# ---------------------------------------------------------------------------------------------- waiting


def test_a_socket_ends_the_wait(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rftstream.service.service.LOG_LOOK_S", 600.0)
    stage.driver.work()
    sender = threading.Timer(0.05, stage.send, ["a"])
    sender.start()
    began = time.monotonic()
    stage.driver.service.wait(600.0)
    assert time.monotonic() - began < 300
    sender.join()
    stage.driver.work()
    assert stage.answers() == ["a"]


def test_a_future_ends_the_wait(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rftstream.service.service.LOG_LOOK_S", 600.0)
    stage.driver.work()
    pipe = SelfPipe()
    monkeypatch.setattr(stage.step, "wakeups", lambda: (stage.inside, pipe))
    future: Future[None] = Future()
    future.add_done_callback(lambda _: pipe.ring())
    setter = threading.Timer(0.05, future.set_result, [None])
    setter.start()
    began = time.monotonic()
    stage.driver.service.wait(600.0)
    assert time.monotonic() - began < 300
    setter.join()
    pipe.clear()
    pipe.close()


def test_the_log_is_looked_at_while_nothing_comes_from_outside(stage: Stage) -> None:
    stage.driver.work()
    stage.driver.service.wait(600.0)  # returns, since no transport is asked
    stage.scene.ask(DesiredState.paused)
    stage.driver.work()
    assert stage.driver.service.health()["state"] == "paused"


# ---------------------------------------------------------------------------------------------- exactly once

POINTS = ["before_start", "before_commit", "in_commit", "marking", "after_commit"]


@pytest.mark.law("lost", "twice")
@pytest.mark.parametrize("point", POINTS)
def test_killed_around_a_commit(stage: Stage, point: str) -> None:
    stage.fail_once(point, Kill(point))
    stage.send("a")
    with pytest.raises(Kill):
        stage.driver.work()
    assert stage.answers() == []
    stage.driver.restart()
    stage.send_until_answered("a")
    stage.send_until_answered("b")
    assert stage.written() == ["a", "b"]


FAILURES = [
    *((point, ProducerLost("simulated")) for point in POINTS),
    *((point, TransactionAborted("simulated")) for point in ("before_start", "before_commit", "in_commit")),
    ("question", TransportError("simulated")),
]


@pytest.mark.law("lost", "twice")
@pytest.mark.parametrize(
    ("point", "error"), FAILURES, ids=lambda one: one if isinstance(one, str) else type(one).__name__
)
def test_a_commit_that_fails(stage: Stage, point: str, error: TransportError) -> None:
    stage.fail_once(point, error)
    stage.send("a")
    for _ in range(50):
        stage.driver.tick()
        stage.scene.clock.advance(1.0)
    assert stage.answers() == ["a"]  # without being sent again
    assert stage.written() == ["a"]


def test_nothing_is_written_before_all_is_seen(stage: Stage) -> None:
    """A predecessor died in the middle of a commit, which succeeds when its transaction ends."""
    transactions = stage.scene.log.transactions
    stage.scene.transport("dead").producer("dead", timeout_s=30.0).start()
    record = codec.to_record(feedback("a"), "feedback", 0, run=stage.scene.folder.run_id)
    open_one = transactions.begin("dead", 30.0)
    transactions.append(open_one, [NewRecord("feedback", 0, record.key, record.value, record.headers)])
    stage.send("a")
    for _ in range(10):
        stage.driver.tick()
        stage.scene.clock.advance(0.5)
    assert (stage.written(), stage.answers()) == ([], [])
    with stage.scene.log.changed:
        transactions.decide(open_one, committed=True)
        transactions.mark(open_one)
    for _ in range(50):
        stage.driver.tick()
        stage.scene.clock.advance(1.0)
    assert stage.written() == stage.answers() == ["a"]


@pytest.mark.law("lost", "twice")
@pytest.mark.parametrize("seed", range(5))
def test_whatever_happens_each_is_written_once(tmp_path: Path, seed: int) -> None:
    names = [f"{seed}-{number}" for number in range(60)]
    INBOX.answered = set()
    faults = Faults(share=0.2, roles=(SPEC.name,), kills=8, unknowns=8, aborts=4, silences=4, restarts=3, pauses=2)
    spec = replace(SPEC, build="tests.flow.test_source:build_inbox_listener")
    run = SourceAlone(make_config(), folder=tmp_path, seed=seed, faults=faults, roles=[spec])
    run.put_manifest()
    num_ticks = 0

    def send() -> bool:
        nonlocal num_ticks
        num_ticks += 1
        assert run.num_ticks < 20_000, run.to_text()
        INBOX.waiting = [name for name in names[:num_ticks] if name not in INBOX.answered]
        return len(INBOX.answered) == len(names)

    run.run(until=send)
    written = [one.feedback_id for one in run.messages("feedback") if isinstance(one, Feedback)]
    assert len(set(written)) == len(written), run.to_text()
    assert sorted(written) == sorted(names), run.to_text()
    assert run.plan.happened["kills"] and run.plan.happened["unknowns"]


# ---------------------------------------------------------------------------------------------- control


def test_paused_it_takes_nothing_in(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.driver.work()
    stage.scene.ask(DesiredState.paused)
    stage.driver.work()
    stage.send("a")
    monkeypatch.setattr(stage.step, "wakeups", lambda: pytest.fail("a socket that is not read ends every wait"))
    stage.driver.work()
    stage.driver.service.wait(0.0)
    assert (stage.written(), stage.answers()) == ([], [])
    monkeypatch.undo()
    stage.scene.ask(DesiredState.running)
    stage.driver.work()
    assert stage.written() == stage.answers() == ["a"]


def test_paused_it_ends_what_it_had_begun(stage: Stage) -> None:
    stage.fail_once("before_commit", ProducerLost("simulated"))
    stage.send("a")
    stage.driver.tick()
    stage.driver.tick()
    stage.scene.ask(DesiredState.paused)
    for _ in range(20):
        stage.driver.tick()
        stage.scene.clock.advance(1.0)
    assert stage.written() == stage.answers() == ["a"]


def test_told_to_leave_it_writes_what_it_took_in_and_no_more(stage: Stage) -> None:
    stage.driver.work()
    stage.step.slow = True
    stage.send("a")
    stage.driver.work()
    assert stage.step.busy
    stage.driver.service.drain()
    stage.send("b")
    stage.driver.tick()
    assert not stage.driver.done
    stage.step.slow = False
    stage.driver.stop()
    assert stage.written() == stage.answers() == ["a"]


def test_it_leaves_when_the_run_is_finished(stage: Stage) -> None:
    stage.driver.work()
    stage.scene.put(
        "control", RunFinished(reason="steps", name=VersionName(trainer_epoch=1, version=1), finished_at=0.0)
    )
    stage.driver.work()
    assert stage.driver.done


@pytest.mark.law("twice")
def test_two_of_them_write_beside_each_other(stage: Stage, tmp_path: Path) -> None:
    outside, inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    inside.setblocking(False)
    second = RoleDriver(
        stage.scene, SPEC, process="second", build=lambda context: Role(spec=SPEC, step=Listener(inside))
    )
    for number in range(5):
        stage.send(f"a{number}")
        outside.send(f"b{number}".encode())
        stage.driver.work()
        second.work()
    assert sorted(stage.written()) == [f"{who}{number}" for who in "ab" for number in range(5)]
    outside.close()
    inside.close()
