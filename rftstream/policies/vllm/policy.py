"""vLLM as a policy: its asynchronous engine, in processes of its own, driven from the explorer's one thread.

The engine's event loop runs in a thread of this process ([engine](engine.py)); `step` only collects finished requests.
New weights are in memory that the engine's workers can read, in most cases the follower's own
([shared_memory](../../weights/shared_memory.py)). With `in_flight` "keep" and "recompute" the engine pauses between two
decoding steps, each worker loads the changed tensors in place, and running requests continue. With "finish" running
requests finish with the old weights first. vLLM stamps each token with the version that sampled it. Its logprobs are
those of its sampler: after temperature, penalties and truncation.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from rftstream.clock import Clock
from rftstream.contracts.token_values import ALLOWED, EXPERTS
from rftstream.contracts.versions import VersionName
from rftstream.errors import ConfigError, RftError, pip_install, require_package
from rftstream.loops import LoopThread, PendingCall
from rftstream.models.folders.files import read_json
from rftstream.models.folders.folder import check_loadable
from rftstream.models.rendering import Renderer
from rftstream.models.spec import ModelSpec
from rftstream.models.vision.image_inputs import ImageCache
from rftstream.policies.base import Completion, EngineLoad, SampleRequest, room_for, without_tokens
from rftstream.policies.beside import EngineBeside
from rftstream.policies.served import check_tensors, served_parameters
from rftstream.policies.vllm.arguments import EXPERTS_ARGUMENT, applies_adapters, check_says_experts
from rftstream.policies.vllm.engine import Engine, label_of, remembers
from rftstream.policies.vllm.exchange import Shared
from rftstream.policies.vllm.shared import SharedAdapter, WeightsMirror
from rftstream.weights.adapters import merged_tensors, whole_tensors
from rftstream.weights.shared_memory import SharedTensors
from rftstream.weights.snapshot import RawTensor


class VllmPolicy(EngineBeside[str, tuple[str, Completion] | RftError]):
    """A policy on vLLM's engine, as `Policy` describes it. The engine starts in the background; requests wait until
    there are weights."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        batch_size: Annotated[int, Meta(ge=1)] = 256
        """Requests sampled at once (vLLM's max_num_seqs); more wait."""
        in_flight: Literal["keep", "recompute", "finish"] = "keep"
        """Treatment of running requests when new weights come. keep: they continue with the keys and values that the
        old weights computed. recompute: they continue with recomputed keys and values, which costs a pass over their
        tokens; the recorded logprobs are then those of the stamped weights alone. finish: they finish with the old
        weights first, and new requests wait for them."""
        engine: dict[str, Any] = field(default_factory=dict)
        """Any argument of vLLM's engine, by the names of its Python API: `{ tensor_parallel_size = 2,
        gpu_memory_utilization = 0.8, enforce_eager = true }`."""
        adapters: Literal["auto", "apply", "merge"] = "auto"
        """How the engine gets the versions of a model with adapters (`[model.lora]`). apply: as adapters, through
        vLLM's LoRA interface; a version is then as small as the adapters, and the engine's weights stay unchanged.
        merge: merged into the model's weights; those with adapters are exchanged. auto: apply on a GPU; merge on a CPU
        (where vLLM would neither compile the model nor read an adapter once for all tokens), for a model that is shown
        images, and for ranks above 512."""
        environment: dict[str, str] = field(default_factory=dict)
        """Environment variables for the engine: `{ VLLM_BATCH_INVARIANT = "1" }`."""
        sleep_after_s: Annotated[float, Meta(gt=0)] | None = None
        """Idle seconds after which the engine releases the GPU's memory (vLLM's sleep mode, level 1) until there is
        work again, so that a trainer can use the memory meanwhile. New weights do not wake the engine; it loads them
        when it wakes. Default: never. Not on a CPU."""
        sleeps: bool = False
        """The engine can release the GPU's memory on request, as it does after `sleep_after_s`. `trainer.colocate` sets
        this by itself."""
        says_load: bool = False
        """The engine says after each pass how busy it is. `explorer.max_concurrent = "auto"` sets this by itself."""

    @staticmethod
    def require() -> None:
        """Raise ConfigError if the package vllm is not installed."""
        advice = f"{pip_install('rftstream[vllm]')} where there are GPUs, scripts/setup vllm for a build for CPUs"
        require_package("policy vllm", "vllm", advice=advice)

    @staticmethod
    def require_images(folder: Path) -> None:
        """Raise ConfigError if vLLM cannot show images to the model in a folder."""
        advice = "pip install torchvision, in the version that goes with torch; scripts/setup vllm does it for CPUs"
        require_package("policy vllm, for a model that is shown images", "torchvision", advice=advice)
        config = read_json(folder / "config.json")
        if "video_token_id" in config or "video_token_index" in config:
            raise ConfigError(
                f"policy vllm: models of type {config.get('model_type')!r} read videos, too; vLLM does not open their "
                "processor so that the pixels of images are the trainer's; use policy 'hf'"
            )

    @staticmethod
    def require_experts(devices: Sequence[str]) -> None:
        """Raise ConfigError if the installed vLLM cannot say on these devices which experts tokens take."""
        found = importlib.util.find_spec("vllm")  # whose import takes seconds
        source = Path(found.origin).with_name("engine") / "arg_utils.py" if found and found.origin else None
        known = source is not None and source.is_file() and EXPERTS_ARGUMENT in source.read_text(encoding="utf-8")
        check_says_experts(known, devices)

    def __init__(
        self,
        config: Config,
        *,
        model: ModelSpec,
        renderer: Renderer,
        clock: Clock,
        images: ImageCache | None = None,
        records: frozenset[str] = frozenset(),
    ) -> None:
        """`images`: the images that prompts show; None if the model is shown none. `records`: kinds of values beside
        the tokens of completions."""
        self.require()
        if images is not None:
            self.require_images(model.folder)
        check_loadable(model)
        super().__init__()
        self.slots = config.batch_size
        self._config, self._spec, self._renderer = config, model, renderer
        self._parameters, self._vocab_size = served_parameters(model)
        self._applies = applies_adapters(config, model, renderer)
        self._mirror = WeightsMirror(self._parameters)
        self._held: list[tuple[str, SampleRequest]] = []
        """Requests that wait for the first version, each with its name in the engine."""
        self._number = 0
        self._loop = LoopThread("vllm")
        self._rest = PendingCall()
        """The last `sleep` or `wake` call to the engine."""
        self._engine = Engine(
            config,
            model,
            renderer,
            self._results,
            images,
            records_sets=ALLOWED in records,
            expert_layers=_expert_layers(model) if EXPERTS in records else (),
        )
        self._loop.soon(self._engine.start)  # takes a minute or more; requests wait meanwhile

    def load(self, tensors: Mapping[str, RawTensor], name: VersionName) -> None:
        """Give the engine a version as `in_flight` says. WeightsError unless the tensors are those of this model.

        SharedTensors are read in place; all others are copied to memory that the engine can read. If the memory of
        SharedTensors changes before the engine has read them, running requests continue, and new ones wait for the next
        call, which may bring the same version again."""
        if isinstance(tensors, SharedTensors) and name == self._version and self._engine.has(label_of(name)):
            return
        where = f"weights {label_of(name)} of {self._spec.name}"
        if self._spec.lora is None:
            check_tensors(tensors, self._parameters, where=where)
        shared: Shared
        if self._applies:
            merged_tensors(self._spec, tensors, where=where)  # which checks them
            shared = SharedAdapter(self._spec, tensors)
        elif self._spec.lora is None and isinstance(tensors, SharedTensors):
            shared = tensors
        else:
            shared = self._mirror.write(whole_tensors(self._spec, tensors, self._parameters, where=where))
        if self._config.in_flight == "finish" or not self._engine.started:
            self._loop.soon(self._engine.load_later, shared, label_of(name))
        else:
            self._loop.call(self._engine.load(shared, label_of(name)))
        self._version = name
        held, self._held = self._held, []
        for unique, request in held:
            self._begin(unique, request)

    def submit(self, request: SampleRequest) -> None:
        """Give the engine a request, or hold it until there are weights."""
        self._number += 1
        unique = f"{request.request_id}#{self._number}"
        self._active[request.request_id] = unique
        room = room_for(request, self._renderer.context)
        if not request.token_ids or not all(self._is_known(one) for one in request.token_ids):
            why = "the prompt is empty or has ids out of range"
            self._results.put((unique, without_tokens(request, "error", why)))
        elif request.num_sampled and remembers(request.sampling):
            why = "vllm cannot go on with tokens sampled elsewhere where stop strings or penalties look at them"
            self._results.put((unique, without_tokens(request, "error", why)))
        elif room <= 0:
            self._results.put((unique, without_tokens(request, "length", None)))
        elif self._version is None:
            self._held.append((unique, dataclasses.replace(request, max_tokens=room)))
        else:
            self._begin(unique, dataclasses.replace(request, max_tokens=room))

    def so_far(self, request_id: str) -> Completion | None:
        """Return the tokens sampled for a request. Also None if no engine could resume it, since stop strings and
        penalties depend on the history."""
        unique = self._active.get(request_id)
        if unique is None or not self._engine.started:
            return None
        return self._loop.call(self._engine.so_far(unique))

    def engine_load(self) -> EngineLoad:
        """Return how busy the engine is. Without `says_load` it says nothing."""
        return self._engine.load_now

    def abort(self, request_id: str) -> None:
        """Forget a request, and abort it in the engine."""
        unique = self._active.pop(request_id, None)
        if unique is not None:
            self._held = [one for one in self._held if one[0] != unique]
            self._loop.soon(self._engine.abort, unique)

    def _collect(self, result: tuple[str, Completion] | RftError) -> Completion | None:
        if isinstance(result, RftError):
            raise result
        unique, completion = result
        if self._active.get(completion.request_id) != unique:
            return None
        del self._active[completion.request_id]
        return completion

    def sleep(self) -> bool:
        """Make the engine release the GPU's memory, as soon as it has started. Running requests are kept: after waking,
        the engine recomputes their states and continues."""
        return self._rest.ask(self._loop, self._engine.rest)

    def wake(self) -> bool:
        """Make the engine allocate its memory again and continue."""
        return self._rest.ask(self._loop, self._engine.rouse)

    def close(self) -> None:
        """End the engine, its processes and its thread."""
        self._active.clear()
        self._held.clear()
        if not self._loop.closed:
            self._loop.call(self._engine.close())
            self._loop.close()
        self._mirror.close()

    def _is_known(self, token_id: int) -> bool:
        tokens = self._renderer.images
        return 0 <= token_id < self._vocab_size or (tokens is not None and token_id == tokens.token_id)

    def _begin(self, unique: str, request: SampleRequest) -> None:
        self._loop.soon(self._engine.begin, unique, request)


def _expert_layers(model: ModelSpec) -> tuple[int, ...]:
    """Return the numbers of the layers that are mixtures of experts. ConfigError if there are none."""
    from rftstream.models.exactness import outline
    from rftstream.models.routers import Routers, not_replayed

    found = outline(model)
    routers = Routers.of(found)
    if routers is None:
        raise not_replayed("trainer.routing", found)
    return routers.layer_numbers()
