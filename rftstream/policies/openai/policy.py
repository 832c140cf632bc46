"""Served models as a policy: any servers with OpenAI's completions that take token ids as the prompt, and give token
ids and logprobs back. vLLM does; for other servers there is an error that says so.

With several servers, all turns of a rollout go to the server that has computed their beginning (`routing`). If a server
fails, its requests move to the next one, and the failed server is probed until it answers.

With `update`, each version is sent to the servers, which must be able to load weights while they run. Running requests
finish first with the old weights, and new requests wait, so a completion comes from one version alone. Each server gets
the version when its own requests have ended. A server that was gone may have restarted with other weights, so it gets
its weights again before the next request. Without `update`, the servers keep their own weights. Tokens are still
stamped with the version in force, because every sampled token needs one. So use that only for teachers, judges,
baselines and data, not to train on what it samples.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from rftstream.clock import Clock
from rftstream.contracts.versions import VersionName
from rftstream.errors import ConfigError, PolicyError
from rftstream.models.rendering import Renderer
from rftstream.models.server_client import ModelServer
from rftstream.models.spec import ModelSpec
from rftstream.models.vision.image_inputs import ImageCache
from rftstream.policies.base import Completion, EngineLoad, SampleRequest, room_for, without_tokens
from rftstream.policies.beside import EngineBeside
from rftstream.policies.openai.asking import ServedCall, ServerAsker, ServerFailure
from rftstream.policies.openai.completions import completion_body
from rftstream.policies.openai.engine import Answer, ServedEngine
from rftstream.policies.openai.images import RESOURCE, ServedImages
from rftstream.policies.openai.routing import LONGEST_AFTER_S, Router, pause_after
from rftstream.policies.openai.updates import ServerUpdates, UpdateRequest, root_of
from rftstream.weights.snapshot import RawTensor

PROBE_S = 30.0
"""Longest time in seconds for the one token of a probe."""
SECTION = "policies.openai"


class OpenAiPolicy(EngineBeside[ServedCall, Callable[[], Completion | None]]):
    """A policy whose engines are model servers, as `Policy` describes it. Threads call the servers; `step` collects the
    answers."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        url: str | tuple[str, ...]
        """Where the API begins: `http://127.0.0.1:8000/v1`. Its tokenizer must be that of `model.path`. Several servers
        of one model: `["http://one:8000/v1", "http://two:8000/v1"]`."""
        model: str
        """Name of the model on the server, or on each of them."""
        api_key: str | None = None
        """`"env:NAME"`: sent as the bearer token. The value is read from the environment and never written."""
        batch_size: Annotated[int, Meta(ge=1)] = 64
        """Requests at each server at once; more wait."""
        timeout_s: Annotated[float, Meta(gt=0)] = 600.0
        """Seconds to wait for one answer."""
        tries: Annotated[int, Meta(ge=1)] = 5
        """Tries of a request if the server cannot be reached or is busy. With several servers: tries of a request that
        fails at each of them. If all servers are away, the explorer ends after probing each this many times in a
        row."""
        max_load: Annotated[float, Meta(ge=1)] = 1.25
        """With several servers: a rollout begins at the next server if the first one for its group has more than this
        many times the mean number of requests. The rollout then stays where it began."""
        extra: dict[str, Any] = field(default_factory=dict)
        """Further fields of each request, as the server defines them."""
        update: Literal["vllm", "vllm-cpu"] | tuple[UpdateRequest, ...] | None = None
        """Way to make the server load a new version from a folder, after it has answered all requests. vllm: vLLM's own
        endpoints, which exist if it is started with `VLLM_SERVER_DEV_MODE=1`. vllm-cpu: for vLLM's CPU builds, which
        would keep the old weights in an output layer that is tied to the embeddings; start them also with
        `--worker-extension-cls rftstream.policies.vllm.worker.WeightsReceiver`. For other servers: a list of requests,
        sent in order: `[{ path = "/update_weights", body = { model_path = "{folder}" } }]`. The servers must serve this
        worker alone. Default: the server keeps its own weights."""
        update_folder: str | None = None
        """Folder to which versions are written for the servers, two or three at a time. The servers must be able to
        read it under the same path. Default: this machine's folder for temporary files."""

        def __post_init__(self) -> None:
            if not self.urls or len(set(self.urls)) < len(self.urls):
                raise ConfigError(
                    f"{SECTION}.url: found {len(self.urls)} urls, {len(set(self.urls))} different (they are not "
                    "shown here), expected one server or more, each once"
                )

        @property
        def urls(self) -> tuple[str, ...]:
            """All servers."""
            return (self.url,) if isinstance(self.url, str) else self.url

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
        super().__init__()
        self._config, self._renderer = config, renderer
        urls = config.urls
        self._updates: ServerUpdates | None = None
        if config.update is not None:
            self._updates = ServerUpdates(
                config.update,
                folder=config.update_folder,
                urls=urls,
                api_key=config.api_key,
                timeout_s=config.timeout_s,
                tries=config.tries,
                section=SECTION,
                model=model,
            )
        self._stop_ids = sorted(renderer.stop_token_ids)
        self._paused: list[tuple[float, ServedCall]] = []
        """Requests that wait for an available server, or for the next round through all servers, each with the time
        from which it may be sent."""
        self._num_lost = 0
        """Number of requests that the only server has lost since its last answer."""
        self._answered_at = 0.0
        self._num_tokens, self._busy_s, self._lag_s = 0, 0.0, 0.0
        self._router = Router(config.max_load)
        self._threads = ThreadPoolExecutor(config.batch_size * len(urls), thread_name_prefix="openai")
        shown = None if images is None or renderer.images is None else ServedImages(images, renderer.images)
        self._engines: dict[str, ServedEngine] = {}
        for url in urls:
            asker = ServerAsker(
                url,
                _client(config, url, config.timeout_s, shown is not None),
                _client(config, url, min(config.timeout_s, PROBE_S), shown is not None) if len(urls) > 1 else None,
                updates=self._updates,
                images=shown,
                make_body=self._body,
            )
            self._engines[url] = ServedEngine(asker, self._threads, config.batch_size, self._results, self._on_answer)

    @property
    def slots(self) -> int:
        """Number of requests that may be active at once: `batch_size` for each server."""
        return self._config.batch_size * len(self._engines)

    def load(self, tensors: Mapping[str, RawTensor], name: VersionName) -> None:
        """Write the version for the servers. Each gets it when no request is running there. Without `update`, only
        record its name."""
        engines = self._engines.values()
        if self._updates is not None:
            self._updates.write(tensors, name)
        for engine in engines:
            if self._updates is None:
                engine.version = name
            else:
                engine.next = name
        if self._updates is not None:  # no server gets the older ones any more, even if it restarts
            self._updates.delete_others({name, *(engine.sending for engine in engines if engine.sending is not None)})
        self._version = name
        self._go_on()

    def submit(self, request: SampleRequest) -> None:
        """Put a request into its server's queue, and send it if that is possible now."""
        call = self._active[request.request_id] = ServedCall(request)
        room = room_for(request, self._renderer.context)
        if not request.token_ids:
            completion = without_tokens(request, "error", "the prompt is empty")
            self._results.put(functools.partial(self._end, call, completion))
        elif room <= 0:
            self._results.put(functools.partial(self._end, call, without_tokens(request, "length", None)))
        else:
            call.body = self._body(request, room)
            self._place(call)
            self._go_on()

    def so_far(self, request_id: str) -> Completion | None:
        """Return None: servers return only whole completions."""
        return None

    def engine_load(self) -> EngineLoad:
        """Return the tokens of answers, and their seconds: each request's, shared by those that were active with it."""
        num_waiting = len(self._paused) + sum(len(engine.waiting) for engine in self._engines.values())
        return EngineLoad(
            num_tokens=self._num_tokens,
            busy_s=self._busy_s,
            num_waiting=num_waiting,
            num_refused=sum(engine.num_full for engine in self._engines.values()),
            lag_s=self._lag_s,
        )

    def abort(self, request_id: str) -> None:
        """Forget a request, and close its connection to the server."""
        call = self._active.pop(request_id, None)
        if call is not None:
            for engine in self._engines.values():
                engine.forget(call)
            self._paused = [(at, one) for at, one in self._paused if one is not call]
            call.cancel()

    def _collect(self, result: Callable[[], Completion | None]) -> Completion | None:
        """Handle the result of a thread."""
        return result()

    def close(self) -> None:
        """Cancel all requests, wait for their threads, and close the connections."""
        for request_id in list(self._active):
            self.abort(request_id)
        for engine in self._engines.values():
            engine.cancel()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for engine in self._engines.values():
            engine.close()
        if self._updates is not None:
            self._updates.close()

    def _place(self, call: ServedCall) -> None:
        """Put a request into the queue of its rollout's server, or into the common queue if no server is available."""
        request = call.request
        loads = {url: engine.load for url, engine in self._engines.items() if not engine.breaker.is_open}
        if not loads:
            self._paused.append((0.0, call))
            return
        rollout = request.rollout_id or request.request_id
        draining = [url for url in loads if self._engines[url].is_draining]
        group = request.group_id or rollout
        url = self._router.place(rollout, group, loads, avoid=call.failed_at, draining=draining)
        self._engines[url].waiting.append(call)

    def _go_on(self) -> None:
        """Send all requests that may be sent now, or give the servers their next version. PolicyError if all servers
        have been away for too long."""
        engines = self._engines.values()
        if self._paused and not all(engine.breaker.is_open for engine in engines):
            now, paused = time.monotonic(), self._paused
            self._paused = [(at, call) for at, call in paused if at > now]
            for _, call in (one for one in paused if one[0] <= now):
                self._place(call)
        for engine in engines:
            if engine.breaker.is_open:
                for call in engine.take_waiting():
                    self._place(call)
        for engine in engines:
            engine.go_on()
        if self.idle_s():
            return
        since = min(call.submitted_at for call in self._active.values())
        if all(engine.is_away(self._config.tries, since) for engine in engines):
            said = "; ".join(f"{engine.url}: {engine.error}" for engine in engines)
            raise PolicyError(f"policy openai: none of {len(engines)} servers answers: {said}")

    def _on_answer(self, engine: ServedEngine, call: ServedCall, result: Answer) -> Completion | None:
        """Return the completion of a finished request. None if the request is sent again or was aborted."""
        engine.on_answer(call, result)
        if isinstance(result, Completion) and not call.cancelled.is_set():
            self._num_lost, self._answered_at = 0, time.monotonic()
        if isinstance(result, ServerFailure):
            is_active = self._active.get(call.request.request_id) is call
            if len(self._engines) == 1:
                self._ask_again(engine, call, result, is_active)
                return None
            ended = self._move(engine, call, result) if is_active else None
            if ended is None:
                return None
            result = ended
        return self._end(call, result)

    def _end(self, call: ServedCall, result: Completion | PolicyError) -> Completion | None:
        """Return the completion of an ended request, or raise its error; None if it was aborted."""
        if self._active.get(call.request.request_id) is not call:
            return None
        if isinstance(result, PolicyError):
            raise result
        if len(result.token_ids):
            took_s = time.monotonic() - call.submitted_at
            self._num_tokens += len(result.token_ids)
            self._busy_s += took_s / len(self._active)
            self._lag_s += 0.1 * (took_s - self._lag_s)
        del self._active[call.request.request_id]
        return result

    def _ask_again(self, engine: ServedEngine, call: ServedCall, failure: ServerFailure, is_active: bool) -> None:
        """Put a request that the only server lost back into the queue. It is sent again when the server has its weights
        again; if the server has them already, after a pause."""
        self._num_lost += 1
        if self._num_lost > self._config.tries * self._config.batch_size:
            raise PolicyError(f"policy openai: {engine.where}: {failure.text}, {self._num_lost} times in a row")
        if is_active and failure.is_lost:
            engine.waiting.appendleft(call)
        elif is_active:
            self._pause(call, failure)

    def _pause(self, call: ServedCall, failure: ServerFailure) -> None:
        """Schedule a request again after a pause, which doubles each time."""
        call.num_rounds += 1
        pause_s = pause_after(call.num_rounds - 1)
        if len(self._engines) == 1:  # with several servers, each pauses for as long as it asked
            pause_s = max(pause_s, min(failure.after_s, LONGEST_AFTER_S))
        self._paused.append((time.monotonic() + pause_s, call))

    def _move(self, engine: ServedEngine, call: ServedCall, failure: ServerFailure) -> Completion | None:
        """Send the request to another server: at once, or after a pause if all servers have failed at it.

        Return the completion if the request itself is to blame: two servers gave bad answers, or all failed at it while
        they answered others. PolicyError if they answer no other request either. Servers that are away or full show
        nothing about a request; it waits for them."""
        now, where = time.monotonic(), f"{engine.url}: {failure.text}"
        if not call.num_failures:
            call.failed_since = now
        call.failed_at.add(engine.url)
        call.num_failures += not failure.is_away
        call.num_bad_answers += failure.is_bad_answer
        if call.num_bad_answers > 1:
            return without_tokens(call.request, "error", where)
        if not failure.is_away and call.num_failures >= self._config.tries * len(self._engines):
            if self._answered_at > call.failed_since:
                return without_tokens(call.request, "error", f"{where}, after {call.num_failures} tries")
            raise PolicyError(f"policy openai: {where}, after {call.num_failures} tries; are the servers up?")
        if len(call.failed_at) < len(self._engines):
            self._place(call)
        else:
            call.failed_at.clear()
            self._pause(call, failure)
        return None

    def _body(self, request: SampleRequest, room: int) -> dict[str, Any]:
        return completion_body(
            request, room, model=self._config.model, stop_ids=self._stop_ids, extra=self._config.extra
        )


def _client(config: OpenAiPolicy.Config, url: str, timeout_s: float, shows_images: bool) -> ModelServer:
    return ModelServer(
        root_of(url) if shows_images else url,
        RESOURCE if shows_images else "completions",
        api_key=config.api_key,
        timeout_s=timeout_s,
        tries=config.tries,
        section=SECTION,
    )
