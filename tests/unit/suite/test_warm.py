"""Processes that the warm interpreter forks."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path

import pytest

from tests import warm

pytestmark = pytest.mark.slow  # the interpreter imports torch


def start(folder: Path) -> warm.Forked:
    """Start `rftstream --version`."""
    with open(os.devnull, "r+b") as nothing:
        stream = nothing.fileno()
        return warm.start(["--version"], cwd=folder, env=dict(os.environ), stdin=stream, stdout=stream, stderr=stream)


def interpreter() -> warm._Interpreter:
    """The one that this process asks."""
    assert warm._interpreter is not None
    return warm._interpreter


def test_whoever_asks_may_be_killed_at_any_instruction(tmp_path: Path) -> None:
    assert start(tmp_path).wait(60) == 0
    server = interpreter()
    request = {"arguments": ["--version"], "cwd": str(tmp_path), "env": {}, "address": server.address}
    for has_asked in (False, True) * 3:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel, open(os.devnull, "r+b") as nothing:
            channel.connect(server.address)
            if has_asked:
                socket.send_fds(channel, [json.dumps(request).encode()], [nothing.fileno()] * 3)
    assert start(tmp_path).wait(60) == 0
    assert interpreter() is server


def test_an_interpreter_that_was_killed_is_started_again(tmp_path: Path) -> None:
    assert start(tmp_path).wait(60) == 0
    server = interpreter()
    os.kill(server._process.pid, signal.SIGKILL)
    server._process.wait(60)
    assert start(tmp_path).wait(60) == 0
    assert interpreter() is not server
