"""New weights for a served model: written as a model folder that the server reads, too, then asked for by HTTP."""

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
from rftstream.models import server_client
from rftstream.models.folder import copy_companions
from rftstream.models.server_client import Call, ModelServer, Refused, Unreachable
from rftstream.models.spec import ModelSpec
from rftstream.policies.served import check_tensors, served_parameters
from rftstream.weights.adapters import whole_tensors
from rftstream.weights.snapshot import RawTensor, write_snapshot


@dataclass(frozen=True, kw_only=True)
class UpdateRequest:
    path: str
    """Of a POST, below the server's root: `/update_weights`."""
    body: dict[str, Any] = field(default_factory=dict)
    """Sent as JSON, `{folder}` and `{version}` filled in wherever they stand in a text."""


_FLUSH = UpdateRequest(path="/reset_prefix_cache")
"""What the old weights made of prompts is of no use any more."""

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
HINTS = {
    "vllm": "vLLM has this endpoint when it is started with VLLM_SERVER_DEV_MODE=1",
    "vllm-cpu": "vLLM has this when it is started with VLLM_SERVER_DEV_MODE=1 and "
    "--worker-extension-cls rftstream.policies.vllm_worker.WeightsReceiver",
}


class ServerUpdates:
    """`write`, then `send`, which may be called in another thread, when the server has nothing else to do."""

    def __init__(
        self,
        update: str | Sequence[UpdateRequest],
        *,
        folder: str | None,
        url: str,
        api_key: str | None,
        timeout_s: float,
        tries: int,
        section: str,
        model: ModelSpec,
    ) -> None:
        """`folder`: where the folders of versions are made; default: the one for temporary files. ConfigError if
        there is none."""
        self._requests = KNOWN[update] if isinstance(update, str) else update
        self._hint = HINTS.get(update, "") if isinstance(update, str) else ""
        root = url.rstrip("/").removesuffix("/v1")
        self._servers = [
            ModelServer(root, one.path.lstrip("/"), api_key=api_key, timeout_s=timeout_s, tries=tries, section=section)
            for one in self._requests
        ]
        self._tries, self._spec = tries, model
        self._parameters, _ = served_parameters(model)
        self._parent = _own_folder(Path(folder or tempfile.gettempdir()), url, f"{section}.update_folder")

    def write(
        self, tensors: Mapping[str, RawTensor], name: VersionName, *, keep: Collection[VersionName | None]
    ) -> None:
        """Deletes other versions but those."""
        where = f"weights {name.trainer_epoch}/{name.version} of {self._spec.name}"
        if self._spec.lora is None:
            check_tensors(tensors, self._parameters, where=where)
        kept = {self._folder(one) for one in keep if one is not None}
        for found in self._parent.iterdir():
            if found not in kept:
                shutil.rmtree(found)
        folder = self._folder(name)
        folder.mkdir()
        copy_companions(self._spec, folder)
        whole = whole_tensors(self._spec, tensors, self._parameters, where=where)
        with (folder / "model.safetensors").open("wb") as file:
            write_snapshot(file, whole, {"format": "pt"})

    def send(self, name: VersionName, call: Call) -> None:
        """Returns when the server has the weights. Refused or Unreachable, with what may help."""
        values = {"{folder}": str(self._folder(name)), "{version}": str(name.version)}
        try:
            for server, request in zip(self._servers, self._requests, strict=True):
                self._ask(server, _filled(request.body, values), call)
        except (Refused, Unreachable) as error:
            raise type(error)(f"new weights: {error}{'; ' if self._hint else ''}{self._hint}") from error

    def _ask(self, server: ModelServer, body: dict[str, Any], call: Call) -> None:
        """Again where it could not be done yet: a cache is not emptied while a request is just being put away."""
        for number in range(self._tries):
            if number and call.cancelled.wait(server_client.PAUSE_S * 2 ** (number - 1)):
                break
            answer = server.ask(body, call)
            if answer.get("success", True) is not False:
                return
        raise Refused(f"{server.where}: the server answered {json.dumps(answer)[:300]}")

    def _folder(self, name: VersionName) -> Path:
        return self._parent / f"{name.trainer_epoch:06}-{name.version:08}"

    def close(self) -> None:
        shutil.rmtree(self._parent, ignore_errors=True)


def _own_folder(parent: Path, url: str, where: str) -> Path:
    """The same one each time, so that a worker that was killed leaves nothing behind; empty, and nobody else's."""
    folder = parent / f"rftstream-served-{os.getuid()}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"
    try:
        folder.mkdir(exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            raise ConfigError(f"{where}: {folder} is somebody else's, expected a new one; remove it, or name another")
        folder.chmod(0o755)  # the server may be another user
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
