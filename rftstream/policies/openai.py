"""A served model as a policy: any server with OpenAI's completions that takes token ids as the prompt, and gives token
ids and logprobs back. vLLM's does; others are told so by an error.

With `update`, a server that can load weights while it runs is given each version: what was asked is answered first, by
the weights that it was asked of, and what is new waits meanwhile, so a completion is of one version alone. A server
that was gone may have begun anew with other weights: it is given them again before it is asked again. Without, the
server's weights are its own. Tokens are stamped with the version in force all the same, for everything that is sampled
needs one; so that is for teachers, judges, baselines and data, not for training on what it samples.
"""

from __future__ import annotations

import hashlib
import math
import queue
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from rftstream.clock import Clock
from rftstream.contracts.rollouts import VersionSpan
from rftstream.contracts.versions import VersionName
from rftstream.errors import ImageError, PolicyError, WeightsError
from rftstream.models.image_inputs import ImageCache
from rftstream.models.rendering import Renderer
from rftstream.models.server_client import Call, ModelServer, Refused, RetryableError, Unreachable
from rftstream.models.spec import ModelSpec
from rftstream.policies.base import Completion, SampleRequest, without_tokens
from rftstream.policies.served_images import HINT, RESOURCE, ServedImages
from rftstream.policies.server_updates import ServerUpdates, UpdateRequest, root_of
from rftstream.weights.snapshot import RawTensor

STEP_S = 0.02
"""Longest time in seconds that a step waits for something to finish."""


