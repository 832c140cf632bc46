"""Access rights: tokens, which are stored as digests, and the sessions that browsers get for them."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from rftstream.errors import ConfigError

PREFIX = "rfts-"
"""Prefix of a token, by which scanners for leaked secrets recognise one."""
SESSION_S = 12 * 3600.0
"""Seconds that a browser stays logged in."""
MAX_SESSIONS = 10_000
_NAME = re.compile(r"[A-Za-z0-9@._-]{1,64}")


class StudioRole(IntEnum):
    """The rights of a person. Each role includes the rights of those before it."""

    viewer = 1
    """Look at the pages."""
    annotator = 2
    """Answer questions and judge rollouts."""
    operator = 3
    """Send requests to the run: pause it, evaluate, put dead groups back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Viewer:
    """The person who makes a request."""

    name: str
    role: StudioRole
    is_local: bool = False
    """Whether the person came without a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEntry:
    """An entry of the token file."""

    name: str
    role: StudioRole
    digest: str
    """SHA-256 of the token. A token has 256 random bits, so a slower hash is not needed."""


class TokenFile:
    """The tokens of a studio on this machine. The file has only digests, so it reveals no token."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def entries(self) -> list[TokenEntry]:
        """Return the entries. ConfigError if the file is damaged, or if others may write to it."""
        try:
            status = self.path.stat()
            found = json.loads(self.path.read_text(encoding="utf-8"))
            entries = [
                TokenEntry(name=one["name"], role=StudioRole[one["role"]], digest=one["sha256"])
                for one in found["tokens"]
            ]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise ConfigError(
                f"{self.path}: got {type(error).__name__}: {error}, expected the tokens of the studio; remove the file "
                "and make new ones with --new-token"
            ) from None
        if status.st_mode & 0o022:
            raise ConfigError(f"{self.path}: others may write this file, expected mode 0600; chmod 600 it")
        return entries

    def make(self, name: str, role: StudioRole) -> str:
        """Make a token for a name, replacing an older one, and return it. Only its digest is stored."""
        check_name(name, "--new-token")
        token = PREFIX + secrets.token_urlsafe(32)
        entries = [entry for entry in self.entries() if entry.name != name]
        self._write([*entries, TokenEntry(name=name, role=role, digest=digest_of(token))])
        return token

    def revoke(self, name: str) -> StudioRole:
        """Revoke the token of a name, which ends its sessions, and return its role. ConfigError if there is none."""
        entries = self.entries()
        found = next((entry for entry in entries if entry.name == name), None)
        if found is None:
            known = ", ".join(entry.name for entry in entries) or "none"
            raise ConfigError(f"--revoke-token: {name!r} has no token in {self.path}, expected one of: {known}")
        self._write([entry for entry in entries if entry is not found])
        return found.role

    def _write(self, entries: Sequence[TokenEntry]) -> None:
        text = json.dumps(
            {"tokens": [{"name": entry.name, "role": entry.role.name, "sha256": entry.digest} for entry in entries]},
            indent=1,
        )
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
        partial.replace(self.path)

    def find(self, token: str) -> Viewer | None:
        """Return the owner of the token, or None. The comparison takes equally long for any token."""
        digest, found = digest_of(token), None
        for entry in self.entries():
            if hmac.compare_digest(entry.digest, digest):
                found = Viewer(name=entry.name, role=entry.role)
        return found


def check_name(name: str, option: str) -> None:
    """Raise ConfigError if this name is not allowed."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{option}: got the name {name!r}, expected 1 to 64 letters, digits and @ . _ -")


def digest_of(token: str) -> str:
    """Return the digest of a token, which is stored."""
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()


def default_token_file(environment: Mapping[str, str] | None = None) -> Path:
    """Return the file with a user's tokens."""
    environment = os.environ if environment is None else environment
    state = environment.get("XDG_STATE_HOME")
    base = Path(state) if state and Path(state).is_absolute() else Path.home() / ".local" / "state"
    return base / "rftstream" / "studio" / "tokens.json"


class Sessions:
    """Browser sessions that began with a token. They end with the process, and after SESSION_S."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, str]] = {}
        """Digest of the session's name -> its end, and the digest of its token."""

    def begin(self, token: str) -> str:
        """Return the name of a new session, for a cookie."""
        name = secrets.token_urlsafe(32)
        while len(self._known) >= MAX_SESSIONS:
            self._known.pop(next(iter(self._known)))
        self._known[digest_of(name)] = (time.monotonic() + SESSION_S, digest_of(token))
        return name

    def find(self, name: str, tokens: TokenFile) -> Viewer | None:
        """Return the owner of a session, or None. A revoked token ends its sessions."""
        ends_at, token_digest = self._known.get(digest_of(name), (0.0, ""))
        if ends_at < time.monotonic():
            self._known.pop(digest_of(name), None)
            return None
        found = next((entry for entry in tokens.entries() if entry.digest == token_digest), None)
        return None if found is None else Viewer(name=found.name, role=found.role)

    def end(self, name: str) -> None:
        """Forget a session."""
        self._known.pop(digest_of(name), None)
