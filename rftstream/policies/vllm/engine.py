"""The asyncio side of the policy `vllm`: starts the engine, admits requests, exchanges weights, sleeps.

Only this module imports vllm, when the engine starts. The environment decides where vllm may run, so it has to be set
first."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import queue
from collections.abc import Sequence
from typing import Any

import numpy as np

from rftstream.contracts.beside import Beside, uniform
from rftstream.contracts.rollouts import VersionSpan
from rftstream.contracts.tasks import Sampling
from rftstream.contracts.token_values import EXPERTS
from rftstream.contracts.versions import VersionName
from rftstream.errors import ConfigError, ImageError, PolicyError, RftError
from rftstream.models.rendering import Renderer
from rftstream.models.spec import ModelSpec
from rftstream.models.vision.image_inputs import ImageCache
from rftstream.policies.base import Completion, EngineLoad, SampleRequest, without_tokens
from rftstream.policies.vllm.arguments import EngineSettings, engine_arguments, engine_environment, sampling_params
from rftstream.policies.vllm.exchange import Shared, WeightsExchange, short
from rftstream.policies.vllm.images import EngineImages, PreparedImage
from rftstream.policies.vllm.load import EngineMeasures
from rftstream.policies.vllm.sets import SampledSets
from rftstream.policies.vllm.sleep import SleepingEngine


class Engine(SleepingEngine):
    """vLLM's engine. `VllmPolicy` makes it, then calls every method in the event loop's thread: `start`, then `load`
    and `begin`, and `close` at the end. Results and failures go into the queue `outcomes`."""

    def __init__(
        self,
        config: EngineSettings,
        model: ModelSpec,
        renderer: Renderer,
        outcomes: queue.SimpleQueue[Any],
        images: ImageCache | None,
        *,
        records_sets: bool = False,
        expert_layers: Sequence[int] = (),
    ) -> None:
        """`images`: the images that prompts show; None if the model is shown none. `records_sets`: whether completions
        have the sets of tokens that could be sampled. `expert_layers`: numbers of the layers whose experts they have;
        empty to record none."""
        self._images = None if images is None or renderer.images is None else EngineImages(images, renderer.images)
        super().__init__()
        self._expert_layers = list(expert_layers)
        self._never_sampled: tuple[int, ...] = ()
        self._config, self._model, self._renderer, self._outcomes = config, model, renderer, outcomes
        self._stop_ids = sorted(renderer.stop_token_ids)
        self._records_sets = records_sets
        self._sets: SampledSets | None = None
        self._measures = EngineMeasures()
        self._engine: Any = None
        self.started = False
        self._running: dict[str, asyncio.Task[None]] = {}
        self._queues: dict[str, tuple[SampleRequest, Any]] = {}
        self._places = asyncio.Semaphore(config.batch_size)
        self._gate = asyncio.Lock()
        """Held while the engine starts, a request enters it, or weights are exchanged, so that no request enters in
        between."""
        self._weights = WeightsExchange(has_images=self._images is not None)
        self._loading: asyncio.Task[None] | None = None
        self._starting: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to start the engine. Errors go into the queue."""
        self._starting = asyncio.get_running_loop().create_task(self._start())

    async def _start(self) -> None:
        async with self._gate:
            try:
                self._engine = self._open()
                if (tokens := self._renderer.images) is not None:
                    vocabulary = self._engine.model_config.get_vocab_size()
                    self._never_sampled = tuple(one for one in tokens.never_sampled if one < vocabulary)
                await self._engine.collective_rpc("rftstream_prepare", args=(os.getpid(),))
                self.started = True
            except RftError as error:
                self._outcomes.put(error)
            except Exception as error:
                self._outcomes.put(PolicyError(f"policy vllm: the engine did not start: {short(error)}"))

    def _open(self) -> Any:
        config, model = self._config, self._model
        records = bool(self._expert_layers)
        os.environ.update(engine_environment(config, model, records_experts=records))
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        built_for, wanted = current_platform.device_type, model.device.partition(":")[0]
        if built_for != wanted:
            raise ConfigError(
                f"policy vllm: the installed vllm runs on {built_for or 'no device of this machine'}, the device given "
                f"is {model.device!r}; set explorer.devices and evaluator.device, or install a vllm for {wanted}"
            )
        arguments = engine_arguments(
            config,
            model,
            self._renderer,
            [field.name for field in dataclasses.fields(AsyncEngineArgs)],
            records_experts=records,
        )
        try:
            settings = AsyncEngineArgs(**arguments).create_engine_config(UsageContext.ENGINE_CONTEXT)
        except Exception as error:  # pydantic's errors, and those of vLLM's own checks
            raise ConfigError(f"policies.vllm: vLLM does not take these settings: {short(error)}; mend them") from error
        sets = SampledSets(model, self._stop_ids, settings.model_config.get_vocab_size())
        self._sets = sets if self._records_sets else None
        if settings.structured_outputs_config.backend == "auto" and sets.grammars is not None:
            settings.structured_outputs_config.backend = "guidance"  # holds to the forms that `sets` and `check` know
        if settings.lora_config is not None:
            _check_takes_adapters(settings.model_config)
        try:
            return AsyncLLM.from_vllm_config(
                settings,
                disable_log_stats=arguments["disable_log_stats"],
                stat_loggers=[self._measures.logger] if config.says_load else None,
            )
        except Exception as error:  # vLLM's parts raise errors of any kind
            raise PolicyError(f"policy vllm: the engine did not start: {short(error)}; see the log above") from error

    @property
    def load_now(self) -> EngineLoad:
        """How busy the engine is. Any thread may read it."""
        load = self._measures.load
        return dataclasses.replace(load, num_waiting=load.num_waiting + len(self._running) - len(self._queues))

    # ------------------------------------------------------------------------------------------ requests

    def begin(self, unique: str, request: SampleRequest) -> None:
        """Begin a request under the name `unique`."""
        self._running[unique] = asyncio.get_running_loop().create_task(self._sample(unique, request))

    def abort(self, unique: str) -> None:
        """End a request. Unknown names are ignored."""
        if (task := self._running.get(unique)) is not None:
            task.cancel()

    async def so_far(self, unique: str) -> Completion | None:
        """Return the tokens sampled for a request so far. vLLM gives versions only with finished requests, so this
        reads vLLM's internal state."""
        if unique not in self._queues or remembers(self._queues[unique][0].sampling):
            return None
        request, queued = self._queues[unique]
        state = self._engine.output_processor.request_states.get(queued.request_id)
        if state is None or queued.output is not None:
            return None  # finished
        token_ids = state.detokenizer.output_token_ids
        spans = state._weight_version_spans()
        logprobs = state.logprobs_processor.logprobs
        completion = _completion(request, token_ids, logprobs, spans, "unfinished")
        return self._with_values(completion, request, logprobs, getattr(state, "routed_experts_chunks", ()))

    async def _sample(self, unique: str, request: SampleRequest) -> None:
        queued: Any = None
        try:
            prepared = await self._prepare(request)
            async with self._places:
                queued = await self._enter(unique, request, prepared)
                self._queues[unique] = (request, queued)
                output = (await queued.get()).outputs[0]
                reason = output.finish_reason
                completion = _completion(request, output.token_ids, output.logprobs, output.weight_versions, reason)
                routed = getattr(output, "routed_experts", None)
                parts = () if routed is None else [routed]
                self._outcomes.put((unique, self._with_values(completion, request, output.logprobs, parts)))
        except asyncio.CancelledError:
            if queued is not None and not self._engine.errored:
                await self._engine.abort(queued.request_id, internal=True)
        except Exception as error:  # vLLM's own errors, of several kinds; the engine itself reports whether it lives
            died = self._engine is not None and self._engine.errored
            self._outcomes.put(_failure(unique, request, error, died=died))
        finally:
            self._running.pop(unique, None)
            self._queues.pop(unique, None)
            self._plan_sleep()

    def _with_values(
        self, completion: Completion, request: SampleRequest, logprobs: Any, experts: Sequence[np.ndarray]
    ) -> Completion:
        """Return the completion with the values beside its tokens. `experts`: parts that the engine told, [tokens,
        layers, experts] each. The last sampled token has none, since no pass has read it."""
        beside: dict[str, Beside] = {}
        if self._sets is not None and completion.error is None:
            beside |= self._sets.columns(request, completion.token_ids, logprobs)
        if self._expert_layers and experts:
            routed = np.concatenate(experts)[:, self._expert_layers].astype(np.uint16)
            dtype = np.uint8 if routed.max(initial=0) <= 255 else np.uint16
            beside[EXPERTS] = uniform(routed.astype(dtype))
        return dataclasses.replace(completion, beside=beside)

    async def _prepare(self, request: SampleRequest) -> Sequence[PreparedImage]:
        """Return the images of a request in the engine's form. Other requests may enter meanwhile."""
        if not request.images:
            return ()
        if self._images is None or self._starting is None:
            raise ImageError("the model is not shown images")
        await asyncio.wait([self._starting])
        if not self.started:
            raise PolicyError("policy vllm: the engine did not start")
        return await self._images.prepare(request.images, self._engine.renderer)

    async def _enter(self, unique: str, request: SampleRequest, prepared: Sequence[PreparedImage]) -> Any:
        while True:
            await self._awake()
            async with self._gate:
                if not self.started:
                    raise PolicyError("policy vllm: the engine did not start")
                self._weights.check_whole()
                if self._asleep:
                    continue  # the engine fell asleep in between, and loads no version before it is awake
                if self._weights.has_version.is_set():
                    return await self._add(unique, request, prepared)
            await self._weights.has_version.wait()

    async def _add(self, unique: str, request: SampleRequest, prepared: Sequence[PreparedImage]) -> Any:
        from vllm.inputs.engine import tokens_input

        # A prompt must not meet the states that older weights computed for it.
        if prepared and self._images is not None:
            prompt = self._images.prompt(request, prepared, self._weights.label)
        else:
            prompt = tokens_input(list(request.token_ids), cache_salt=self._weights.label)
        num_listed = 0 if self._sets is None else self._sets.num_listed(request)
        params = sampling_params(request, self._stop_ids, self._never_sampled, num_listed)
        return await self._engine.add_request(unique, prompt, params, lora_request=self._weights.adapter)

    # ------------------------------------------------------------------------------------------ weights

    async def load(self, shared: Shared, label: str) -> None:
        """Exchange the weights between two decoding steps; if the engine sleeps, when it wakes. PolicyError if that
        fails."""
        self._weights.put(shared, label)
        async with self._gate:
            if self._weights.is_due and not self._asleep:
                clear_cache = self._config.in_flight == "recompute"
                if not await self._weights.take_newest(self._engine, clear_cache=clear_cache):
                    raise PolicyError(f"policy vllm: weights {label} were changed before the engine could read them")
                self._plan_sleep()

    def has(self, label: str) -> bool:
        """Return whether the engine has this version. Any thread may call it."""
        return self._weights.label == label

    def load_later(self, shared: Shared, label: str) -> None:
        """Exchange the weights when all running requests have finished. If several versions wait, only the newest is
        loaded."""
        self._weights.put(shared, label)
        self._begin_loading()

    def _begin_loading(self) -> None:
        if self._loading is None:
            self._loading = asyncio.get_running_loop().create_task(self._load_newest())

    async def _load_newest(self) -> None:
        try:
            async with self._gate:  # nothing enters, so running requests come to their end
                while self._queues and self._weights.is_due:  # the version may have been loaded when the engine woke
                    await asyncio.wait(
                        [self._running[one] for one in self._queues], return_when=asyncio.FIRST_COMPLETED
                    )
                if self._weights.is_due and self.started and not self._asleep:
                    await self._weights.take_newest(self._engine, clear_cache=True)
                    self._plan_sleep()
        except PolicyError as error:
            self._outcomes.put(error)
            return
        finally:
            self._loading = None
        if self._weights.is_due and self.started and not self._asleep:
            self._begin_loading()

    async def close(self) -> None:
        """Cancel all running requests, and end the engine's processes."""
        self._cancel_sleep()
        tasks = [*self._running.values(), *filter(None, (self._starting, self._loading, self._sleeping, self._waking))]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._weights.drop()
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()
            engine.engine_core.resources.ctx.destroy(linger=0)  # which vLLM leaves to the garbage collector


