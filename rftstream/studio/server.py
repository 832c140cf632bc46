"""Listens for browsers. `rftstream studio` calls `serve`, which returns when it is told to end."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import uvicorn

from rftstream.errors import ConfigError
from rftstream.runs.folder import named_runs, open_run
from rftstream.studio.access import TokenFile, Viewer
from rftstream.studio.app import make_app
from rftstream.studio.guard import LOOPBACK, GuardRules
from rftstream.studio.watched_run import WatchedRun

NICENESS = 10
"""Added to the process's: roles on the same machine go first."""
GRACE_S = 2
"""Seconds for answers that are under way when the studio ends."""


def serve(
    runs: Sequence[Path],
    *,
    host: str,
    port: int,
    tokens: TokenFile,
    local: Viewer,
    public_hosts: Sequence[str],
    ready: Callable[[str], None],
) -> None:
    """Serve these runs until SIGINT or SIGTERM. `local`: who comes without a token, where none is a must. `ready` is
    called with the address once it can be opened."""
    watched = [WatchedRun(name, partial(open_run, run)) for name, run in named_runs(runs).items()]
    is_local = host in LOOPBACK
    if not is_local and not tokens.entries():
        raise ConfigError(
            f"--host {host}: others can reach this address, so a token is a must, and {tokens.path} has none; make one "
            "with --new-token NAME=viewer, or stay on 127.0.0.1"
        )
    listener = _listen(host, port)
    bound = listener.getsockname()[1]
    rules = GuardRules(
        hosts=frozenset({*LOOPBACK, host.lower(), *(name.lower() for name in public_hosts), *_own_names(is_local)}),
        tokens=tokens,
        local=local if is_local else None,
    )
    with suppress(OSError):
        os.nice(NICENESS)
    config = uvicorn.Config(
        make_app(watched, rules),
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
        h11_max_incomplete_event_size=65_536,
        limit_concurrency=1000,
        proxy_headers=False,
    )
    ready(f"http://{f'[{host}]' if ':' in host else host}:{bound}/")
    with suppress(KeyboardInterrupt):  # uvicorn sends itself once more what ended it
        uvicorn.Server(config).run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens. ConfigError says why there can be none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"--host {host} --port {port}: {error.strerror or error}; name another --port, or 0 for a free one"
        ) from None
    listener.listen(128)
    return listener


def _own_names(is_local: bool) -> tuple[str, ...]:
    return () if is_local else (socket.gethostname().lower(), socket.getfqdn().lower())
