"""Listens for browsers. `rftstream studio` calls `serve`, which returns at the end of the studio."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import uvicorn

from rftstream.errors import ConfigError
from rftstream.runs.folder import find_run, named_runs, open_run
from rftstream.runs.studio_address import noted_address
from rftstream.studio.access import TokenFile, Viewer
from rftstream.studio.app import make_app
from rftstream.studio.guard import LOOPBACK, GuardRules
from rftstream.studio.watched_run import WatchedRun

NICENESS = 10
"""Added to the niceness of the process, so that roles on the same machine have priority."""
GRACE_S = 2
"""Seconds to finish open answers when the studio ends."""


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
    """Serve these runs until SIGINT or SIGTERM. `local`: the viewer for requests without a token, if no token is
    required. `ready` is called with the address once it accepts connections."""
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
    url = f"http://{f'[{host}]' if ':' in host else host}:{bound}/"
    ready(url)
    shown = [find_run(run)[0] for run in runs]
    with noted_address(shown, url), suppress(KeyboardInterrupt):  # uvicorn raises the signal that ended it again
        uvicorn.Server(config).run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. ConfigError explains why there can be none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named, since asyncio turns Nagle's algorithm off only then: it cost each page 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
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
