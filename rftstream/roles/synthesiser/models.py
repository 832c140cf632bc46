"""The models that can be asked: the run's own policy, or a served model. Both answer the same requests, many at
once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rftstream.contracts.rollouts import RolloutStatus
from rftstream.contracts.tasks import Problem, RolloutIds, Sampling
from rftstream.contracts.versions import VersionName, WeightsAnnounced
from rftstream.http.client import Call
from rftstream.models.rendering import Renderer
from rftstream.models.server_client import ModelServer, Refused, Unreachable
from rftstream.policies.base import Policy
from rftstream.rewards.base import RewardInput, message_seen, problem_input
from rftstream.roles.explorer.attempt import CUT_SHORT, Attempt
from rftstream.roles.explorer.fit_to_record import rollout_of
from rftstream.roles.explorer.turn_loop import TurnLoop
from rftstream.roles.explorer.weights_update import WeightsUpdate
from rftstream.roles.synthesiser import SYNTHESISER
from rftstream.roles.verifier.step import reward_input
from rftstream.service.loops.self_pipe import SelfPipe
from rftstream.service.role import FOREVER, Wakeup
from rftstream.weights.follower import WeightsFollower

log = logging.getLogger(__name__)

LOOK_S = 0.05
"""Seconds between two checks of a policy that samples."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Seconds without requests to a server that cannot be reached: after the first failure, and at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """A request to a model. The step makes it."""

    key: str
    problem: Problem
    sampling: Sampling
    seed: int
    is_attempt: bool
    """Whether this is an attempt at a problem of the taskset, rather than the request for a problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReply:
    """The answer of a model, or the error."""

    key: str
    item: RewardInput | None = None
    """The conversation as a reward sees it, with the model's answer as the completion; None without an answer."""
    error: str = ""
    """Why there is no answer."""
    refused: bool = False
    """Whether the model's server refused the request."""


class SynthesisModel(Protocol):
    """A model that makes problems and tries to solve them. `workers/synthesiser.py` makes it. The step calls `ask` for
    each request, `step` in each slice of work, and `close` last."""

    @property
    def name(self) -> str:
        """Return the model's name, which is recorded in the problems that it makes."""

    @property
    def version(self) -> VersionName | None:
        """Return the version of the policy that answers now; None if the model does not follow the run's weights."""

    def announced(self, announced: WeightsAnnounced) -> None:
        """Apply an announcement of weights."""

    def ask(self, question: ModelRequest) -> None:
        """Begin a request. A later `step` returns the answer."""

    def drop(self, keys: Collection[str]) -> None:
        """Forget requests; `step` returns nothing for them."""

    def step(self) -> Sequence[ModelReply]:
        """Do a bounded slice of work. Return the answers that have come."""

    def idle_s(self) -> float:
        """Return for how many seconds `step` need not be called."""

    def wakeups(self) -> Sequence[Wakeup]:
        """Return the wakeups that end a wait, beside the log."""

    def waits_for(self) -> str:
        """Return in words what the model waits for; empty if it can work."""

    def close(self) -> None:
        """Release the model's resources."""


@dataclass(eq=False, kw_only=True)
class PolicyModel:
    """The run's own policy with the newest weights: a SynthesisModel. It uses a turn loop, like an explorer.

    `environment` and `where` are for attempts, as the taskset names them. `renderer` is for attempts."""

    policy: Policy
    loop: TurnLoop
    follower: WeightsFollower
    weights: WeightsUpdate
    name: str
    environment: str
    where: str
    renderer: Renderer
    now: Callable[[], float]
    _asked: dict[str, ModelRequest] = field(default_factory=dict, init=False)

    @property
    def version(self) -> VersionName | None:
        """Return the version that is sampled now."""
        return self.policy.version

    def announced(self, announced: WeightsAnnounced) -> None:
        """Apply an announcement of weights."""
        self.follower.announced(announced)

    def ask(self, question: ModelRequest) -> None:
        """Start to sample the request: the request for a problem as one turn, an attempt with the environment of the
        taskset."""
        self._asked[question.key] = question
        self.loop.start(
            question.key,
            problem=question.problem,
            sampling=question.sampling,
            seed=question.seed,
            environment=self.environment if question.is_attempt else "single_turn",
            where=self.where if question.is_attempt else SYNTHESISER.name,
            renderer=self.renderer if question.is_attempt else None,
        )

    def drop(self, keys: Collection[str]) -> None:
        """Abort the sampling of these requests."""
        for key in keys:
            if self._asked.pop(key, None) is not None:
                self.loop.abort(key)

    def step(self) -> Sequence[ModelReply]:
        """Load newer weights, and sample a slice."""
        while (newest := self.weights.newer()) is not None:
            if self.weights.take_over(newest, is_sampling=self.loop.num_open > 0, began=time.perf_counter()):
                break
        return [self._said(attempt) for attempt in self.loop.step() if attempt.key in self._asked]

    def idle_s(self) -> float:
        """Return the seconds until there may be tokens, or until weights are fetched again."""
        if self.policy.version is None or not self._asked:
            retry_s = self.weights.retry_in_s
            return retry_s if retry_s > 0 else FOREVER if self.weights.newer() is None else LOOK_S
        return min(self.policy.idle_s(), self.loop.idle_s(), LOOK_S)

    def wakeups(self) -> Sequence[Wakeup]:
        """Return nothing, since `step` is called often enough."""
        return ()

    def waits_for(self) -> str:
        """Return that weights are missing, if none are loaded yet."""
        return "" if self.policy.version is not None else "the first weights"

    def close(self) -> None:
        """End the fetching, and close the environments and the policy."""
        self.weights.close()
        self.loop.close()
        self.policy.close()

    def _said(self, attempt: Attempt) -> ModelReply:
        question = self._asked.pop(attempt.key)
        if attempt.status not in (RolloutStatus.completed, RolloutStatus.truncated):
            return ModelReply(key=attempt.key, error=attempt.error or str(attempt.status))
        rollout = rollout_of(attempt, _IDS, question.problem, question.sampling, self.now())
        return ModelReply(key=attempt.key, item=reward_input(rollout))


