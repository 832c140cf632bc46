"""The policy of a joined sampler: every request goes to a loop of the user's own, by way of a desk.

The policy counts as having the newest fetched version, so that the explorer hands on what that version may sample. The
loop loads a version when it likes. It says for each token which version sampled it, and `rftstream.join` refuses
versions that are too old for the task. Each fetched version is written as a model folder, from which the loop can
load it."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from rftstream.clock import Clock
from rftstream.contracts.rollouts import VersionSpan
from rftstream.contracts.versions import VersionName
from rftstream.desk import Desk, WorkState
from rftstream.errors import ConfigError
from rftstream.models.folders.folder import copy_companions
from rftstream.models.rendering import Renderer
from rftstream.models.spec import ModelSpec
from rftstream.policies.base import Completion, SampleRequest, room_for, without_tokens
from rftstream.weights.adapters import whole_tensors
from rftstream.weights.shared_memory import name_prefix, remove_left_behind
from rftstream.weights.snapshot import RawTensor, write_snapshot

WAIT_S = 0.02
"""Seconds to wait for an answer of the loop in one slice of work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Tokens of a completion, in the form in which a loop's answer was checked."""

    token_ids: np.ndarray
    """int32 [T]."""
    logprobs: np.ndarray
    """float32 [T]."""
    versions: tuple[VersionName, ...]
    """Version of each token."""
    finish_reason: str = "unfinished"
    error: str | None = None

    def completion(self, request_id: str) -> Completion:
        """Return the tokens as a policy returns them."""
        spans: list[VersionSpan] = []
        start = 0
        for (epoch, version), names in groupby(self.versions, key=lambda name: (name.trainer_epoch, name.version)):
            count = len(list(names))
            spans.append(VersionSpan(start=start, count=count, trainer_epoch=epoch, version=version))
            start += count
        return Completion(
            request_id=request_id,
            token_ids=self.token_ids,
            behavior_logprobs=self.logprobs,
            versions=tuple(spans),
            finish_reason=self.finish_reason,
            error=self.error,
        )


class SamplerDesk(Desk):
    """The desk of a joined sampler, with the versions that it may have."""

    def __init__(self, *, folders: bool = True) -> None:
        """`folders`: whether versions are written for the loop."""
        super().__init__()
        self.folders = folders
        self.newest: VersionName | None = None
        """The newest version that the role has fetched."""
        self.known: dict[int, VersionName] = {}
        """Number -> the last such version that the role has fetched."""
        self.folder: Path | None = None
        """Model folder of the newest version."""
        self.in_use: Path | None = None
        """Model folder that the loop was given last."""
        self.parent: Path | None = None
        """Folder of the model folders; None before the first."""
        self.vocabulary_size = 0
        self.stop_token_ids: frozenset[int] = frozenset()

    def remove_folders(self) -> None:
        """Delete the model folders. The loop does so, last: it may load one when the role has left."""
        if self.parent is not None:
            shutil.rmtree(self.parent, ignore_errors=True)


class JoinedPolicy:
    """A policy as `Policy` describes it. `rftstream.join` brings the desk; without one there is nobody who samples."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        pass

    wait_s = WAIT_S

    def __init__(
        self,
        config: Config,
        *,
        model: ModelSpec,
        renderer: Renderer,
        clock: Clock,
        max_concurrent: int = 1,
        desk: Desk | None = None,
    ) -> None:
        if not isinstance(desk, SamplerDesk):
            raise ConfigError(
                "policy 'joined': has no loop that samples, expected one; `rftstream.join(RUN, role=\"explorer\")` in "
                "Python brings it, and needs no setting: let explorer.policy be another one, and explorer.count 0"
            )
        self.slots = max_concurrent
        self._desk, self._model, self._context = desk, model, renderer.context
        self._names = None if model.lora is None else _names(model)
        self._rejected: list[Completion] = []
        desk.vocabulary_size, desk.stop_token_ids = renderer.vocabulary_size, renderer.stop_token_ids

    @property
    def version(self) -> VersionName | None:
        """The newest fetched version; None before the first `load`."""
        return self._desk.newest

    @property
    def num_active(self) -> int:
        """Number of requests without a collected answer."""
        return self._desk.num_active + len(self._rejected)

    def load(self, tensors: Mapping[str, RawTensor], name: VersionName) -> None:
        """Write the version as a model folder, unless the loop wants none, and tell the loop."""
        folder = self._write(tensors, name) if self._desk.folders else None
        desk = self._desk
        with desk.changed:
            before, desk.folder = desk.folder, folder
            desk.newest = desk.known[name.version] = name
            in_use = desk.in_use
            desk.notify()
        if before is not None and before not in (folder, in_use):
            shutil.rmtree(before, ignore_errors=True)

    def submit(self, request: SampleRequest) -> None:
        """Lay the request on the desk. A request without room for a token comes back at once."""
        if room_for(request, self._context) < 1:
            self._rejected.append(without_tokens(request, "length", None))
        else:
            self._desk.offer(request.request_id, request)

    def so_far(self, request_id: str) -> Completion | None:
        """Return what the loop has saved of a request; None if the request is answered or unknown."""
        item = self._desk.find(request_id)
        if item is None or item.state is WorkState.answered:
            return None
        if item.draft is None:
            return without_tokens(item.work, "unfinished", None)
        draft: Sampled = item.draft
        return draft.completion(request_id)

    def abort(self, request_id: str) -> None:
        """Take the request back. Unknown ids are ignored."""
        self._rejected = [one for one in self._rejected if one.request_id != request_id]
        self._desk.withdraw(request_id)

    def step(self) -> list[Completion]:
        """Return the requests that the loop has answered. Wait a moment for the first."""
        rejected, self._rejected = self._rejected, []
        items = self._desk.collect(0.0 if rejected else self.wait_s)
        return [*rejected, *(item.answer.completion(item.key) for item in items)]

    def idle_s(self) -> float:
        """Return 0 while requests are open, since `step` itself waits."""
        return 0.0 if self.num_active else math.inf

    def close(self) -> None:
        """Withdraw all requests. The model folders stay, since the loop may be about to load one."""
        self._desk.end()

    def _write(self, tensors: Mapping[str, RawTensor], name: VersionName) -> Path:
        if self._desk.parent is None:
            where, prefix = Path(tempfile.gettempdir()), name_prefix("joined")
            remove_left_behind(where, prefix)
            self._desk.parent = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=where))
        folder = self._desk.parent / f"{name.trainer_epoch:06}-{name.version:08}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        where_from = f"weights {name.trainer_epoch}/{name.version} of {self._model.name}"
        copy_companions(self._model, folder)
        whole = tensors if self._names is None else whole_tensors(self._model, tensors, self._names, where=where_from)
        with (folder / "model.safetensors").open("wb") as file:
            write_snapshot(file, whole, {"format": "pt"})
        return folder


def _names(model: ModelSpec) -> tuple[str, ...]:
    from rftstream.policies.served import served_parameters

    return tuple(served_parameters(model)[0])