class OpenAiPolicy:
    """A policy whose engine is a model server, as `Policy` describes it. Threads ask the server; `step` collects the
    answers."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        url: str
        """Where the API begins: `http://127.0.0.1:8000/v1`. Its tokenizer must be that of `model.path`."""
        model: str
        """What the server calls it."""
        api_key: str | None = None
        """`"env:NAME"`: sent as the bearer token; it is looked up in the environment and written nowhere."""
        batch_size: Annotated[int, Meta(ge=1)] = 64
        """Requests on the way at once; more wait."""
        timeout_s: Annotated[float, Meta(gt=0)] = 600.0
        """Of one answer."""
        tries: Annotated[int, Meta(ge=1)] = 5
        """Of a request that meets no server, or a busy one."""
        extra: dict[str, Any] = field(default_factory=dict)
        """Further fields of each request, as the server knows them."""
        update: Literal["vllm", "vllm-cpu"] | tuple[UpdateRequest, ...] | None = None
        """How the server is told to load a new version from a folder, when what it was asked before is answered. vllm:
        by vLLM's own endpoints, which it has when it is started with `VLLM_SERVER_DEV_MODE=1`. vllm-cpu: for its builds
        for CPUs, which would go on with the old weights in an output layer that is tied to the embeddings; they are
        started with `--worker-extension-cls rftstream.policies.vllm_worker.WeightsReceiver`, too. Of another server the
        requests, one after the other: `[{ path = "/update_weights", body = { model_path = "{folder}" } }]`. The server
        must be this worker's alone. Default: never, its weights are its own."""
        update_folder: str | None = None
        """Where versions are written for it, two or three at a time; it must read them under the same path. Default:
        the one for temporary files of this machine."""

    def __init__(
        self,
        config: Config,
        *,
        model: ModelSpec,
        renderer: Renderer,
        clock: Clock,
        images: ImageCache | None = None,
    ) -> None:
        """`images`: the images that prompts show; None if the model is shown none."""
        self._config, self._renderer = config, renderer
        self._images = None if images is None or renderer.images is None else ServedImages(images, renderer.images)
        self._server = ModelServer(
            config.url if self._images is None else root_of(config.url),
            "completions" if self._images is None else RESOURCE,
            api_key=config.api_key,
            timeout_s=config.timeout_s,
            tries=config.tries,
            section="policies.openai",
        )
        self._stop_ids = sorted(renderer.stop_token_ids)
        self._updates: ServerUpdates | None = None
        if config.update is not None:
            self._updates = ServerUpdates(
                config.update,
                folder=config.update_folder,
                url=config.url,
                api_key=config.api_key,
                timeout_s=config.timeout_s,
                tries=config.tries,
                section="policies.openai",
                model=model,
            )
        self._version: VersionName | None = None
        """The version that the server has."""
        self._next: VersionName | None = None
        """The version that the server gets as soon as no request is on the way."""
        self._sending: VersionName | None = None
        """The version that the server is being given."""
        self._sending_call = Call()
        self._waiting: deque[_Call] = deque()
        self._active: dict[str, _Call] = {}
        self._num_asked = 0
        """Number of requests on the way, aborted ones included."""
        self._num_lost = 0
        """Number of requests that were lost since the last answer."""
        self._events: queue.SimpleQueue[_AnswerEvent | _UpdateEvent] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(config.batch_size, thread_name_prefix="openai")

    @property
    def version(self) -> VersionName | None:
        """The version that samples what is submitted from now on."""
        return self._next or self._version

    @property
    def slots(self) -> int:
        """Number of requests that may be active at once: `batch_size`."""
        return self._config.batch_size

    @property
    def num_active(self) -> int:
        """Number of requests that wait or are on the way."""
        return len(self._active)

    def load(self, tensors: Mapping[str, RawTensor], name: VersionName) -> None:
        """Write the version for the server, which gets it when no request is on the way. Without `update`, only take
        note of its name."""
        if self._updates is None:
            self._version = name
        else:
            self._updates.write(tensors, name, keep=(self._version, self._sending))
            self._next = name
        self._go_on()

    def submit(self, request: SampleRequest) -> None:
        """Put a request in the queue, and ask the server if that may be done now."""
        call = self._active[request.request_id] = _Call(request)
        context = self._renderer.context
        room = request.max_tokens if context is None else min(request.max_tokens, context - len(request.token_ids))
        if not request.token_ids:
            self._events.put(_AnswerEvent(call, without_tokens(request, "error", "the prompt is empty")))
        elif room <= 0:
            self._events.put(_AnswerEvent(call, without_tokens(request, "length", None)))
        else:
            call.body = self._body(request, room)
            self._waiting.append(call)
            self._go_on()

    def so_far(self, request_id: str) -> Completion | None:
        """Return None: the server gives whole completions only."""
        return None

    def abort(self, request_id: str) -> None:
        """Forget a request, and end its connection to the server."""
        call = self._active.pop(request_id, None)
        if call is not None:
            self._waiting = deque(one for one in self._waiting if one is not call)
            call.cancel()

    def step(self) -> list[Completion]:
        """Wait at most STEP_S for an answer, and return the requests that finished. PolicyError if the server cannot
        be reached."""
        done: list[Completion] = []
        wait_s = STEP_S if self._works else 0.0
        while True:
            try:
                event = self._events.get(timeout=wait_s) if wait_s else self._events.get_nowait()
            except queue.Empty:
                self._go_on()
                return done
            wait_s = 0.0
            if isinstance(event, _UpdateEvent):
                self._on_update(event)
            elif (completion := self._on_answer(event)) is not None:
                done.append(completion)

    def idle_s(self) -> float:
        """Return 0 while there is something to do, else infinity."""
        return 0.0 if self._works else math.inf  # `step` waits for what is under way

    def close(self) -> None:
        """Cancel all requests, wait for their threads, and close the connections."""
        for request_id in list(self._active):
            self.abort(request_id)
        self._sending_call.cancel()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._server.close()
        if self._updates is not None:
            self._updates.close()

    @property
    def _works(self) -> bool:
        return bool(self._active) and self.version is not None

    def _go_on(self) -> None:
        """Ask the server as much as may be asked now, or give it its next version."""
        version = self.version
        if self._sending is not None or version is None:
            return
        if self._next is None:
            while self._waiting and self._num_asked < self._config.batch_size:
                call = self._waiting.popleft()
                call.is_asked = True
                self._num_asked += 1
                self._threads.submit(self._sample, call, version)
        elif self._updates is not None and not self._num_asked:
            self._sending, self._sending_call = self._next, Call()
            self._threads.submit(self._update, self._updates, self._sending, self._sending_call)

    def _on_update(self, event: _UpdateEvent) -> None:
        """Note that the server has the version. Raise the error if it could not be given it."""
        if event.error is not None:
            raise event.error
        self._version, self._sending = event.name, None
        if self._next == event.name:
            self._next = None

    def _on_answer(self, event: _AnswerEvent) -> Completion | None:
        """Return the completion of a request that has finished. None if the request is asked again or was aborted."""
        call, result = event.call, event.result
        if call.is_asked:
            self._num_asked -= 1
        if isinstance(result, RetryableError):
            self._ask_again(call, result)
            return None
        if self._active.get(call.request.request_id) is not call:
            return None
        if isinstance(result, PolicyError):
            raise result
        del self._active[call.request.request_id]
        self._num_lost = 0
        return result

    def _ask_again(self, call: _Call, error: RetryableError) -> None:
        """Put a lost request back in the queue. It is asked again when the server has its weights again."""
        self._num_lost += 1
        if self._num_lost > self._config.tries * self._config.batch_size:
            raise PolicyError(f"policy openai: {self._server.where}: {error}, {self._num_lost} times in a row")
        self._next = self._next or self._version
        if self._active.get(call.request.request_id) is call:
            call.is_asked = False
            self._waiting.appendleft(call)

    def _body(self, request: SampleRequest, room: int) -> dict[str, Any]:
        """Return the body of a request. Settings that are off are left out, since servers refuse fields that they do
        not know."""
        sampling = request.sampling
        optional = {
            "top_k": (sampling.top_k, 0),
            "min_p": (sampling.min_p, 0.0),
            "presence_penalty": (sampling.presence_penalty, 0.0),
            "frequency_penalty": (sampling.frequency_penalty, 0.0),
            "repetition_penalty": (sampling.repetition_penalty, 1.0),
            "min_tokens": (max(sampling.min_tokens - request.num_sampled, 0), 0),
            "stop": (list(sampling.stop), []),
        }
        return {
            "model": self._config.model,
            "prompt": list(request.token_ids),
            "max_tokens": room,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": _seed(request),
            "logprobs": 1,
            "stop_token_ids": self._stop_ids,
            "skip_special_tokens": False,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **{name: value for name, (value, off) in optional.items() if value != off},
            **self._config.extra,
        }

    # ------------------------------------------------------------------------------------------ in a thread each

    def _sample(self, call: _Call, version: VersionName) -> None:
        ask = self._server.ask if self._updates is None else self._server.ask_once
        try:
            body = call.body
            if self._images is not None:
                body = self._images.body(call.request, body, f"{version.trainer_epoch}/{version.version}")
            answer = ask(body, call)
            if self._images is not None:
                answer = {"choices": [self._images.choice(call.request, answer)]}
            result: Completion | RetryableError | PolicyError = _completion(call.request, answer, version)
        except (ImageError, WeightsError) as error:
            result = without_tokens(call.request, "error", str(error))
        except RetryableError as error:
            result = without_tokens(call.request, "error", str(error)) if call.cancelled.is_set() else error
        except Refused as error:
            result = without_tokens(call.request, "error", str(error))
        except Unreachable as error:
            result = PolicyError(f"policy openai: {error}{'' if self._images is None else f'; {HINT}'}")
        except Exception as error:  # of an answer that nobody thought of: else the rollout would wait for ever
            result = without_tokens(call.request, "error", f"the server's answer: {type(error).__name__}: {error}")
        self._events.put(_AnswerEvent(call, result))

    def _update(self, updates: ServerUpdates, name: VersionName, call: Call) -> None:
        try:
            updates.send(name, call)
        except Exception as error:  # else all would wait for ever
            self._events.put(_UpdateEvent(name, PolicyError(f"policy openai: {error}")))
        else:
            self._events.put(_UpdateEvent(name))


