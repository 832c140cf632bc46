"""Sandboxes on another machine's server, which `rftstream sandbox serve` runs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from rftstream.errors import ConfigError
from rftstream.http.address import split_url
from rftstream.http.client import HttpClient, RequestFailed
from rftstream.sandbox.base import MIB, BoxFile, BoxRefused, Job, JobEnd, SandboxError

WAIT_S = 600.0
"""Largest number of seconds to wait for the server's answer. The server may have no free place for a while."""


class MadeBox(msgspec.Struct):
    """The answer to a request for a new box."""

    id: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]


# Made here, and not by the first threads that need them: contracts/codec.py says why.
_nothing, _box = msgspec.json.Decoder(dict[str, str]), msgspec.json.Decoder(MadeBox)
_files, _end = msgspec.json.Decoder(list[BoxFile]), msgspec.json.Decoder(JobEnd)


class RemoteBackend:
    """Makes sandboxes on a server. `url` is http://HOST:PORT; `token` is the server's token, if it has one. An answer
    may take `wait_s` seconds in addition to the program's time."""

    def __init__(self, url: str, *, token: str = "", wait_s: float = WAIT_S) -> None:
        address = split_url(url)
        if address is None:
            raise ConfigError(f"sandbox url: found {url!r}, expected http://HOST:PORT")
        self._where = address.netloc
        self._http = HttpClient(address, key=token)
        self.wait_s = wait_s

    def create(self, *, disk_bytes: int = 64 * MIB) -> RemoteSandbox:
        """Return a new sandbox of the server."""
        made = self.ask("POST", "/v1/boxes", {"disk_bytes": disk_bytes}, _box)
        return RemoteSandbox(self, made.id)

    def close(self) -> None:
        """Close all connections. The server ends unused boxes."""
        self._http.close()

    def ask(
        self,
        method: str,
        path: str,
        body: Any,
        answer: msgspec.json.Decoder[Any],
        *,
        more_s: float = 0.0,
        of_files: bool = False,
    ) -> Any:
        """Return the answer to a request, decoded. SandboxError if there is none. Only a request with
        `of_files` can raise BoxRefused, which is the program's fault."""
        content = msgspec.json.encode(body)
        try:
            came = self._http.ask(method, path, content, timeout_s=self.wait_s + more_s)
            if came.status != 200:
                raise (BoxRefused if came.status == 507 and of_files else SandboxError)(
                    f"sandbox: {self._where}: {came.status} {came.body[:500].decode(errors='replace')}"
                )
            return answer.decode(came.body)
        except (RequestFailed, msgspec.MsgspecError) as error:
            raise SandboxError(f"sandbox: {self._where}: {error}") from None


class RemoteSandbox:
    """A box of a server. A RemoteBackend makes it."""

    def __init__(self, backend: RemoteBackend, name: str) -> None:
        self._backend, self._path = backend, f"/v1/boxes/{name}"

    def put(self, files: Sequence[BoxFile]) -> None:
        """Write files below the home folder."""
        self._backend.ask("POST", f"{self._path}/put", list(files), _nothing, of_files=True)

    def get(self, names: Sequence[str] | None = None, *, max_bytes: int = 64 * MIB) -> list[BoxFile]:
        """Return regular files below the home folder."""
        body = {"names": None if names is None else list(names), "max_bytes": max_bytes}
        found: list[BoxFile] = self._backend.ask("POST", f"{self._path}/get", body, _files, of_files=True)
        return found

    def run(self, job: Job) -> JobEnd:
        """Run a program to its end."""
        end: JobEnd = self._backend.ask("POST", f"{self._path}/run", job, _end, more_s=job.limits.hard_s)
        return end

    def close(self) -> None:
        """End the box. If the server cannot be reached, it ends the box itself after a time."""
        with contextlib.suppress(SandboxError):
            self._backend.ask("DELETE", self._path, {}, _nothing)
