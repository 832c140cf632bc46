"""Addresses of servers, and the keys that are sent to them."""

from __future__ import annotations

import re
import socket
from urllib.parse import SplitResult, urlsplit

from rftstream.config import secrets
from rftstream.errors import ConfigError

PORTS = {"http": 80, "https": 443}


def split_url(url: str) -> SplitResult | None:
    """Return the parts of a server's address; None for an invalid one. The caller decides whether it may contain a user
    or a query."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in PORTS and bool(parts.hostname) and parts.port != 0
        (parts.hostname or "").encode("idna")
    except ValueError:  # a port that is no number, unbalanced brackets, an invalid host name
        return None
    target = target_of(parts, "")
    return parts if is_address and re.fullmatch(r"[!-~]*", target) else None  # all that a request line may hold


def target_of(parts: SplitResult, resource: str) -> str:
    """Return the target, in a request's first line, of a resource below an address."""
    path = parts.path.rstrip("/") + resource if resource else parts.path or "/"
    return f"{path}?{parts.query}" if parts.query else path


def host_and_port(parts: SplitResult) -> tuple[str, int]:
    """Return the host and port of the address."""
    return str(parts.hostname), parts.port or PORTS[parts.scheme]


def keep_alive_options(idle_s: int, every_s: int, times: int) -> tuple[tuple[int, int, int], ...]:
    """Return socket options with which the system checks that the other host is there: after how many idle seconds, how
    often, and how many times without an answer. Not every system has all of them."""
    wanted = {"TCP_KEEPIDLE": idle_s, "TCP_KEEPINTVL": every_s, "TCP_KEEPCNT": times}
    names = [(getattr(socket, name), value) for name, value in wanted.items() if hasattr(socket, name)]
    return ((socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *((socket.IPPROTO_TCP, *pair) for pair in names))


def check_key(key: str, setting: str) -> None:
    """Raise ConfigError for a key that no HTTP header can hold: a client's own error would show the key."""
    if not re.fullmatch(r"[!-~]+", key):
        raise ConfigError(
            f"{setting}: found a space, a line break or another sign that no header can hold (it is not shown here), "
            "expected the key alone; set the environment variable without it"
        )


def hide(text: str, *keys: str) -> str:
    """Return the text without the keys: servers repeat rejected keys in their answers."""
    for key in keys:
        text = text.replace(key, "***") if key else text
    return secrets.hidden(text)
