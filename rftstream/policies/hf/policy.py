"""Any Hugging Face causal language model as a policy: batched sampling with a cache, one decoding step at a time.

Requests join while others are being decoded, and siblings share the computation of their prompt. The new part of a
further turn is computed together with the next tokens of the others. Weights are replaced in place between two steps;
the cache of earlier tokens is kept. Random numbers are a function of (seed, position), so a request that resumes
elsewhere draws the same ones. Keys and values of its earlier tokens are computed again in one pass, so its logprobs may
differ in the last bits.

torch and transformers are imported only by functions that use them, since the settings are also read where no model is
loaded.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from rftstream.clock import Clock
from rftstream.contracts.token_values import ALLOWED, EXPERTS
from rftstream.contracts.versions import VersionName
from rftstream.errors import ImageError, WeightsError
from rftstream.models.rendering import Renderer
from rftstream.models.spec import ModelSpec
from rftstream.models.vision.image_inputs import ImageCache
from rftstream.policies.base import Completion, EngineLoad, SampleRequest, room_for, without_tokens
from rftstream.policies.colocated import SleepsByMoving
from rftstream.policies.hf.doubts import doubt_about
from rftstream.policies.served import check_tensors
from rftstream.weights.adapters import merged_tensors
from rftstream.weights.snapshot import RawTensor

if TYPE_CHECKING:
    import torch

    from rftstream.models.vision.seeing import ImageFeatures
    from rftstream.policies.hf.images import PromptImages
    from rftstream.policies.hf.prompts import Block, Features, TokenIds
    from rftstream.policies.hf.turns import KeptPrefix


WAIT_S = 0.05
"""Longest time in seconds that a step waits for an image if there is no other work."""


class HfPolicy(SleepsByMoving):
    """A policy on this machine's own processor or GPU. `HfModel` computes, and `DecodingBatch` holds the running
    requests.

    The worker makes it; the explorer loads a version, submits requests and calls `step` to sample a token for each.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        batch_size: Annotated[int, Meta(ge=1)] = 256
        """Requests sampled at once; more wait."""
        prefill_tokens: Annotated[int, Meta(ge=1)] = 2048
        """Prompt tokens, padding included, computed in one step (a longer prompt is computed alone). Twice as many are
        kept for later siblings. The same number limits the new tokens of further turns in one step."""
        turn_tokens: Annotated[int, Meta(ge=0)] = 16384
        """Largest number of tokens of ended turns whose keys and values are kept. If the next turn of such a rollout
        comes before new weights, only the new part of its prompt is computed, in the same pass as the next tokens of
        the others. A fork, which begins with at least half of its prompt as such a turn does, gets a copy of that."""
        in_flight: Literal["keep", "recompute", "finish"] = "keep"
        """Treatment of running requests when new weights come. keep: they continue with the keys and values that the
        old weights computed. recompute: they continue with recomputed keys and values, which costs a pass over their
        tokens; the recorded logprobs are then those of the stamped weights alone. finish: they finish with the old
        weights first, and new requests wait for them."""

    doubt_about = staticmethod(doubt_about)

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
        """`images`: the model's inputs for images in prompts; None if prompts show none. `records`: kinds of values
        beside the tokens of completions."""
        from rftstream.models.offload import DeviceState
        from rftstream.policies.hf.batch import DecodingBatch, batch_tensors
        from rftstream.policies.hf.cache import SlotCache
        from rftstream.policies.hf.images import PromptImages
        from rftstream.policies.hf.opening import open_model
        from rftstream.policies.hf.prompts import PromptStore
        from rftstream.policies.hf.turns import TurnStore
        from rftstream.policies.load_meter import LoadMeter
        from rftstream.policies.row_forms import RowForms

        self.slots = config.batch_size
        self._config, self._spec, self._renderer = config, model, renderer
        self._model = open_model(model, records_experts=EXPERTS in records)
        self._images = PromptImages(images, self._model.seeing)
        self._stop_ids = np.asarray(sorted(renderer.stop_token_ids), dtype=np.int64)
        self._versions: list[VersionName] = []
        self._next: tuple[Mapping[str, RawTensor], VersionName] | None = None
        """The next version, which waits until all running requests have finished."""
        self._waiting: deque[_WaitingRequest] = deque()
        self._arriving: list[tuple[SampleRequest, tuple[Future[Any], ...]]] = []
        """Requests whose images are being fetched."""
        self._refused: list[Completion] = []
        self._prompts = PromptStore(2 * config.prefill_tokens, config.batch_size)
        self._cache = SlotCache(config.batch_size, renderer.context, lambda: self._model.family)
        self._forms = RowForms(model, self._stop_ids.tolist(), self._model.vocabulary_size, self._model.device)
        self._batch = DecodingBatch(
            renderer,
            self._stop_ids,
            self._model.device,
            self._cache,
            forms=self._forms,
            records_sets=ALLOWED in records,
        )
        turn_tokens = config.turn_tokens if self._model.continues else 0
        is_divisible = self._model.is_divisible and EXPERTS not in records
        self._turns = TurnStore(turn_tokens, self._cache, self._model.extends, is_divisible=is_divisible)
        holders = (self._model, self._images, self._cache, self._prompts, self._turns)
        self._state = DeviceState(
            self._model.device,
            lambda: itertools.chain(batch_tensors(self._batch), *(holder.tensors() for holder in holders)),
            offload=False,
        )
        self._missed = 0
        """Number of tokens that waiting requests could have had by now in the free places."""
        self._meter = LoadMeter(self._cache, self._model.device, lambda: max(0, self.num_active - self.slots))
        self.engine_load: Callable[[], EngineLoad] = self._meter.load
        """Returns how busy the engine is."""

    @property
    def version(self) -> VersionName | None:
        """The version for new requests. With `in_flight = "finish"`, running ones may still use an older version."""
        if self._next is not None:
            return self._next[1]
        return self._versions[-1] if self._versions else None

    @property
    def num_active(self) -> int:
        """Number of requests that run, wait, or were refused and not returned yet."""
        return self._batch.num_alive + len(self._arriving) + len(self._waiting) + len(self._refused)

    def load(self, tensors: Mapping[str, RawTensor], name: VersionName) -> None:
        """Load a version as `in_flight` says. WeightsError unless the tensors are those of this model."""
        where = f"weights {name.trainer_epoch}/{name.version} of {self._spec.name}"
        waits = self._config.in_flight == "finish" and self._batch.num_alive > 0
        if waits:  # and the bytes may change meanwhile
            tensors = {key: replace(tensor, data=bytes(tensor.data)) for key, tensor in tensors.items()}
        if self._spec.lora is None:
            check_tensors(tensors, self._model.expected, where=where)
        else:  # weights without adapters stay as loaded
            tensors = merged_tensors(self._spec, tensors, where=where)
        if waits:
            self._next = (tensors, name)
        else:
            self._take_over(tensors, name)

    def _take_over(self, tensors: Mapping[str, RawTensor], name: VersionName) -> None:
        import torch

        self._model.load(tensors)
        self._versions.append(name)
        self._next = None
        self._prompts.clear()
        self._turns.clear()
        self._images.forget_features()
        if self._config.in_flight == "recompute":
            with torch.inference_mode():
                self._recompute()

    def _recompute(self) -> None:
        """Recompute keys and values of running requests. Requests whose images are gone end."""
        features: dict[int, ImageFeatures] = {}
        self._leave()
        for request in self._batch.requests:
            if (found := _features_of(self._images, self._refused, request)) is None:
                self._batch.forget(request.request_id)
            else:
                features |= found
        self._leave()
        if self._batch.num_rows and self._model.keeps_states:
            chunks = _chunks(self._batch.contexts(), self._config.prefill_tokens)
            self._batch.renew(self._model.compute(chunk, features).states for chunk in chunks)

    def submit(self, request: SampleRequest) -> None:
        """Put a request into the queue. Refused requests come back from the next `step`."""
        room = room_for(request, self._renderer.context)
        ids = request.token_ids
        if not ids or min(ids) < 0 or max(ids) >= self._model.vocabulary_size:
            self._refused.append(without_tokens(request, "error", "the prompt is empty or has ids out of range"))
        elif room <= 0:
            self._refused.append(without_tokens(request, "length", None))
        elif (error := self._forms.begin(request)) is not None:
            self._refused.append(without_tokens(request, "error", error))
        elif request.images:
            self._arriving.append((request, self._images.fetch(request)))
            self._take_arrived()
        else:
            self._waiting.append(_WaitingRequest(request, self._turns.find(request.token_ids)))

    def _take_arrived(self) -> None:
        """Put requests whose images have come into the queue. Those whose images cannot be shown are refused."""
        arriving, self._arriving = self._arriving, []
        for request, images in arriving:
            if not all(image.done() for image in images):
                self._arriving.append((request, images))
                continue
            try:
                for image in images:
                    image.result()
                request = replace(request, token_ids=self._images.admit(request))
                self._waiting.append(_WaitingRequest(request, self._turns.find(request.token_ids)))
            except (ImageError, WeightsError) as error:
                self._refused.append(without_tokens(request, "error", str(error)))

    def so_far(self, request_id: str) -> Completion | None:
        """Return the tokens sampled for a request; None if it waits, has finished, or is unknown."""
        return self._batch.so_far(request_id, self._versions)

    def abort(self, request_id: str) -> None:
        """Forget a request. Unknown ids are ignored."""
        self._arriving = [one for one in self._arriving if one[0].request_id != request_id]
        self._waiting = deque(waiting for waiting in self._waiting if waiting.request.request_id != request_id)
        self._refused = [completion for completion in self._refused if completion.request_id != request_id]
        self._forms.forget(request_id)
        self._batch.forget(request_id)

    def step(self) -> list[Completion]:
        """Let waiting requests join, sample a token for each row, and return those that finished."""
        import torch

        if self.is_asleep:
            return []
        with torch.inference_mode():
            return self._step()

    def _step(self) -> list[Completion]:
        if self._arriving:
            if not (self._refused or self._waiting or self._batch.num_alive):
                wait([image for _, images in self._arriving for image in images], WAIT_S, FIRST_COMPLETED)
            self._take_arrived()
        done, self._refused = self._refused, []
        if self._versions:
            self._leave()
            if self._next is not None and not self._batch.num_rows:
                self._take_over(*self._next)
            features = self._go_on_from_turns() if self._next is None else {}
            if self._batch.num_rows:  # in the step that samples the token, so with that step's weights
                with self._meter:
                    self._batch.logits_BV = self._next_logits(features)
            if self._next is None:
                self._let_in()
            if self._batch.num_rows:
                self._meter.num_tokens += self._batch.num_rows
                with self._meter:
                    done.extend(self._sample())
        return done

    def _next_logits(self, features: Features) -> torch.Tensor:
        """Compute the next tokens of all rows."""
        import torch

        token_ids_N, positions, rows = self._batch.next_tokens()
        if self._model.keeps_states:
            logits_BV = self._model.compute_new(token_ids_N, positions, rows, self._cache, features)
            if self._model.experts_NK is not None:
                self._batch.experts.took(self._model.experts_NK, rows)
            return logits_BV
        chunks = _chunks(self._batch.contexts(), self._config.prefill_tokens)
        blocks = [self._model.compute(chunk, features) for chunk in chunks]
        if experts := [row_LK for block in blocks for row_LK in block.experts]:
            counts_B = np.diff(rows.ends_B, prepend=0)
            new = [experts[row][-count:] for row, count in zip(rows.order_B, counts_B, strict=True)]
            self._batch.experts.took(np.concatenate(new), rows)
        return torch.cat([block.logits_UV for block in blocks])

    def idle_s(self) -> float:
        """Return 0 while there is work, else infinity."""
        return 0.0 if self._refused or self._arriving or (self._versions and self.num_active) else math.inf

    def close(self) -> None:
        """Drop all requests and the model."""
        import torch

        is_asleep = self._state.num_bytes_away > 0
        self._model.close()
        self._images.close()
        self._arriving.clear()
        self._waiting.clear()
        self._prompts.clear()
        self._turns.clear()
        for request in self._batch.requests:
            self._batch.forget(request.request_id)
        self._state.forget()
        if is_asleep:
            return  # the rest of the cache has no bytes
        with torch.inference_mode():  # as in `step`, where the cache was made
            self._batch.leave()

    # ------------------------------------------------------------------------------------------ who joins

    def _go_on_from_turns(self) -> Features:
        """Let requests join that continue from kept turns. Return the features of new images in their prompts.

        They do not wait like others, since the new part of their prompts needs no separate pass."""
        features: dict[int, ImageFeatures] = {}
        num_new = 0
        alike = Counter(() if self._turns.is_empty else (waiting.request.token_ids for waiting in self._waiting))
        for waiting in list(self._waiting):
            request, prompt = waiting.request, waiting.request.token_ids
            beginning = self._turns.find(prompt, num_alike=alike[prompt]) if alike else None
            if beginning is not None and not beginning.is_moved and self._prompts.place(prompt) is not None:
                beginning = None
            waiting.turn = beginning
            if beginning is None:
                continue
            new = len(prompt) - beginning.length
            is_too_much = num_new > 0 and num_new + new > self._config.prefill_tokens
            if is_too_much or self._batch.num_rows == self._config.batch_size:
                break
            num_new += new
            self._waiting.remove(waiting)
            own_3L = None
            if any(token < 0 for token in request.token_ids[-new:]):
                if (found := _features_of(self._images, self._refused, request)) is None:
                    continue
                features |= found
                own_3L = self._model.positions(request.token_ids, found)
            self._meter.asked(len(prompt), new)
            self._batch.go_on(request, self._turns.take(beginning), own_3L)
        return features

    def _let_in(self) -> None:
        """Let waiting requests join the batch. Requests whose prompts are already computed join at once.

        Others wait, since computing any number of prompts costs about one step. They join when their waiting has cost
        more than that step costs the batch."""
        num_rows = self._batch.num_rows
        free = self._config.batch_size - num_rows
        num_waiting = sum(waiting.turn is None for waiting in self._waiting)
        if not (num_waiting and free):
            return
        self._missed += min(num_waiting, free)
        by_block: dict[Block, tuple[list[SampleRequest], list[int]]] = {}
        for request, block, number in self._choose(free, self._missed >= num_rows):
            requests, which = by_block.setdefault(block, ([], []))
            requests.append(request)
            which.append(number)
        for block, (requests, which) in by_block.items():
            self._turns.make_room(len(requests))
            self._batch.join(requests, block, which)

    def _choose(self, free: int, may_compute: bool) -> list[tuple[SampleRequest, Block, int]]:
        """Take requests from the queue, in order, while there are places. Return each with the block of its prompt and
        the prompt's index in it. Requests that continue from turns are left in the queue.

        The choice ends at a prompt that is not computed yet. With `may_compute`, such prompts are computed, up to
        `prefill_tokens`."""
        chosen: list[SampleRequest] = []
        places: dict[TokenIds, tuple[Block, int]] = {}
        new: dict[TokenIds, None] = {}
        features: dict[int, ImageFeatures] = {}
        longest = 0
        for waiting in [waiting for waiting in self._waiting if waiting.turn is None]:
            request, prompt = waiting.request, waiting.request.token_ids
            if len(chosen) == free:
                break
            if (place := self._prompts.place(prompt)) is not None:
                places[prompt] = place
            elif prompt not in new:
                if not may_compute:
                    break
                if request.images:
                    if (found := _features_of(self._images, self._refused, request)) is None:
                        self._waiting.remove(waiting)
                        continue
                    features |= found
                longest = max(longest, len(prompt))
                if new and longest * (len(new) + 1) > self._config.prefill_tokens:
                    break
                new[prompt] = None
            self._waiting.remove(waiting)
            chosen.append(request)
        if new:
            block = self._model.compute(tuple(new), features)
            self._prompts.add(block)
            places |= {prompt: (block, number) for number, prompt in enumerate(new)}
            self._missed = 0
        self._meter.asked(sum(len(request.token_ids) for request in chosen), sum(map(len, new)))
        return [(request, *places[request.token_ids]) for request in chosen]

    # ------------------------------------------------------------------------------------------ one token

    def _sample(self) -> list[Completion]:
        """Sample a token for each row, and return the completions that finished."""
        finished = self._batch.sample(len(self._versions) - 1)
        done = [self._batch.completion(row, reason, self._versions) for row, reason in finished]
        for row, reason in finished:
            if reason != "error" and (turn := self._batch.turn(row)) is not None:
                self._turns.add(turn)
        self._leave()
        return done

    def _leave(self) -> None:
        """Drop the finished rows."""
        self._batch.leave()
        if not self._batch.num_rows:
            self._versions = self._versions[-1:]


def _features_of(images: PromptImages, refused: list[Completion], request: SampleRequest) -> Features | None:
    """Return the features of a request's images. If they cannot be had, add the request to the refused ones and return
    None."""
    try:
        return images.features([request.token_ids])
    except (ImageError, WeightsError) as error:
        refused.append(without_tokens(request, "error", str(error)))
        return None


@dataclass(slots=True, eq=False)
class _WaitingRequest:
    """A request that waits for a place."""

    request: SampleRequest
    turn: KeptPrefix | None
    """Beginning of its prompt that was computed before, if it goes on from that; else None."""


def _chunks(rows: Sequence[TokenIds], max_tokens: int) -> Iterator[tuple[TokenIds, ...]]:
    """Yield the rows in order, in chunks of at most `max_tokens` tokens, padding included. A longer row comes alone."""
    chunk: list[TokenIds] = []
    for row in rows:
        if chunk and max(len(row), *map(len, chunk)) * (len(chunk) + 1) > max_tokens:
            yield tuple(chunk)
            chunk = []
        chunk.append(row)
    yield tuple(chunk)
