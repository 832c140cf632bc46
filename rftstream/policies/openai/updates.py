"""New weights for a served model. They are written as a model folder that the servers can also read; then each server
gets an HTTP request to load it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rftstream.contracts.versions import VersionName
from rftstream.errors import ConfigError
from rftstream.http.client import Call
from rftstream.models.folders.folder import copy_companions
from rftstream.models.server_client import ModelServer, Refused, ServerWatch, Unreachable
from rftstream.models.spec import ModelSpec
from rftstream.models.vision.image_tokens import ImageTokens
from rftstream.policies.served import check_tensors, served_parameters
from rftstream.weights.adapters import whole_tensors
from rftstream.weights.snapshot import RawTensor, write_snapshot


@dataclass(frozen=True, kw_only=True)
class UpdateRequest:
    """A POST that is part of giving a server a new version. A run file may list such requests; KNOWN has those of
    vLLM."""

    path: str
    """Path of the POST below the server's root: `/update_weights`."""
    body: dict[str, Any] = field(default_factory=dict)
    """Sent as JSON, with `{folder}` and `{version}` replaced in all texts."""


_FLUSH = UpdateRequest(path="/reset_prefix_cache")
"""Empties vLLM's cache of prompts that the old weights computed."""

_FORGET_IMAGES = UpdateRequest(path="/reset_encoder_cache")
"""Empties vLLM's cache of image features that the old weights computed, for models that are shown images."""

KNOWN: Mapping[str, Sequence[UpdateRequest]] = {
    "vllm": (
        UpdateRequest(
            path="/collective_rpc", body={"method": "reload_weights", "kwargs": {"weights_path": "{folder}"}}
        ),
        _FLUSH,
    ),
    "vllm-cpu": (
        UpdateRequest(
            path="/collective_rpc", body={"method": "rftstream_load", "args": ["{folder}/model.safetensors"]}
        ),
        _FLUSH,
    ),
}
"""Name in the setting `update` -> the requests, in order."""
HINTS = {
    "vllm": "vLLM has this endpoint when it is started with VLLM_SERVER_DEV_MODE=1",
    "vllm-cpu": "vLLM has this when it is started with VLLM_SERVER_DEV_MODE=1 and "
    "--worker-extension-cls rftstream.policies.vllm.worker.WeightsReceiver",
}
"""Name in the setting `update` -> advice if the server refuses."""


