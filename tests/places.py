"""What places of every engine do alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from rftstream.environments.places.base import MODEL_PORT, Place
from rftstream.errors import HostedCodeError
from tests.loopback import HttpServer

ASK = (
    f"python3 -c 'import urllib.request as u; print(u.urlopen(\"http://127.0.0.1:{MODEL_PORT}/v1/x\").read().decode())'"
)
MANY = "mkdir /many; cd /many; for i in $(seq 30); do head -c 9000000 /dev/zero > $i; done; sleep 300"
CONNECT = "python3 -c 'import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 60)'"


def made_model() -> HttpServer:
    """A model that answers with the path that it was asked for."""
    return HttpServer(lambda asked: f"asked for {asked.path}")


async def takes_commands_and_files(place: Place, folder: Path) -> None:
    """`place` has the variable OF_ALL, 1."""
    (folder / "a").mkdir()
    (folder / "a" / "b.sh").write_text('#!/bin/sh\necho "it runs: $1"\n')
    (folder / "a" / "b.sh").chmod(0o755)
    await place.put(folder, "/some/where")
    ran = await place.run(
        '/some/where/a/b.sh "$KEY $OF_ALL"; id -u; pwd; exit 3', timeout_s=60, variables={"KEY": "x 'y"}
    )
    assert (ran.exit_code, ran.output) == (3, "it runs: x 'y 1\n0\n/\n")
    other = await place.run("id -u; pwd; sleep 600 & [[ 1 == 1 ]]", timeout_s=60, user="1000", cwd="/tmp")
    assert (other.exit_code, other.output) == (0, "1000\n/tmp\n"), "by bash, and what stays behind keeps nobody waiting"
    assert await place.get("/some/where/a/b.sh", max_bytes=100) == (folder / "a" / "b.sh").read_bytes()
    assert await place.get("/not/there", max_bytes=100) is None
    await place.run("ln -s /etc/passwd /link", timeout_s=60)
    assert await place.get("/link", max_bytes=10000) is None
    assert await place.get("/etc", max_bytes=10000) is None
    with pytest.raises(HostedCodeError, match=r"/etc/passwd: got .* bytes, expected at most 10"):
        await place.get("/etc/passwd", max_bytes=10)


async def ends_what_takes_too_long(place: Place) -> None:
    late = await place.run("setsid sleep 601 & echo begun > /begun; sleep 601", timeout_s=20)
    assert late.exit_code is None
    left = await place.run(
        "cat /begun; grep -l 60[1] /proc/[0-9]*/cmdline; grep -l '^State:.Z' /proc/*/status", timeout_s=60
    )
    assert left.output == "begun\n", "what it started is gone, also in a session of its own"
