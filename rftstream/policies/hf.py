"""Any Hugging Face causal language model as a policy: batched sampling with a cache, one decoding step at a time.

Weights are exchanged in place between two steps; the cache of what was computed before is kept.

Shapes: B rows of the batch, L columns, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor
from transformers import AutoModelForCausalLM, logging

from rftstream.clock import Clock
from rftstream.errors import PolicyError, WeightsError
from rftstream.messages import VersionName
from rftstream.models import ModelSpec
from rftstream.policies.base import Completion, SampleRequest
from rftstream.policies.batch import Batch
from rftstream.rendering import Renderer
from rftstream.weights.snapshot import DTYPES, RawTensor

SERVED = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class HfPolicy:
    @dataclass(frozen=True, kw_only=True)
    class Config:
        batch_size: Annotated[int, Meta(ge=1)] = 256
        """Requests sampled at once; more wait."""
        prefill_tokens: Annotated[int, Meta(ge=1)] = 8192
        """Prompt tokens, padding included, taken into the batch in one step (a longer prompt goes alone)."""
        join_every: Annotated[int, Meta(ge=1)] = 8
        """Waiting requests join after so many steps, or at once when a quarter of the batch is free."""

    def __init__(self, config: Config, *, model: ModelSpec, renderer: Renderer, clock: Clock) -> None:
        self._config, self._spec, self._renderer = config, model, renderer
        torch.set_num_threads(model.threads)
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        loader: Any = AutoModelForCausalLM
        self._model = loader.from_pretrained(model.folder, dtype=SERVED[model.dtype], attn_implementation="sdpa")
        self._model.to(model.device)
        self._model.eval()
        self._device = torch.device(model.device)
        self._parameters = dict(self._model.named_parameters())
        self._stop_ids = np.asarray(sorted(renderer.stop_token_ids), dtype=np.int64)
        self._versions: list[VersionName] = []
        self._waiting: deque[SampleRequest] = deque()
        self._refused: list[Completion] = []
        self._batch: Batch | None = None
        self._steps_since_join = 0

    @property
    def version(self) -> VersionName | None:
        return self._versions[-1] if self._versions else None

    @property
    def slots(self) -> int:
        return self._config.batch_size

    @property
    def num_active(self) -> int:
        active = self._batch.num_alive if self._batch is not None else 0
        return active + len(self._waiting) + len(self._refused)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, RawTensor], name: VersionName) -> None:
        where = f"weights {name.trainer_epoch}/{name.version} of {self._spec.name}"
        if odd := sorted(tensors.keys() ^ self._parameters.keys()):
            side = "is missing" if odd[0] in self._parameters else "is not of this model"
            raise WeightsError(f"{where}: {odd[0]!r} {side} ({len(odd)} names differ); is it another model's?")
        for key, parameter in self._parameters.items():
            tensor = tensors[key]
            if tensor.dtype != DTYPES[str(parameter.dtype).removeprefix("torch.")] or tensor.shape != parameter.shape:
                raise WeightsError(
                    f"{where}: {key} is {tensor.dtype} {tensor.shape}, expected {parameter.dtype} "
                    f"{tuple(parameter.shape)}; is it another model's?"
                )
        for key, parameter in self._parameters.items():
            if parameter.numel():
                parameter.copy_(_tensor(tensors[key], parameter))
        self._versions.append(name)

    def submit(self, request: SampleRequest) -> None:
        context = self._renderer.context
        room = request.max_tokens if context is None else min(request.max_tokens, context - len(request.token_ids))
        if not request.token_ids or not all(0 <= one < self._model.config.vocab_size for one in request.token_ids):
            self._refused.append(_without_tokens(request, "error", "the prompt is empty or has ids out of range"))
        elif room <= 0:
            self._refused.append(_without_tokens(request, "length", None))
        else:
            self._waiting.append(request)

    def abort(self, request_id: str) -> None:
        self._waiting = deque(one for one in self._waiting if one.request_id != request_id)
        self._refused = [one for one in self._refused if one.request_id != request_id]
        if self._batch is not None:
            self._batch.forget(request_id)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        done, self._refused = self._refused, []
        if self._versions:
            self._let_in()
            if self._batch is not None:
                done.extend(self._advance(self._batch))
        return done

    def close(self) -> None:
        self._batch, self._model, self._parameters = None, None, {}
        self._waiting.clear()

    # ------------------------------------------------------------------------------------------ the batch

    def _let_in(self) -> None:
        """Rows that are done leave, rows that wait join; seldom, since both copy the cache."""
        batch = self._batch
        if batch is not None and batch.num_alive * 4 <= batch.num_rows * 3:
            self._batch = batch = batch.without_done()
        self._steps_since_join += 1
        free = self._config.batch_size - (batch.num_alive if batch is not None else 0)
        due = batch is None or free * 4 >= self._config.batch_size or self._steps_since_join >= self._config.join_every
        if not (self._waiting and free and due):
            return
        self._steps_since_join = 0
        new = Batch(self._choose(free), self._renderer, self._stop_ids, self._device)
        new.logits_BV = self._forward(new, new.prompts_BL)
        self._batch = new if batch is None else batch.join(new)

    def _choose(self, free: int) -> list[SampleRequest]:
        chosen: list[SampleRequest] = []
        longest = 0
        while self._waiting and len(chosen) < free:
            longest = max(longest, len(self._waiting[0].token_ids))
            if chosen and longest * (len(chosen) + 1) > self._config.prefill_tokens:
                break
            chosen.append(self._waiting.popleft())
        return chosen

    def _forward(self, batch: Batch, token_ids_BL: Tensor) -> Tensor:
        """Logits of the next token, [B, V]; the cache grows by the given columns."""
        try:
            output = self._model(
                input_ids=token_ids_BL, attention_mask=batch.attended_BL,
                position_ids=batch.positions_BL[:, -token_ids_BL.shape[1] :],
                past_key_values=batch.cache, use_cache=True, logits_to_keep=1,
            )  # fmt: skip
        except RuntimeError as error:  # out of memory, for one
            raise PolicyError(f"policy hf: the model failed at {tuple(token_ids_BL.shape)} tokens: {error}") from error
        return output.logits[:, -1]  # type: ignore[no-any-return]

    def _advance(self, batch: Batch) -> list[Completion]:
        """Samples one token of each row, and computes the logits of the next if anything is left to sample."""
        finished = batch.sample(len(self._versions) - 1)
        done = [batch.completion(row, reason, self._versions) for row, reason in finished]
        if batch.num_alive:
            batch.logits_BV = self._forward(batch, batch.append_column())
        else:
            self._batch = None
            self._versions = self._versions[-1:]
        return done


def _without_tokens(request: SampleRequest, reason: str, error: str | None) -> Completion:
    return Completion(
        request_id=request.request_id, token_ids=np.zeros(0, np.int32), behavior_logprobs=np.zeros(0, np.float32),
        versions=(), finish_reason=reason, error=error,
    )  # fmt: skip


def _tensor(raw: RawTensor, parameter: Tensor) -> Tensor:
    data = np.frombuffer(memoryview(raw.data), dtype=np.uint8)
    flat = torch.frombuffer(data if data.flags.writeable else data.copy(), dtype=parameter.dtype)
    return flat.reshape(parameter.shape)
