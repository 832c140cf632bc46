"""Whether the model servers that sample for a run are there."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from rftstream.config.sections import RunConfig
from rftstream.http.address import host_and_port
from rftstream.models.server_client import split_url

CONNECT_S = 2.0
"""Seconds that a server may take to accept a connection."""


def look_at_servers(config: RunConfig, policies: Sequence[str]) -> str | None:
    """Return which servers of these policies accept connections; None if none of them asks any. ConfigError for an
    address that is none. One that is away is no error: it may come yet, and others are asked meanwhile."""
    said = []
    for name in policies:
        _, options = config.build_part("policy", name)
        urls: Sequence[str] = getattr(options, "urls", ())
        if not urls:
            continue
        addresses = [host_and_port(split_url(url, f"policies.{name}")) for url in urls]
        with ThreadPoolExecutor(min(32, len(urls))) as threads:
            errors = list(threads.map(_error, addresses))
        there = f"{name}: {errors.count(None)} of {len(urls)} model servers there"
        said.append("; ".join([there, *(f"{url}: {error}" for url, error in zip(urls, errors, strict=True) if error)]))
    return ". ".join(said) or None


def _error(address: tuple[str, int]) -> str | None:
    try:
        socket.create_connection(address, timeout=CONNECT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None
