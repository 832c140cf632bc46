"""Judgements are written once, also when the source is killed around a commit."""

from __future__ import annotations

import json
import socket
from functools import partial
from pathlib import Path

import pytest
from my_sources import JUDGEMENTS, build

from rftstream.config.loader import load
from rftstream.testing import MemoryRun, RoleDriver
from rftstream.testing.faults import Kill

RUN_FILE = Path(__file__).with_name("own_parts.toml")


class Sender:
    """Somebody who judges rollouts, and sends each judgement until it is answered."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.setblocking(False)

    def send(self, port: int, rollout_id: str) -> None:
        message = {"source": "ann", "rollout_id": rollout_id, "reward": 1.0}
        self._socket.sendto(json.dumps(message).encode(), ("127.0.0.1", port))

    def answers(self) -> list[str]:
        found = []
        while True:
            try:
                found.append(self._socket.recv(1024).decode())
            except BlockingIOError:
                return found

    def close(self) -> None:
        self._socket.close()


def free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize("point", ["before_commit", "in_commit", "after_commit"])
def test_each_judgement_is_written_once(tmp_path: Path, point: str) -> None:
    run = MemoryRun(load([RUN_FILE]), folder=tmp_path)
    run.put_manifest()
    port = free_port()
    source = RoleDriver(run, JUDGEMENTS, build=partial(build, port=port))
    sender = Sender()

    def die(at: str, process: str) -> None:
        if at == point and process == source.process:
            run.log.fault = None
            raise Kill(at)

    run.log.fault = die
    sender.send(port, "7")
    with pytest.raises(Kill):
        source.work()
    assert sender.answers() == []
    source.service.close()  # as the operating system does for a process that was killed
    source.restart()
    answers: list[str] = []
    for _ in range(100):
        sender.send(port, "7")
        source.work()
        run.clock.advance(1.0)  # a transaction that the killed process left open ends after a while
        if answers := sender.answers():
            break
    assert set(answers) == {"ann/7"}
    assert len(run.messages("feedback")) == 1
    source.stop()
    sender.close()
