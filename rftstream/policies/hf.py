"""Any Hugging Face causal language model as a policy: batched sampling with a cache, one decoding step at a time.

Requests join while others are being decoded, and siblings share the computation of their prompt. Weights are exchanged
in place between two steps; the cache of what was computed before is kept. Chance is a function of (seed, position), so
that a request which goes on elsewhere has the same; keys and values of the tokens that it brings are computed anew, in
one pass, so its logprobs may differ in the last bits.

torch and transformers are imported by what uses them: the settings are asked for where no model is loaded.

Shapes: U prompts, L their tokens, B rows of the batch, V vocabulary.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from rftstream.clock import Clock
from rftstream.contracts.versions import VersionName
from rftstream.errors import PolicyError
from rftstream.models.folder import loading
from rftstream.models.rendering import Renderer
from rftstream.models.spec import ModelSpec
from rftstream.policies.base import Completion, SampleRequest, without_tokens
from rftstream.policies.served import check_tensors
from rftstream.weights.adapters import merged_tensors
from rftstream.weights.snapshot import DTYPES, RawTensor

if TYPE_CHECKING:
    from torch import Tensor

    from rftstream.policies.batch import DecodingBatch
    from rftstream.policies.prompts import Block, TokenIds


class HfPolicy:
    loads_model = True

    @dataclass(frozen=True, kw_only=True)
    class Config:
        batch_size: Annotated[int, Meta(ge=1)] = 256
        """Requests sampled at once; more wait."""
        prefill_tokens: Annotated[int, Meta(ge=1)] = 2048
        """Prompt tokens, padding included, computed in one step (a longer prompt goes alone); twice as many are kept
        for siblings that come later."""
        in_flight: Literal["keep", "recompute", "finish"] = "keep"
        """What becomes of running requests when new weights come. keep: they go on, with the keys and values that the
        old weights computed. recompute: they go on, with keys and values computed anew, which costs a pass over their
        tokens; the recorded logprobs are then those of the stamped weights alone. finish: they are finished with the
        old weights first, and what is new waits for them."""

    def __init__(self, config: Config, *, model: ModelSpec, renderer: Renderer, clock: Clock) -> None:
        import torch
        from transformers import AutoModelForCausalLM, logging

        from rftstream.policies import attention
        from rftstream.policies.prompts import PromptStore

        self._config, self._spec, self._renderer = config, model, renderer
        torch.set_num_threads(model.threads)
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        loader: Any = AutoModelForCausalLM
        with loading(model):
            self._model = loader.from_pretrained(
                model.folder,
                dtype=getattr(torch, model.dtype),
                attn_implementation=attention.register(),
                use_safetensors=True,
            )
        self._model.to(model.device)
        self._model.eval()
        self._device = torch.device(model.device)
        self._parameters = dict(self._model.named_parameters())
        self._expected = {
            key: (DTYPES[str(one.dtype).removeprefix("torch.")], tuple(one.shape))
            for key, one in self._parameters.items()
        }
        self._stop_ids = np.asarray(sorted(renderer.stop_token_ids), dtype=np.int64)
        self._versions: list[VersionName] = []
        self._next: tuple[Mapping[str, RawTensor], VersionName] | None = None
        """Waits until what runs has finished."""
        self._waiting: deque[SampleRequest] = deque()
        self._refused: list[Completion] = []
        self._prompts = PromptStore(2 * config.prefill_tokens)
        self._batch: DecodingBatch | None = None
        self._missed = 0
        """Tokens that requests which wait could have had, in the places that were free."""

    @property
    def version(self) -> VersionName | None:
        """With `finish`: of what is submitted from now on."""
        if self._next is not None:
            return self._next[1]
        return self._versions[-1] if self._versions else None

    @property
    def slots(self) -> int:
        return self._config.batch_size

    @property
    def num_active(self) -> int:
        active = self._batch.num_alive if self._batch is not None else 0
        return active + len(self._waiting) + len(self._refused)

    def load(self, tensors: Mapping[str, RawTensor], name: VersionName) -> None:
        where = f"weights {name.trainer_epoch}/{name.version} of {self._spec.name}"
        waits = self._config.in_flight == "finish" and self._left() is not None
        if waits:  # and the bytes may change meanwhile
            tensors = {key: replace(one, data=bytes(one.data)) for key, one in tensors.items()}
        if self._spec.lora is None:
            check_tensors(tensors, self._expected, where=where)
        else:  # all that is not adapted stays as it was loaded
            tensors = merged_tensors(self._spec, tensors, where=where)
        if waits:
            self._next = (tensors, name)
        else:
            self._take_over(tensors, name)

    def _take_over(self, tensors: Mapping[str, RawTensor], name: VersionName) -> None:
        import torch

        with torch.no_grad():
            for key in tensors:
                parameter = self._parameters[key]
                if parameter.numel():
                    parameter.copy_(_tensor(tensors[key], parameter))
            self._versions.append(name)
            self._next = None
            self._prompts.clear()
            if self._config.in_flight == "recompute" and (batch := self._left()) is not None:
                batch.renew(self._compute(chunk).states for chunk in self._chunks(batch.contexts()))

    def submit(self, request: SampleRequest) -> None:
        context = self._renderer.context
        room = request.max_tokens if context is None else min(request.max_tokens, context - len(request.token_ids))
        if not request.token_ids or not all(0 <= one < self._model.config.vocab_size for one in request.token_ids):
            self._refused.append(without_tokens(request, "error", "the prompt is empty or has ids out of range"))
        elif room <= 0:
            self._refused.append(without_tokens(request, "length", None))
        else:
            self._waiting.append(request)

    def so_far(self, request_id: str) -> Completion | None:
        return None if self._batch is None else self._batch.so_far(request_id, self._versions)

    def abort(self, request_id: str) -> None:
        self._waiting = deque(one for one in self._waiting if one.request_id != request_id)
        self._refused = [one for one in self._refused if one.request_id != request_id]
        if self._batch is not None:
            self._batch.forget(request_id)

    def step(self) -> list[Completion]:
        import torch

        with torch.inference_mode():
            return self._step()

    def _step(self) -> list[Completion]:
        done, self._refused = self._refused, []
        if self._versions:
            self._go_on()
            if self._next is not None and self._batch is None:
                self._take_over(*self._next)
            if self._next is None:
                self._let_in()
            if self._batch is not None:
                done.extend(self._sample(self._batch))
        return done

    def idle_s(self) -> float:
        return 0.0 if self._refused or (self._versions and self.num_active) else math.inf

    def close(self) -> None:
        self._batch, self._model, self._parameters = None, None, {}
        self._waiting.clear()
        self._prompts.clear()

    # ------------------------------------------------------------------------------------------ who joins

    def _let_in(self) -> None:
        """Requests whose prompts are known join at once. Others wait until computing their prompts, which costs about
        a step whatever their number, costs the batch less than their waiting has."""
        from rftstream.policies.batch import DecodingBatch

        batch = self._batch
        num_rows = batch.num_rows if batch is not None else 0
        free = self._config.batch_size - num_rows
        if not (self._waiting and free):
            return
        self._missed += min(len(self._waiting), free)
        by_block: dict[Block, tuple[list[SampleRequest], list[int]]] = {}
        for request, block, number in self._choose(free, self._missed >= num_rows):
            requests, which = by_block.setdefault(block, ([], []))
            requests.append(request)
            which.append(number)
        if by_block and batch is None:
            batch = self._batch = DecodingBatch(self._renderer, self._stop_ids, self._device, self._config.batch_size)
        for block, (requests, which) in by_block.items():
            assert batch is not None
            batch.join(requests, block, np.asarray(which))

    def _choose(self, free: int, may_compute: bool) -> list[tuple[SampleRequest, Block, int]]:
        """The first that wait, as many as have a place and a prompt that is known or, if that may be, computed now;
        with the block of each, and the number of its prompt there."""
        chosen: list[SampleRequest] = []
        places: dict[TokenIds, tuple[Block, int]] = {}
        new: dict[TokenIds, None] = {}
        longest = 0
        while self._waiting and len(chosen) < free:
            prompt = self._waiting[0].token_ids
            if (place := self._prompts.place(prompt)) is not None:
                places[prompt] = place
            elif prompt not in new:
                longest = max(longest, len(prompt))
                if not may_compute or (new and longest * (len(new) + 1) > self._config.prefill_tokens):
                    break
                new[prompt] = None
            chosen.append(self._waiting.popleft())
        if new:
            block = self._compute(tuple(new))
            self._prompts.add(block)
            places |= {prompt: (block, number) for number, prompt in enumerate(new)}
            self._missed = 0
        return [(request, *places[request.token_ids]) for request in chosen]

    # ------------------------------------------------------------------------------------------ the model

    def _compute(self, prompts: tuple[TokenIds, ...]) -> Block:
        """Padded on the left."""
        import torch
        from transformers import DynamicCache

        from rftstream.policies.prompts import Block

        longest = max(len(one) for one in prompts)
        starts_U1 = torch.tensor([[longest - len(one)] for one in prompts], device=self._device)
        token_ids_UL = np.zeros((len(prompts), longest), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            token_ids_UL[row, longest - len(prompt) :] = prompt
        columns_1L = torch.arange(longest, device=self._device)[None]
        cache: Any = DynamicCache()
        logits_UV = self._forward(
            {
                "input_ids": torch.from_numpy(token_ids_UL).to(self._device),
                "position_ids": (columns_1L - starts_U1).clamp(min=0),
                "attention_mask": columns_1L >= starts_U1,
                "past_key_values": cache,
            }
        )
        states = [(layer.keys, layer.values) for layer in cache.layers]
        return Block(prompts=prompts, states=states, logits_UV=logits_UV)

    def _chunks(self, rows: Sequence[TokenIds]) -> Iterator[tuple[TokenIds, ...]]:
        """In order, so many at a time as `prefill_tokens` allows."""
        chunk: list[TokenIds] = []
        for row in rows:
            if chunk and max(len(row), *map(len, chunk)) * (len(chunk) + 1) > self._config.prefill_tokens:
                yield tuple(chunk)
                chunk = []
            chunk.append(row)
        yield tuple(chunk)

    def _forward(self, inputs: Mapping[str, Any]) -> Tensor:
        """Logits of the next token, [B, V]; the cache grows by the given tokens."""
        try:
            output = self._model(**inputs, use_cache=True, logits_to_keep=1)
        except RuntimeError as error:  # out of memory, for one
            shape = tuple(inputs["input_ids"].shape)
            raise PolicyError(f"policy hf: the model failed at {shape} tokens: {error}") from error
        return output.logits[:, -1]  # type: ignore[no-any-return]

    def _go_on(self) -> None:
        """Logits of the next token of all that are active: in the step that samples it, so by the weights of then."""
        if (batch := self._left()) is not None:
            batch.logits_BV = self._forward(batch.inputs())

    def _sample(self, batch: DecodingBatch) -> list[Completion]:
        """One token of each row."""
        finished = batch.sample(len(self._versions) - 1)
        done = [batch.completion(row, reason, self._versions) for row, reason in finished]
        self._left()
        return done

    def _left(self) -> DecodingBatch | None:
        """The batch without the rows that are done."""
        if self._batch is not None:
            self._batch.leave()
            if not self._batch.num_rows:
                self._batch = None
                self._versions = self._versions[-1:]
        return self._batch


def _tensor(raw: RawTensor, parameter: Tensor) -> Tensor:
    import torch

    data = np.frombuffer(memoryview(raw.data), dtype=np.uint8)
    flat = torch.frombuffer(data if data.flags.writeable else data.copy(), dtype=parameter.dtype)
    return flat.reshape(parameter.shape)
