"""A policy that takes every token of the vocabulary with the same probability: the floor that a model has to beat."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from msgspec import Meta

from rftstream.clock import Clock
from rftstream.contracts.rollouts import VersionSpan
from rftstream.contracts.versions import VersionName
from rftstream.models.rendering import Renderer
from rftstream.models.spec import ModelSpec
from rftstream.policies.base import Completion, SampleRequest
from rftstream.weights.snapshot import RawTensor


class Uniform:
    """Temperature, truncation, penalties and stop strings have no effect on it."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        slots: Annotated[int, Meta(ge=1)] = 64
        """Completions made in one step."""

    def __init__(self, config: Config, *, model: ModelSpec, renderer: Renderer, clock: Clock) -> None:
        self._config, self._renderer = config, renderer
        self._stop_ids = sorted(renderer.stop_token_ids)
        self._waiting: deque[SampleRequest] = deque()
        self._version: VersionName | None = None

    @property
    def version(self) -> VersionName | None:
        return self._version

    @property
    def slots(self) -> int:
        return self._config.slots

    @property
    def num_active(self) -> int:
        return len(self._waiting)

    def load(self, tensors: Mapping[str, RawTensor], name: VersionName) -> None:
        self._version = name

    def submit(self, request: SampleRequest) -> None:
        self._waiting.append(request)

    def so_far(self, request_id: str) -> Completion | None:
        """A completion is made in one step, so there is never a half of one."""
        return None

    def abort(self, request_id: str) -> None:
        self._waiting = deque(one for one in self._waiting if one.request_id != request_id)

    def step(self) -> list[Completion]:
        """A bounded slice of work, and none before the first version: tokens are stamped with theirs."""
        if self._version is None:
            return []
        chosen = [self._waiting.popleft() for _ in range(min(self.slots, len(self._waiting)))]
        return [self._complete(request, self._version) for request in chosen]

    def idle_s(self) -> float:
        return 0.0 if self._waiting and self._version is not None else math.inf

    def close(self) -> None:
        self._waiting.clear()

    def _complete(self, request: SampleRequest, name: VersionName) -> Completion:
        """All chance comes from the request's seed, so that a redone rollout is the same rollout."""
        generator = np.random.Generator(np.random.Philox(key=request.seed))
        token_ids = generator.integers(self._renderer.vocabulary_size, size=request.max_tokens, dtype=np.int32)
        stops = np.flatnonzero(np.isin(token_ids, self._stop_ids))
        length = int(stops[0]) + 1 if len(stops) else request.max_tokens
        logprob = -math.log(self._renderer.vocabulary_size)
        return Completion(
            request_id=request.request_id,
            token_ids=token_ids[:length],
            behavior_logprobs=np.full(length, logprob, dtype=np.float32),
            versions=(VersionSpan(start=0, count=length, trainer_epoch=name.trainer_epoch, version=name.version),),
            finish_reason="stop" if len(stops) else "length",
        )