def _check_takes_adapters(model_config: Any) -> None:
    """Raise ConfigError if vLLM's class for a model cannot apply adapters, before starting processes for it."""
    from vllm.model_executor.models import ModelRegistry, supports_lora

    found, _ = ModelRegistry.resolve_model_cls(model_config.architectures, model_config)
    if not supports_lora(found):
        raise ConfigError(f"policies.vllm.adapters: vLLM's {found.__name__} cannot apply adapters; set 'merge'")


def remembers(sampling: Sampling) -> bool:
    """Return whether the next token depends on the sampling history, not only on the tokens themselves."""
    return bool(sampling.stop or sampling.presence_penalty or sampling.frequency_penalty)


def _completion(
    request: SampleRequest, token_ids: Sequence[int], logprobs: Any, spans: Any, reason: str | None
) -> Completion:
    ids = np.asarray(token_ids, dtype=np.int32)
    values = np.zeros(0, np.float32)
    if logprobs is not None:  # the sampled token is the first of those that are told at its place
        values = np.asarray(logprobs.logprobs, dtype=np.float32)[logprobs.start_indices]
    error = None
    if len(values) != len(ids):
        reason, error = "error", f"vllm gave {len(values)} logprobs for {len(ids)} tokens"
    elif not np.isfinite(values).all():
        reason, error = "error", "the model gave values that are not finite"
    elif reason not in ("stop", "length", "unfinished"):
        reason, error = "error", f"vllm ended it: {reason}"
    versions = tuple(_span(span) for span in spans or ())
    return Completion(
        request_id=request.request_id,
        token_ids=ids,
        behavior_logprobs=values,
        versions=versions,
        finish_reason=str(reason),
        error=error,
    )


def _span(span: Any) -> VersionSpan:
    epoch, _, version = span.version.partition("/")
    return VersionSpan(start=span.start, count=span.end - span.start, trainer_epoch=int(epoch), version=int(version))


def label_of(name: VersionName) -> str:
    """Return a version in the engine's form: epoch/version."""
    return f"{name.trainer_epoch}/{name.version}"


def _failure(unique: str, request: SampleRequest, error: Exception, *, died: bool) -> Any:
    """Return the result of a failed request: an error that ends the policy, or a completion without tokens."""
    if isinstance(error, PolicyError):
        return error
    if died:
        return PolicyError(f"policy vllm: the engine died: {short(error)}; see the log above")
    text = str(error) if isinstance(error, RftError) else f"vllm: {short(error)}"  # the former for an image
    return unique, without_tokens(request, "error", text)