_IDS = RolloutIds.of("synthesis/0/0/0", taskset="synthesis")
"""Ids for attempts that are no rollouts of the run, since a rollout record must have ids."""


@dataclass(slots=True)
class _Request:
    question: ModelRequest
    call: Call
    answer: Future[dict[str, Any]] | None = None
    """Future of the answer; None if the request must be sent."""


class ServedModel:
    """A model behind OpenAI's `/chat/completions`: a SynthesisModel whose requests run in threads. If the server cannot
    be reached, requests wait and are sent again after a pause."""

    version: VersionName | None = None

    def __init__(
        self,
        server: ModelServer,
        *,
        name: str,
        extra: Mapping[str, Any],
        threads: Executor,
        now: Callable[[], float],
        pipe: SelfPipe | None = None,
    ) -> None:
        """`extra` has further fields of each request. `pipe` rings when an answer has come."""
        self.name = name
        self._server, self._extra, self._threads, self._now, self._pipe = server, extra, threads, now, pipe
        self._requests: dict[str, _Request] = {}
        self._pause_until = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._trouble = ""

    def announced(self, announced: WeightsAnnounced) -> None:
        """Ignore the announcement, since the server has its own weights."""

    def ask(self, question: ModelRequest) -> None:
        """Send the request with the next step."""
        self._requests[question.key] = _Request(question, Call())

    def drop(self, keys: Collection[str]) -> None:
        """Cancel requests."""
        for key in keys:
            if (request := self._requests.pop(key, None)) is not None:
                request.call.cancel()

    def step(self) -> Sequence[ModelReply]:
        """Send waiting requests, and collect answers."""
        if self._pipe is not None:
            self._pipe.clear()
        found = [said for request in list(self._requests.values()) if (said := self._collect(request)) is not None]
        if self._now() >= self._pause_until:
            for request in self._requests.values():
                if request.answer is None:
                    self._send(request)
        return found

    def idle_s(self) -> float:
        """Return the seconds until requests are sent again. A ring ends the wait earlier."""
        waiting = [request for request in self._requests.values() if request.answer is None]
        if waiting:
            return max(0.0, self._pause_until - self._now())
        return FOREVER if self._pipe is not None or not self._requests else LOOK_S

    def wakeups(self) -> Sequence[Wakeup]:
        """Return the pipe that rings when an answer has come."""
        return () if self._pipe is None else (self._pipe,)

    def waits_for(self) -> str:
        """Return the server's error, in words."""
        return self._trouble

    def close(self) -> None:
        """Cancel all requests, and close the connections."""
        self.drop(list(self._requests))
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._server.close()
        if self._pipe is not None:
            self._pipe.close()

    def _send(self, request: _Request) -> None:
        sampling = request.question.sampling
        body: dict[str, Any] = {
            "model": self.name,
            "messages": [
                {"role": message.role, "content": message.content} for message in request.question.problem.messages
            ],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
            "seed": request.question.seed % 2**31,
        }
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        request.answer = self._threads.submit(self._server.ask, {**body, **self._extra}, request.call)
        if self._pipe is not None:
            pipe = self._pipe
            request.answer.add_done_callback(lambda _: pipe.ring())

    def _collect(self, request: _Request) -> ModelReply | None:
        if request.answer is None or not request.answer.done():
            return None
        key = request.question.key
        try:
            answer = request.answer.result()
        except Unreachable as error:
            request.answer = None
            self._leave_alone(str(error))
            return None
        except Refused as error:
            self._requests.pop(key)
            return ModelReply(key=key, error=str(error), refused=True)
        self._pause_s, self._trouble = FIRST_PAUSE_S, ""
        self._requests.pop(key)
        return _said(request.question, answer)

    def _leave_alone(self, trouble: str) -> None:
        if self._now() >= self._pause_until:  # only the first of several simultaneous failures counts
            self._pause_until = self._now() + self._pause_s
            log.warning("%s; asking again in %g s, until then nothing is made", trouble, self._pause_s)
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._trouble = trouble


def _said(question: ModelRequest, answer: Mapping[str, Any]) -> ModelReply:
    try:
        choice = answer["choices"][0]
        text = choice["message"]["content"]
    except (LookupError, TypeError):
        choice, text = {}, None
    if not isinstance(text, str):
        return ModelReply(key=question.key, error="the server gave no message, expected choices[0].message.content")
    before = problem_input(question.problem)
    usage = answer.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, dict) else 0
    item = replace(
        before,
        completion=text,
        messages=(*before.messages, message_seen("assistant", text)),
        num_tokens=count if isinstance(count, int) and count >= 0 else 0,
        truncated=choice.get("finish_reason") in CUT_SHORT,
    )
    return ModelReply(key=question.key, item=item)
