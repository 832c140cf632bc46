"""The inputs of vLLM: environment, engine arguments, and the sampling parameters of each request."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rftstream.config.parts.registry import suggest
from rftstream.errors import ConfigError
from rftstream.models.rendering import Renderer
from rftstream.models.spec import ModelSpec
from rftstream.policies.base import SampleRequest, part_seed

CPU_CACHE_BYTES = 1 << 30
"""Bytes of keys and values on a CPU. vLLM's own default is nearly all memory of the machine."""

OURS = {
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "model.dtype",
    "max_model_len": "model.context",
    "max_num_seqs": "policies.vllm.batch_size",
    "enable_sleep_mode": "policies.vllm.sleeps",
    "enable_lora": "policies.vllm.adapters",
    "enable_return_routed_experts": "trainer.routing",
    "max_lora_rank": "model.lora",
    "max_loras": None,
    "logprobs_mode": None,
    "max_logprobs": None,
    "worker_extension_cls": None,
    "mm_processor_cache_gb": None,
    "mm_processor_kwargs": None,
}
"""Arguments of the engine that other settings determine -> the setting; None if a policy needs a fixed value."""


EXPERTS_ARGUMENT = "enable_return_routed_experts"
"""Argument of the engine with which it says which experts tokens take."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts as the largest rank of adapters."""


class EngineSettings(Protocol):
    """The settings of `[policies.vllm]` that the engine reads (`VllmPolicy.Config` says what each means)."""

    @property
    def batch_size(self) -> int:
        """Number of requests sampled at once."""

    @property
    def in_flight(self) -> str:
        """The treatment of running requests when new weights come: keep, recompute or finish."""

    @property
    def adapters(self) -> str:
        """The form in which the engine gets versions of adapters: auto, apply or merge."""

    @property
    def sleep_after_s(self) -> float | None:
        """Idle seconds before the engine sleeps; None for never."""

    @property
    def sleeps(self) -> bool:
        """Whether the engine can be put to sleep."""

    @property
    def says_load(self) -> bool:
        """Whether the engine says how busy it is."""

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables for the engine."""

    @property
    def engine(self) -> Mapping[str, Any]:
        """Arguments of vLLM's engine, by name."""


def engine_environment(config: EngineSettings, model: ModelSpec, *, records_experts: bool = False) -> dict[str, str]:
    """Return environment variables for the engine's processes: they report nothing to vLLM's makers, and use the
    configured threads and GPUs. `records_experts`: whether the engine says which experts tokens take."""
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",  # idle ones often do not notice that their engine is gone
    }
    kind, _, which = model.device.partition(":")
    forced = {"VLLM_USE_V2_MODEL_RUNNER": "1"} if records_experts else {}  # the other one cannot say it
    if kind == "cpu":
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        forced["OMP_NUM_THREADS"] = str(model.threads)
    elif kind == "cuda" and which:
        forced["CUDA_VISIBLE_DEVICES"] = _visible(which, os.environ.get("CUDA_VISIBLE_DEVICES"))
    given = {name: os.environ[name] for name in defaults if name in os.environ}
    return {**defaults, **given, **forced, **config.environment}


def _visible(which: str, visible: str | None) -> str:
    """Return the value for CUDA_VISIBLE_DEVICES. `which` is an index into the GPUs that this process sees: "1" of "4,5"
    is "5"."""
    if not visible:
        return which
    seen = visible.split(",")
    try:
        return ",".join(seen[int(part)] for part in which.split(","))
    except (ValueError, IndexError):
        raise ConfigError(
            f"policy vllm: device 'cuda:{which}', expected numbers below {len(seen)}: CUDA_VISIBLE_DEVICES is "
            f"{visible!r}; set explorer.devices"
        ) from None


def applies_adapters(config: EngineSettings, model: ModelSpec, renderer: Renderer) -> bool:
    """Return whether the engine gets versions as adapters, not merged into the model's weights. ConfigError if adapters
    are requested and cannot be applied."""
    if model.lora is None or config.adapters == "merge":
        return False
    if renderer.images is not None:
        why = "vLLM applies adapters to the language model alone, and this model is shown images"
    elif model.lora.rank > LORA_RANKS[-1]:
        why = f"model.lora.rank is {model.lora.rank}, vLLM takes up to {LORA_RANKS[-1]}"
    elif config.engine.get("load_format", "auto") == "dummy":
        why = "with load_format 'dummy' the engine does not have the weights that the adapters are for"
    else:
        return config.adapters == "apply" or model.device != "cpu"
    if config.adapters == "apply":
        raise ConfigError(f"policies.vllm.adapters: got 'apply', but {why}; set 'merge'")
    return False


