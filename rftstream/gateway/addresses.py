"""Where the gateways of a run listen, and under which URL agents reach them."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Sequence

from rftstream.contracts.role_names import RoleName
from rftstream.errors import ConfigError

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""Seconds between two looks for other gateways."""


def parse_address(address: str, num_workers: int = 1, *, section: str = RoleName.explorer.value) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`. ConfigError if it is none, or if so many workers, of which each takes a port
    from a fixed one on, have no ports."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{section}.gateway_address: got {address!r}, expected HOST:PORT")
    if int(port) + num_workers - 1 > 65535:
        raise ConfigError(
            f"{section}.gateway_address: got {address!r} for {num_workers} explorers, of which each takes a port from "
            f"this one on; expected at most {65536 - num_workers}"
        )
    return host.strip("[]"), int(port)


def worker_number(process: str) -> int:
    """Return the number of a worker that its run has started, as 1 for `explorer-1`; 0 for one started by hand."""
    match = re.fullmatch(r"[a-z]+-(\d{1,4})", process)
    return 0 if match is None else int(match[1])


def base_url(public_url: str, host: str, port: int) -> str:
    """Return what clients take as their base URL. In the `public_url` of the run file `{port}` is the port."""
    shown = f"[{host}]" if ":" in host else host
    return public_url.rstrip("/").replace("{port}", str(port)) or f"http://{shown}:{port}/v1"


class OtherGateways:
    """The other gateways of the run where rollouts wait for an agent. A gateway's server makes it, and awaits
    `addresses` for a request that it has no rollout for."""

    def __init__(self, find: Callable[[], Sequence[str]]) -> None:
        """`find` looks for them, and may block; it is called in a thread, once in LOOK_S seconds."""
        self._find = find
        self._look: asyncio.Task[Sequence[str]] | None = None
        self._looked_at = 0.0

    async def addresses(self) -> Sequence[str]:
        """Return their base URLs."""
        if self._look is None or (self._look.done() and time.monotonic() - self._looked_at > LOOK_S):
            self._looked_at = time.monotonic()
            self._look = asyncio.create_task(self._found())
        return await asyncio.shield(self._look)

    async def _found(self) -> Sequence[str]:
        try:
            return await asyncio.to_thread(self._find)
        except Exception:
            log.exception("the other gateways cannot be looked for")
            return ()