class ServerUpdates:
    """Brings versions to the servers. `OpenAiPolicy` makes it. For each version it calls `write`; then `send` for each
    server, from any thread, when no request is running there; and `delete_others` when no server needs an earlier
    version any more."""

    def __init__(
        self,
        update: str | Sequence[UpdateRequest],
        *,
        folder: str | None,
        urls: Sequence[str],
        api_key: str | None,
        timeout_s: float,
        tries: int,
        section: str,
        model: ModelSpec,
    ) -> None:
        """`folder`: where the folders of versions are made; by default, the machine's folder for temporary files.
        ConfigError if it cannot be used. `tries`: number of requests to the only server; with several servers, the
        policy handles failures."""
        self._requests = KNOWN[update] if isinstance(update, str) else update
        self._hint = HINTS.get(update, "") if isinstance(update, str) else ""
        if isinstance(update, str) and ImageTokens.of(model.folder) is not None:
            self._requests = (*self._requests, _FORGET_IMAGES)
        options: dict[str, Any] = {"api_key": api_key, "timeout_s": timeout_s, "section": section}
        options["tries"] = tries if len(urls) == 1 else 1
        self._servers = {
            url: [ModelServer(root_of(url), request.path.lstrip("/"), **options) for request in self._requests]
            for url in urls
        }
        self._watches: dict[str, ServerWatch] = {}
        """Url -> watch that began before the server got its version."""
        self._tries, self._spec = tries, model
        self._parameters, _ = served_parameters(model)
        self._parent = _own_folder(Path(folder or tempfile.gettempdir()), " ".join(urls), f"{section}.update_folder")

    def write(self, tensors: Mapping[str, RawTensor], name: VersionName) -> None:
        """Write a version as a model folder, unless it exists. WeightsError unless the tensors are those of the model;
        no folder is deleted then."""
        where = f"weights {name.trainer_epoch}/{name.version} of {self._spec.name}"
        if self._spec.lora is None:
            check_tensors(tensors, self._parameters, where=where)
        folder = self._folder(name)
        if folder.exists():  # a slow server may be reading it
            return
        part = folder.with_name(f"{folder.name}.part")
        if part.exists():
            shutil.rmtree(part)
        part.mkdir()
        copy_companions(self._spec, part)
        whole = whole_tensors(self._spec, tensors, self._parameters, where=where)
        with (part / "model.safetensors").open("wb") as file:
            write_snapshot(file, whole, {"format": "pt"})
        part.rename(folder)

    def delete_others(self, kept: Collection[VersionName]) -> None:
        """Delete the folders of all versions but these."""
        folders = {self._folder(name) for name in kept}
        for found in self._parent.iterdir():
            if found not in folders:
                shutil.rmtree(found)

    def send(self, url: str, name: VersionName, call: Call) -> None:
        """Ask the server at `url` to load a version that was written. The server has the weights when this returns.
        Raises Refused or Unreachable, with a hint."""
        values = {"{folder}": str(self._folder(name)), "{version}": str(name.version)}
        self._watch(url)
        try:
            for server, request in zip(self._servers[url], self._requests, strict=True):
                self._ask(server, _filled(request.body, values), call)
        except (Refused, Unreachable) as error:
            raise type(error)(f"new weights: {error}{'; ' if self._hint else ''}{self._hint}") from error
        if url not in self._watches:  # the server restarted during the request
            self._watch(url)

    def may_have_lost(self, url: str) -> bool:
        """Return whether the server may have restarted with its initial weights since it got a version."""
        return url in self._watches and not self._watches[url].is_open

    def _watch(self, url: str) -> None:
        """Watch the server from now on."""
        if (old := self._watches.pop(url, None)) is not None:
            old.close()
        if self._requests and (watch := self._servers[url][0].watch()) is not None:
            self._watches[url] = watch

    def _ask(self, server: ModelServer, body: dict[str, Any], call: Call) -> None:
        """Send a request, and repeat it if the server was not ready: it does not empty its cache while a request is
        just ending."""
        for number in range(self._tries):
            if number and server.pause(number, call):
                break
            answer = server.ask(body, call)
            if answer.get("success", True) is not False:
                return
        raise Refused(f"{server.where}: the server answered {json.dumps(answer)[:300]}")

    def _folder(self, name: VersionName) -> Path:
        return self._parent / f"{name.trainer_epoch:06}-{name.version:08}"

    def close(self) -> None:
        """Close the connections, and delete the folders of all versions."""
        for servers in self._servers.values():
            for server in servers:
                server.close()
        for watch in self._watches.values():
            watch.close()
        shutil.rmtree(self._parent, ignore_errors=True)


def root_of(url: str) -> str:
    """Return the address below which a server's own endpoints are; `url` is the address of its API."""
    return url.rstrip("/").removesuffix("/v1")


def _own_folder(parent: Path, urls: str, where: str) -> Path:
    """Return an empty folder that belongs to this user. The same urls always give the same name, so that a killed
    worker leaves nothing behind. ConfigError if the folder cannot be made."""
    folder = parent / f"rftstream-served-{os.getuid()}-{hashlib.sha256(urls.encode()).hexdigest()[:12]}"
    try:
        folder.mkdir(exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            raise ConfigError(f"{where}: {folder} is somebody else's, expected a new one; remove it, or name another")
        folder.chmod(0o755)  # the server may run as another user
        for found in folder.iterdir():
            shutil.rmtree(found)
    except OSError as error:
        raise ConfigError(
            f"{where}: {folder}: {error.strerror or error}; name a folder that this worker can write to and the server "
            "reads under the same path"
        ) from error
    return folder


def _filled(value: Any, values: Mapping[str, str]) -> Any:
    match value:
        case str():
            for name, text in values.items():
                value = value.replace(name, text)
            return value
        case dict():
            return {key: _filled(one, values) for key, one in value.items()}
        case list() | tuple():
            return [_filled(one, values) for one in value]
    return value