def check_says_experts(has_argument: bool, devices: Sequence[str]) -> None:
    """Raise ConfigError if the engine cannot say which experts tokens take: vLLM before 0.32, and its build for
    CPUs."""
    why = ""
    if "cpu" in devices:
        why = "vLLM's build for CPUs cannot say which experts tokens take (its newer model runner needs Triton)"
    elif not has_argument:
        why = f"the installed vLLM has no argument {EXPERTS_ARGUMENT}; install a later one"
    if why:
        raise ConfigError(f"trainer.routing: {why}; use policy 'hf', or set 'own'")


def engine_arguments(
    config: EngineSettings,
    model: ModelSpec,
    renderer: Renderer,
    known: list[str],
    *,
    records_experts: bool = False,
) -> dict[str, Any]:
    """Return the arguments of the engine. `known`: names of all arguments that exist. `records_experts`: whether the
    engine says which experts tokens take. ConfigError for an unknown argument, or one that another setting
    determines."""
    for name, value in config.engine.items():
        where = f"policies.vllm.engine.{name}"
        if name not in known:
            raise ConfigError(f"{where}: unknown argument of vLLM; {suggest(name, known)}")
        if name in OURS:
            advice = f"set {OURS[name]} instead" if OURS[name] else "leave it out, what a policy does needs another"
            raise ConfigError(f"{where}: got {value!r}, expected it not to be given; {advice}")
    if config.engine.get("speculative_config") and model.device == "cpu":
        raise ConfigError(
            "policies.vllm.engine.speculative_config: on a CPU vLLM lacks the kernels that verify drafts, and gives "
            "logprobs that are no numbers; leave it to GPUs"
        )
    arguments: dict[str, Any] = {"disable_log_stats": True, **config.engine}
    if config.says_load:
        arguments["disable_log_stats"] = False
    if records_experts:
        check_says_experts(EXPERTS_ARGUMENT in known, [model.device])
        arguments[EXPERTS_ARGUMENT] = True
    if model.device == "cpu" and not {"kv_cache_memory_bytes", "gpu_memory_utilization"} & config.engine.keys():
        arguments["kv_cache_memory_bytes"] = CPU_CACHE_BYTES
    if renderer.context is not None:
        arguments["max_model_len"] = renderer.context
    if renderer.images is not None:
        # `load` brings the weights in any case. Pixels are the trainer's, and we cache them.
        arguments.setdefault("load_format", "dummy")
        arguments |= {"mm_processor_kwargs": {"backend": "pil"}, "mm_processor_cache_gb": 0}
    if model.lora is not None and applies_adapters(config, model, renderer):
        largest = next(rank for rank in LORA_RANKS if rank >= model.lora.rank)
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": largest}
    return arguments | {
        "model": str(model.folder),
        "dtype": model.dtype,
        "max_num_seqs": config.batch_size,
        "enable_sleep_mode": config.sleeps or config.sleep_after_s is not None,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,
        "worker_extension_cls": "rftstream.policies.vllm.worker.WeightsReceiver",
    }


def sampling_params(
    request: SampleRequest, stop_ids: Sequence[int], never_sampled: Sequence[int], num_listed: int = 0
) -> Any:
    """Return a request's settings as vLLM's SamplingParams. `never_sampled`: tokens with probability 0. `num_listed`:
    number of the likeliest tokens that are told beside each sampled one."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        stop=list(sampling.stop),
        stop_token_ids=list(stop_ids),
        logit_bias=dict.fromkeys(never_sampled, -math.inf) or None,
        ignore_eos=True,
        min_tokens=min(max(sampling.min_tokens - request.num_sampled, 0), request.max_tokens),
        max_tokens=request.max_tokens,
        seed=part_seed(request),
        **_constrained(request),
        logprobs=num_listed,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def _constrained(request: SampleRequest) -> dict[str, Any]:
    """Return the arguments that constrain the form of the answer; empty if the request has no constraint."""
    if (form := request.constraint) is None:
        return {}
    from vllm.sampling_params import StructuredOutputsParams

    return {"structured_outputs": StructuredOutputsParams(**{form.kind: form.value})}
