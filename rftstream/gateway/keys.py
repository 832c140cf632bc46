"""Keys of the gateway. Each rollout has one, and so has the run; all derive from the run's secret.

A rollout's key is `rft-` + its id + `.` + HMAC-SHA256(secret, id). So the server finds the rollout by the key, and
nobody can make the key of another rollout. An agent that an explorer starts gets a key of that launch: the launch's
name follows the id, and the HMAC covers both. So calls from an abandoned launch can be recognised.

The secret is never written to the run folder, to a topic or to a log:

- `RFTSTREAM_GATEWAY_SECRET` in the environment, if it is set. Explorers on several machines need it: a key must open
  the same rollout at each of them.
- Otherwise 32 random bytes in a file of this user, `$XDG_STATE_HOME/rftstream/gateway/RUN_ID` (default
  `~/.local/state`), that nobody else may read. The first explorer of the run makes it, the others and those after a
  restart read it.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rftstream.errors import ConfigError

SECRET_VARIABLE = "RFTSTREAM_GATEWAY_SECRET"
MIN_SECRET_BYTES = 16
"""Smallest number of bytes of a secret from the environment."""
PREFIX = "rft-"
_MAX_KEY = 1024
MAX_KNOWN = 10_000
"""Largest number of valid keys that are remembered."""


@dataclass(frozen=True, slots=True)
class KeyOwner:
    """The rollout and launch that a key belongs to."""

    rollout_id: str
    """The rollout."""
    launch: str
    """The launch of its agent; empty for an agent that no explorer has started."""


class GatewayKeys:
    """Makes and checks the keys of one run. The explorer's composition root makes it from `run_secret`."""

    def __init__(self, secret: bytes, run_id: str) -> None:
        self._secret = secret
        self._run_id = run_id
        self._known: dict[str, KeyOwner] = {}
        """Keys that were found valid for this run: an agent sends its key with each call."""

    def __repr__(self) -> str:
        return f"GatewayKeys(run {self._run_id})"  # without the secret

    def rollout_key(self, rollout_id: str, launch: str = "") -> str:
        """Return the key of a rollout. `launch`: letters and digits, for an agent that an explorer starts."""
        name = base64.urlsafe_b64encode(rollout_id.encode()).decode().rstrip("=")
        return f"{PREFIX}{name}{'~' if launch else ''}{launch}.{self._rollout_mac(rollout_id, launch)}"

    def owner_of(self, key: str) -> KeyOwner | None:
        """Return the rollout and launch of a key; None if it is no key of this run."""
        found = self._known.get(key)
        if found is None and (found := self._checked(key)) is not None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[key] = found
        return found

    def _checked(self, key: str) -> KeyOwner | None:
        names, _, mac = key.removeprefix(PREFIX).partition(".")
        name, _, launch = names.partition("~")
        if not key.startswith(PREFIX) or len(key) > _MAX_KEY or not key.isascii():
            return None
        try:
            rollout_id = base64.b64decode(name + "=" * (-len(name) % 4), altchars=b"-_", validate=True).decode()
        except (binascii.Error, ValueError):
            return None
        is_ours = hmac.compare_digest(mac, self._rollout_mac(rollout_id, launch))
        return KeyOwner(rollout_id, launch) if is_ours else None

    def session_token(self) -> str:
        """Return the token with which agents elsewhere ask for this run's rollouts."""
        return f"{PREFIX}run.{self._mac('sessions', '')}"

    def is_session_token(self, token: str) -> bool:
        """Return whether this is the run's token."""
        return token.isascii() and hmac.compare_digest(token, self.session_token())

    def annotator(self, name: str) -> str:
        """Return an annotator's id on the log: 32 hex digits that do not reveal the name."""
        return self._mac("annotator", name)[:32]

    def _rollout_mac(self, rollout_id: str, launch: str) -> str:
        return self._mac("launch", f"{rollout_id}\0{launch}") if launch else self._mac("rollout", rollout_id)

    def _mac(self, kind: str, name: str) -> str:
        text = "\0".join((kind, self._run_id, name))
        return hmac.digest(self._secret, text.encode(), "sha256").hex()


def run_secret(run_id: str, environment: Mapping[str, str] | None = None) -> bytes:
    """Return the secret of a run: from the environment, else from this user's file, which is made if it does not exist.
    ConfigError if the secret is too short, or if others may read the file."""
    environment = os.environ if environment is None else environment
    given = _given_secret(environment)
    if given is not None:
        return given
    path = secret_file(run_id, environment)
    _make_secret(path)
    return _secret_in(path)


def known_secret(run_id: str, environment: Mapping[str, str] | None = None) -> bytes | None:
    """Return the secret of a run if there is one here, else None; no secret is made. ConfigError as for
    `run_secret`."""
    environment = os.environ if environment is None else environment
    given, path = _given_secret(environment), secret_file(run_id, environment)
    return given if given is not None or not path.exists() else _secret_in(path)


def _given_secret(environment: Mapping[str, str]) -> bytes | None:
    given = environment.get(SECRET_VARIABLE)
    if given is not None and len(given.encode()) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"{SECRET_VARIABLE}: got {len(given.encode())} bytes, expected at least {MIN_SECRET_BYTES}; make one "
            "with: openssl rand -hex 32"
        )
    return None if given is None else given.encode()


def secret_file(run_id: str, environment: Mapping[str, str] | None = None) -> Path:
    """Return the file with a run's secret, which is used if the environment has none."""
    environment = os.environ if environment is None else environment
    state = environment.get("XDG_STATE_HOME")
    base = Path(state) if state and Path(state).is_absolute() else Path.home() / ".local" / "state"
    return base / "rftstream" / "gateway" / re.sub(r"[^A-Za-z0-9._-]", "_", run_id)


def _make_secret(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    own = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    if not path.exists():
        with os.fdopen(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32).hex().encode())
        try:
            os.link(own, path)  # completely, or not at all; the first process wins
        except FileExistsError:
            pass
        finally:
            own.unlink()


def _secret_in(path: Path) -> bytes:
    with path.open("rb") as file:
        mode = os.fstat(file.fileno())
        if mode.st_mode & 0o077 or mode.st_uid != os.geteuid():
            raise ConfigError(f"{path}: others may read or own this secret, expected mode 0600 of this user; remove it")
        return file.read()
