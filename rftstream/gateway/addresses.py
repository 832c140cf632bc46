"""Where the gateways of a run listen, and the URLs under which agents reach them."""

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
"""Seconds between two searches for other gateways."""


def parse_address(address: str, num_workers: int = 1, *, section: str = RoleName.explorer.value) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`. ConfigError for another text, or if there are too few ports for so many
    workers, which take consecutive ports from a fixed one on."""
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
    """Return the number of a worker that its run started, such as 1 for `explorer-1`; 0 for one started by hand."""
    match = re.fullmatch(r"[a-z]+-(\d{1,4})", process)
    return 0 if match is None else int(match[1])


def base_url(public_url: str, host: str, port: int) -> str:
    """Return the clients' base URL. In the run file's `public_url`, `{port}` stands for the port."""
    shown = f"[{host}]" if ":" in host else host
    return public_url.rstrip("/").replace("{port}", str(port)) or f"http://{shown}:{port}/v1"


class OtherGateways:
    """The run's other gateways where rollouts wait for an agent. A gateway's server makes it, and awaits `addresses`
    when it has no rollout for a request."""

    def __init__(self, find: Callable[[], Sequence[str]]) -> None:
        """`find`: looks for the gateways. It may block, and is called in a thread, once in LOOK_S seconds."""
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
