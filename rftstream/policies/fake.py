"""A policy without a model. It answers sums with the skill in the fake backend's weights, and takes a configured time.

The request, its seed, the weights and the clock decide everything about a completion. A request that resumes with
`num_sampled` tokens ends like the original request, bit for bit, if the weights are the same.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta

from rftstream.clock import Clock
from rftstream.contracts.beside import Columns
from rftstream.contracts.rollouts import VersionSpan
from rftstream.contracts.tasks import ChatMessage
from rftstream.contracts.versions import VersionName
from rftstream.models.rendering import Renderer
from rftstream.models.spec import ModelSpec
from rftstream.policies import fake_model
from rftstream.policies.base import Completion, EngineLoad, SampleRequest, room_for
from rftstream.weights.snapshot import RawTensor


class FakePolicy:
    """A policy for tests and simulations, as `Policy` describes it. The fake backend trains the skill that decides
    how often its answers are right."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        batch_size: Annotated[int, Meta(ge=1)] = 256
        """Requests sampled at once; more wait."""
        tokens_per_s: Annotated[float, Meta(ge=0)] = 0.0
        """Tokens per second of each request, by the clock; 0: all at once."""
        mean_tokens: Annotated[float, Meta(ge=0)] = 0.0
        """Mean length of completions, padded with white space before the answer; 0: only the answer."""
        sigma: Annotated[float, Meta(ge=0)] = 1.0
        """Sigma of the lognormal distribution of lengths; 1 gives a long tail."""
        fail_share: Annotated[float, Meta(ge=0, le=1)] = 0.0
        """Share of the requests that fail halfway."""
        answer_depends_on: Literal["weights", "task"] = "weights"
        """Whether correctness depends on the weights' skill, or only on the request's seed."""
        right_share: Annotated[float, Meta(ge=0, le=1)] = 0.5
        """Share of right answers if they depend on the task."""
        values_beside: Annotated[int, Meta(ge=0)] = 0
        """Most made-up values that are recorded beside each token."""

    def __init__(self, config: Config, *, model: ModelSpec, renderer: Renderer, clock: Clock) -> None:
        self.slots = config.batch_size
        self._config, self._renderer, self._clock = config, renderer, clock
        self._stop_token = min(renderer.stop_token_ids)
        self._skill = 0.0
        self._version: VersionName | None = None
        self._waiting: deque[SampleRequest] = deque()
        self._active: dict[str, _Sampling] = {}
        self.is_asleep = False
        self._slept_at = 0.0
        self._num_tokens, self._busy_s, self._advanced_at = 0, 0.0, clock.now()

    @property
    def version(self) -> VersionName | None:
        """The version of the next token; None before the first `load`."""
        return self._version

    @property
    def num_active(self) -> int:
        """Number of requests that run or wait."""
        return len(self._active) + len(self._waiting)

    def load(self, tensors: Mapping[str, RawTensor], name: VersionName) -> None:
        """Read the skill from the weights. Tokens due before now keep the previous version. WeightsError for another
        model's weights."""
        assert not self.is_asleep, "it was told to sleep"
        self._advance()
        if self._config.answer_depends_on == "weights":  # otherwise any model's weights are accepted
            self._skill = fake_model.read_skill(tensors, where=f"weights {name.trainer_epoch}/{name.version}")
        self._version = name

    def submit(self, request: SampleRequest) -> None:
        """Put a request into the queue; the next `step` begins it."""
        self._waiting.append(request)

    def so_far(self, request_id: str) -> Completion | None:
        """Return the tokens sampled for a request at the last check of the clock; None if it waits, has finished, or is
        unknown."""
        one = self._active.get(request_id)
        if one is None or one.num_tokens == one.length:
            return None
        return self._completion(one, self._ids(one), "unfinished")

    def abort(self, request_id: str) -> None:
        """Forget a request. Unknown ids are ignored."""
        self._waiting = deque(one for one in self._waiting if one.request_id != request_id)
        self._active.pop(request_id, None)

    def step(self) -> list[Completion]:
        """Begin requests for which there is a place, and return those whose tokens are all due."""
        if self._version is None or self.is_asleep:
            return []
        if not self._active:
            self._advanced_at = self._clock.now()
        while self._waiting and len(self._active) < self._config.batch_size:
            request = self._waiting.popleft()
            self._active[request.request_id] = self._start(request)
        self._advance()
        done = [one for one in self._active.values() if one.num_tokens == one.length]
        for one in done:
            del self._active[one.request.request_id]
        return [self._complete(one) for one in done]

    def engine_load(self) -> EngineLoad:
        """Return the tokens and the seconds by the clock, as of the last `step`."""
        return EngineLoad(num_tokens=self._num_tokens, busy_s=self._busy_s, num_waiting=len(self._waiting))

    def idle_s(self) -> float:
        """Return the seconds until the next request finishes; 0 without `tokens_per_s`, infinity without work."""
        if self._version is None or not self.num_active:
            return math.inf
        rate = self._config.tokens_per_s
        if not rate or (self._waiting and len(self._active) < self._config.batch_size):
            return 0.0
        ends = (one.started_at + (one.length - one.request.num_sampled) / rate for one in self._active.values())
        return max(0.0, min(ends) - self._clock.now())

    def sleep(self) -> bool:
        """Stop sampling. Tokens that are already due count as sampled."""
        if not self.is_asleep:
            self._advance()
            self.is_asleep, self._slept_at = True, self._clock.now()
        return True

    def wake(self) -> bool:
        """Resume. The time asleep counts for no request."""
        if self.is_asleep:
            self._advanced_at = self._clock.now()
            for one in self._active.values():
                one.started_at += self._clock.now() - self._slept_at
        self.is_asleep = False
        return True

    def close(self) -> None:
        """Forget all requests."""
        self._active.clear()
        self._waiting.clear()

    def _start(self, request: SampleRequest) -> _Sampling:
        seed, config, before = request.seed, self._config, request.num_sampled
        own = len(request.token_ids) - before
        prompt = self._renderer.decode(request.token_ids[:own])
        answer = fake_model.solve(prompt) or "0"
        wished = max(made_up_tokens(config.mean_tokens, config.sigma, seed), len(answer) + 1)
        room = room_for(request, self._renderer.context)
        length = max(min(wished, before + room), 0)
        fails = config.fail_share > 0 and fake_model.uniform(seed, "fails") < config.fail_share
        one = _Sampling(
            request=request,
            prompt=prompt,
            answer=answer,
            wished=wished,
            started_at=self._clock.now(),
            fails=fails,
            length=max(length if not fails else length // 2, before),
            num_tokens=before,
        )
        if before > one.chosen_at:
            one.right = request.token_ids[own + one.chosen_at] == self._ids(one)[one.chosen_at]
        return one

    def _advance(self) -> None:
        """Stamp the tokens that became due since the last check with the current version."""
        if self._version is None:
            return
        now, rate = self._clock.now(), self._config.tokens_per_s
        self._busy_s += now - self._advanced_at if self._active else 0.0
        self._advanced_at = now
        for one in self._active.values():
            by_now = one.length
            if rate:
                by_now = min(by_now, one.request.num_sampled + int((now - one.started_at) * rate + 1e-9))
            if by_now > one.num_tokens:
                self._num_tokens += by_now - one.num_tokens
                one.stamp(by_now - one.num_tokens, self._version)
                if one.share is None and one.num_tokens > one.chosen_at:
                    self._choose(one)

    def _choose(self, one: _Sampling) -> None:
        """Choose whether the answer is right, by the weights at the time of its last digit."""
        one.share = self._config.right_share
        if self._config.answer_depends_on == "weights":
            one.share = fake_model.right_probability(self._skill, one.prompt)
        if one.request.num_sampled <= one.chosen_at:
            request = one.request
            luck = 0.5 if request.sampling.temperature == 0 else fake_model.uniform(request.seed, "right")
            one.right = luck < one.share

    def _ids(self, one: _Sampling) -> np.ndarray:
        """Return the ids of the completion as far as they are decided. A wrong answer differs in its last digit."""
        answer = one.answer
        if not one.right:
            last = (int(answer[-1]) + 1 + int(9 * fake_model.uniform(one.request.seed, "wrong"))) % 10
            answer = answer[:-1] + str(last)  # as long as the right answer, since the length is decided earlier
        return padded_ids(self._renderer, answer, one.wished - 1 - len(answer), self._stop_token)[: one.length]

    def _completion(self, one: _Sampling, ids: np.ndarray, reason: str) -> Completion:
        ids, before = ids[: one.num_tokens], one.request.num_sampled
        logprobs = np.float32(-0.5) * fake_model.uniforms(one.request.seed, before, max(before, len(ids)))
        if before <= one.chosen_at < len(ids) and one.share is not None:
            logprobs[one.chosen_at - before] = math.log(max(one.share if one.right else 1 - one.share, 1e-9))
        return Completion(
            request_id=one.request.request_id,
            token_ids=ids[before:],
            behavior_logprobs=logprobs,
            versions=tuple(one.spans),
            finish_reason=reason,
            beside=self._beside(one.request, ids),
            error="the fake policy was told to fail" if reason == "error" else None,
        )

    def _beside(self, request: SampleRequest, ids: np.ndarray) -> Columns:
        if not (most := self._config.values_beside):
            return {}
        whole = np.concatenate([request.token_ids[: len(request.token_ids) - request.num_sampled], ids])
        return {"made": fake_model.values_beside(whole, most)}

    def _complete(self, one: _Sampling) -> Completion:
        ids = self._ids(one)
        stopped = len(ids) > 0 and ids[-1] == self._stop_token
        return self._completion(one, ids, "error" if one.fails else "stop" if stopped else "length")


def padded_ids(renderer: Renderer, answer: str, num_blanks: int, stop_token: int) -> np.ndarray:
    """Return the ids of an answer behind white space, and the stop token. Where each blank is one token, as without a
    model, only the answer is rendered."""

    def render(count: int) -> tuple[int, ...]:
        return renderer.render((ChatMessage(role="assistant", content=" " * count + answer),))

    few = [render(count) for count in range(min(num_blanks, 2) + 1)]
    if num_blanks > 2 and few[2][1:] == few[1] and few[1][1:] == few[0] and few[2][0] == few[1][0]:
        ids = np.full(num_blanks + len(few[0]) + 1, few[1][0], dtype=np.int32)
        ids[num_blanks:-1] = few[0]
        ids[-1] = stop_token
        return ids
    whole = few[num_blanks] if num_blanks < len(few) else render(num_blanks)
    return np.array((*whole, stop_token), dtype=np.int32)


def made_up_tokens(mean_tokens: float, sigma: float, seed: int) -> int:
    """Return the length of the completion with this seed, in tokens. It ignores the remaining room and the tokens that
    the answer needs."""
    if not mean_tokens:
        return 0
    normal = NormalDist().inv_cdf(fake_model.uniform(seed, "length"))
    return round(math.exp(math.log(mean_tokens) - sigma**2 / 2 + sigma * normal))


@dataclass
class _Sampling:
    """A request that `FakePolicy` is sampling."""

    request: SampleRequest
    prompt: str
    answer: str
    """The right answer."""
    wished: int
    """Length of the completion in tokens if nothing limits it."""
    length: int
    """Length of the completion in tokens, previously sampled ones included."""
    started_at: float
    fails: bool
    num_tokens: int
    right: bool = True
    share: float | None = None
    """Probability of a right answer; None until it is chosen."""
    spans: list[VersionSpan] = field(default_factory=list)

    @property
    def chosen_at(self) -> int:
        """Index of the answer's last digit, just before the stop token."""
        return self.wished - 2

    def stamp(self, count: int, name: VersionName) -> None:
        """Add `count` tokens that this version sampled."""
        last = self.spans[-1] if self.spans else None
        if last is not None and (last.trainer_epoch, last.version) == (name.trainer_epoch, name.version):
            start, whole = last.start, last.count + count
            self.spans.pop()
        else:
            start, whole = self.num_tokens - self.request.num_sampled, count
        self.spans.append(VersionSpan(start=start, count=whole, trainer_epoch=name.trainer_epoch, version=name.version))
        self.num_tokens += count