class _Call(Call):
    def __init__(self, request: SampleRequest) -> None:
        super().__init__()
        self.request = request
        self.is_asked = False
        self.body: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class _AnswerEvent:
    """The server has answered a request, or cannot. A thread puts it into the queue for `step`."""

    call: _Call
    result: Completion | RetryableError | PolicyError


@dataclass(frozen=True, slots=True)
class _UpdateEvent:
    """The server has loaded a version, or cannot. A thread puts it into the queue for `step`."""

    name: VersionName
    error: PolicyError | None = None


def _completion(request: SampleRequest, answer: Mapping[str, Any], version: VersionName) -> Completion:
    try:
        choice = answer["choices"][0]
        logprobs = choice.get("logprobs") or {}
        token_ids = choice.get("token_ids") or [_token_id(one) for one in logprobs["tokens"]]
        values = [float(one) for one in logprobs["token_logprobs"]]
        reason = str(choice["finish_reason"])
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise Refused(
            f"the server gave no token ids with logprobs ({type(error).__name__}: {error}); vLLM's does since 0.10, "
            "others may need a setting"
        ) from None
    if len(values) != len(token_ids) or not all(map(math.isfinite, values)):
        raise Refused(f"the server gave {len(values)} logprobs for {len(token_ids)} tokens, or some not finite")
    if reason not in ("stop", "length"):
        raise Refused(f"the server ended it: {reason}")
    span = VersionSpan(start=0, count=len(token_ids), trainer_epoch=version.trainer_epoch, version=version.version)
    return Completion(
        request_id=request.request_id,
        token_ids=np.asarray(token_ids, np.int32),
        behavior_logprobs=np.asarray(values, np.float32),
        versions=(span,) if token_ids else (),
        finish_reason=reason,
    )


def _token_id(token: str) -> int:
    """Return the id in a token's text. vLLM writes `token_id:17`."""
    name, _, number = token.partition(":")
    if name != "token_id":
        raise ValueError(f"a token is {token!r}, expected token_id:NUMBER")
    return int(number)


def _seed(request: SampleRequest) -> int:
    """Return the seed that the server gets. A request that goes on gets another one, so that it draws other numbers
    than before."""
    digest = hashlib.sha256(f"{request.seed}/{request.num_sampled}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
