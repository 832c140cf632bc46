"""A server of sandboxes, and the back end that uses it; what a killed owner leaves; machines that have no sandbox."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rftstream.errors import ConfigError
from rftstream.sandbox import cgroups, layers, run_check, run_function, run_program
from rftstream.sandbox.base import BoxFile, Job, Limits, Outcome, SandboxError
from rftstream.sandbox.local import LocalBackend
from rftstream.sandbox.remote import RemoteBackend
from rftstream.sandbox.server import SandboxServer
from tests.suite.each import each

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def server() -> Iterator[SandboxServer]:
    made = SandboxServer(("127.0.0.1", 0), LocalBackend(slots=2), token="secret-word")
    yield made
    made.close()


@pytest.mark.slow
def test_a_server_runs_what_this_machine_runs(server: SandboxServer) -> None:
    backend = RemoteBackend(server.url, token="secret-word")
    assert run_program("print(int(input()) + 1)", stdin="41", expected="42", backend=backend).passed
    assert run_function("def f(x): return x + 1.5", "f", [[1]], expected=[2.5], backend=backend).passed
    assert run_check("def f(x): return x", "assert f(3) == 3", "f", backend=backend).passed
    assert not run_check("def f(x): return x", "assert f(3) == 4", "f", backend=backend).passed
    backend.close()


def test_files_go_in_and_come_out(server: SandboxServer) -> None:
    backend = RemoteBackend(server.url, token="secret-word")
    box = backend.create()
    try:
        box.put([BoxFile(name="a/b.txt", data=b"\x00in")])
        source = "import os\nopen('out', 'wb').write(open('a/b.txt', 'rb').read())\nos.symlink('/etc/shadow', 'link')\n"
        end = box.run(Job(mode="script", source=source + "os.mkfifo('pipe')"))
        assert (end.exit_code, end.stopped) == (0, None)
        found = {file.name: file.data for file in box.get()}
        assert found == {"a/b.txt": b"\x00in", "out": b"\x00in", "program.py": (source + "os.mkfifo('pipe')").encode()}
        with pytest.raises(SandboxError, match="no path below"):
            box.put([BoxFile(name="../x", data=b"")])
    finally:
        box.close()
        backend.close()


@pytest.mark.slow
def test_a_program_too_large_to_be_taken_out_is_at_fault(server: SandboxServer) -> None:
    backend = RemoteBackend(server.url, token="secret-word")
    source = "char large[70 << 20] = {1};\nint main() { return large[5]; }"
    result = run_program(source, language="c", expected="", backend=backend)
    backend.close()
    assert (result.outcome, result.reason) == (Outcome.failed, "compile"), result.detail


def test_a_command_that_is_not_there_is_our_fault(server: SandboxServer) -> None:
    backend = RemoteBackend(server.url, token="secret-word")
    box = backend.create()
    with pytest.raises(SandboxError, match="the sandbox has no compiler-of-nothing"):
        box.run(Job(mode="command", argv=("compiler-of-nothing", "main.c")))
    box.close()
    backend.close()


def test_a_wrong_token_is_refused(server: SandboxServer) -> None:
    result = run_program("print(1)", backend=RemoteBackend(server.url, token="guess"))
    assert (result.outcome, result.reason) == (Outcome.unscorable, "sandbox")
    assert "401" in result.detail


@each(
    ("head", "status"),
    [
        ({"Content-Length": "200000000"}, 401),
        ({"Content-Length": "200000000", "Authorization": "Bearer guess"}, 401),
        ({"Content-Length": "9" * 15, "Authorization": "Bearer secret-word"}, 413),
        ({"Content-Length": "9" * 5000, "Authorization": "Bearer secret-word"}, 400),
        ({"Content-Length": "-1", "Authorization": "Bearer secret-word"}, 400),
        ({"Transfer-Encoding": "chunked", "Authorization": "Bearer secret-word"}, 400),
    ],
)
def test_a_refused_request_is_not_read(server: SandboxServer, head: dict[str, str], status: int) -> None:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=300)
    connection.putrequest("POST", "/v1/boxes")
    for name, value in head.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()  # although nothing of the body was sent
    assert (answer.status, answer.getheader("Connection")) == (status, "close")
    connection.close()


def test_other_machines_need_a_token() -> None:
    with pytest.raises(ConfigError, match="needs a token"):
        SandboxServer(("0.0.0.0", 0), LocalBackend(slots=1))


def test_a_server_that_is_gone_is_our_fault() -> None:
    result = run_program("print(1)", expected="1", backend=RemoteBackend("http://127.0.0.1:9"))
    assert (result.outcome, result.reason) == (Outcome.unscorable, "sandbox")


def test_connections_that_ended_meanwhile_cost_no_try(server: SandboxServer) -> None:
    backend = RemoteBackend(server.url, token="secret-word")
    assert run_program("print(1)", expected="1", backend=backend).passed
    for idle in backend._http._idle:
        assert idle.socket is not None
        idle.socket.shutdown(socket.SHUT_RDWR)
    assert run_program("print(1)", expected="1", backend=backend).passed
    backend.close()


def test_without_bubblewrap_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    layers.find_layers.cache_clear()
    monkeypatch.setattr("shutil.which", lambda *args, **keywords: None)
    try:
        with pytest.raises(SandboxError, match="install the package bubblewrap"):
            LocalBackend()
    finally:
        monkeypatch.undo()
        layers.find_layers.cache_clear()


@pytest.mark.slow
def test_an_interpreter_that_dies_is_started_again() -> None:
    backend = LocalBackend(slots=1)
    try:
        for _ in range(3):
            assert run_program("print(1)", expected="1", limits=Limits(wall_s=120), backend=backend).passed
            backend._programs._idle[0]._process.kill()
            backend._programs._idle[0]._process.wait()
    finally:
        backend.close()


@pytest.mark.slow
def test_a_killed_owner_leaves_nothing() -> None:
    before = {process.pid for process in psutil.process_iter()}
    owner = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "killed_owner.py")],
        stdout=subprocess.PIPE, cwd=ROOT, env={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert owner.stdout is not None
    owner.stdout.readline()
    started = [process for process in psutil.Process(owner.pid).children(recursive=True) if process.pid not in before]
    owner.kill()
    owner.wait()
    owner.stdout.close()
    assert started
    _, alive = psutil.wait_procs(started, timeout=300)
    assert not alive
    LocalBackend(slots=1).close()
    if (parents := cgroups.find_parents()) is not None:
        left = [
            name for place in parents.by_controller.values() for name in place.glob(f"{cgroups.PREFIX}{owner.pid}-*")
        ]
        assert not left


@pytest.mark.slow
@pytest.mark.skipif(cgroups.find_parents() is None, reason="this machine's cgroups cannot be written to")
def test_an_owner_that_dies_after_its_bubblewrap_leaves_nothing() -> None:
    owner = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "killed_owner.py")],
        stdout=subprocess.PIPE, cwd=ROOT, env={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert owner.stdout is not None
    owner.stdout.readline()
    keepers = psutil.Process(owner.pid).children()
    bubblewraps = [child for keeper in keepers for child in keeper.children()]
    inside = [process for bubblewrap in bubblewraps for process in bubblewrap.children(recursive=True)]
    parents = cgroups.find_parents()
    assert parents is not None
    folders = [
        folder for place in parents.by_controller.values() for folder in place.glob(f"{cgroups.PREFIX}{owner.pid}-*")
    ]
    assert folders
    psutil.Process(owner.pid).suspend()
    for bubblewrap in bubblewraps:
        bubblewrap.kill()
    _, alive = psutil.wait_procs(inside, timeout=300)
    assert not alive
    assert all(folder.exists() for folder in folders), "the owner is to look at them"
    owner.kill()
    owner.wait()
    owner.stdout.close()
    _, alive = psutil.wait_procs(keepers, timeout=300)
    assert not alive
    assert not any(folder.exists() for folder in folders)


@pytest.mark.slow
def test_a_server_on_ipv6() -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    try:
        made = SandboxServer(("::1", 0), LocalBackend(slots=1))
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    backend = RemoteBackend(made.url)
    result = run_program("print(1)", expected="1", limits=Limits(wall_s=120), backend=backend)
    backend.close()
    made.close()
    assert made.url.startswith("http://[::1]:")
    assert result.passed, result
