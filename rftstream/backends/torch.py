"""One process, one device: float32 masters and AdamW over any Hugging Face causal language model.

Shapes: B rows of a micro-batch, T padded tokens, N unmasked tokens of it, D width, V vocabulary.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor, nn

from rftstream import modelfolder
from rftstream.algorithms.base import Algorithm, Denominators, MicroBatch, TrainingRow
from rftstream.backends.base import OptimizerSettings, Update, UpdatePlan
from rftstream.core.logprobs import chunked_token_logprobs
from rftstream.core.packing import pack_groups, pack_microbatches, pad_rows, split_minibatches
from rftstream.errors import ConfigError
from rftstream.models import ModelSpec
from rftstream.weights.snapshot import DTYPES, RawTensor, write_snapshot

SERVED = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
PROVIDED = frozenset({"entropy", "proximal_logprobs", "reference_logprobs", "reference_rewards", "whole_groups"})
"""What an algorithm may need of this backend."""


@dataclass(frozen=True, slots=True)
class _Inputs:
    """A micro-batch on the device. `rows_N` and `places_N` say where the unmasked tokens are."""

    token_ids_BT: Tensor
    rows_N: Tensor
    places_N: Tensor
    temperatures_N: Tensor
    rows: MicroBatch


@dataclass(frozen=True, slots=True)
class _Network:
    """A model as two functions, so that the head can be taken in chunks."""

    hidden: Callable[[Tensor], Tensor]
    """Ids [B, T] -> [B, T, D]."""
    project: Callable[[Tensor], Tensor]
    """[n, D] -> logits [n, V]."""


class TorchBackend:
    @dataclass(frozen=True, kw_only=True)
    class Config:
        gradient_checkpointing: bool = False
        """Computes activations again in the backward pass: a third slower, and memory of one layer instead of all."""
        autocast: Literal["auto", "none", "bfloat16"] = "auto"
        """Matrix products in bfloat16; auto: on GPUs only. Masters, optimizer and logprobs are float32 always."""
        max_logits_bytes: Annotated[int, Meta(ge=1 << 16)] = 256 << 20
        """Logits held at once, in float32."""

    def __init__(self, config: Config, *, model: ModelSpec, optimizer: OptimizerSettings, seed: int) -> None:
        self._config, self._spec, self._settings, self._seed = config, model, optimizer, seed
        self._device = torch.device(model.device)
        self._model: Any = None
        self._parameters: dict[str, nn.Parameter] = {}
        self._reference: _Network | None = None
        """Version 0, loaded when it is first needed."""

    def open(self) -> None:
        torch.set_num_threads(self._spec.threads)
        torch.manual_seed(self._seed)
        self._model = _load_model(self._spec, self._device)
        if self._config.gradient_checkpointing:
            _switch_dropout_off(self._model)
            self._model.train()
            self._model.gradient_checkpointing_enable({"use_reentrant": False})
        self._parameters = dict(self._model.named_parameters())  # tied ones once
        _check_names(self._spec, self._parameters)
        self._optimizer = _build_optimizer(self._parameters.values(), self._settings)
        self._policy = _split_head(self._model)

    def update(self, rows: Sequence[TrainingRow], algorithm: Algorithm, plan: UpdatePlan) -> Update:
        if missing := algorithm.needs - PROVIDED:
            raise ConfigError(f"backend torch: the algorithm needs {', '.join(sorted(missing))}, which it can't give")
        minibatches = self._minibatches(rows, plan, whole_groups="whole_groups" in algorithm.needs)
        num_steps = len(minibatches) * plan.updates_per_batch
        before = self._copy_state() if num_steps > 1 else None
        proximal = None
        if num_steps > 1 or "proximal_logprobs" in algorithm.needs:
            proximal = [[self._proximal(inputs, self._policy) for inputs in inputs_of] for inputs_of, _ in minibatches]
        reference = None
        if "reference_logprobs" in algorithm.needs:
            network = self._open_reference()
            reference = [[self._proximal(inputs, network) for inputs in inputs_of] for inputs_of, _ in minibatches]
        sums, norms = _Sums(), []
        for step in range(num_steps):
            index = step % len(minibatches)
            inputs_of, denominators = minibatches[index]
            old = proximal[index] if proximal is not None else [None] * len(inputs_of)
            base = reference[index] if reference is not None else [None] * len(inputs_of)
            loss = self._accumulate(inputs_of, old, base, algorithm, denominators, sums)
            norm = float(torch.nn.utils.get_total_norm(self._gradients()))
            if not (math.isfinite(loss) and math.isfinite(norm)):
                self._optimizer.zero_grad()
                if before is not None:
                    self._put_back(before)
                return Update(metrics={"loss": loss, "grad_norm": norm, "num_tokens": sums.num_tokens}, skipped=True)
            self._apply(norm, plan)
            norms.append(norm)
        metrics = {"num_tokens": sums.num_tokens, "optimizer_steps": float(num_steps), "lr": plan.lr}
        if norms:
            metrics |= {"grad_norm": sum(norms) / len(norms), **sums.finish(algorithm)}
        return Update(metrics=metrics)

    def logprobs(self, rows: Sequence[TrainingRow], tokens_per_microbatch: int = 16384) -> list[np.ndarray]:
        """The policy's logprobs of each row's unmasked tokens now, float32 [T] with 0 elsewhere."""
        return self._logprobs(rows, tokens_per_microbatch, self._policy)

    def reference_logprobs(self, rows: Sequence[TrainingRow], tokens_per_microbatch: int) -> list[np.ndarray]:
        """Likewise of version 0."""
        return self._logprobs(rows, tokens_per_microbatch, self._open_reference())

    def _logprobs(self, rows: Sequence[TrainingRow], tokens_per_microbatch: int, network: _Network) -> list[np.ndarray]:
        result = [np.zeros(len(row.token_ids), dtype=np.float32) for row in rows]
        for numbers in pack_microbatches(np.asarray([len(row.token_ids) for row in rows]), tokens_per_microbatch):
            logprobs_BT = self._proximal(self._inputs([rows[number] for number in numbers]), network)
            for place, number in enumerate(numbers):
                result[number][:] = logprobs_BT[place, : len(result[number])].cpu().numpy()
        return result

    def served_tensors(self) -> Mapping[str, RawTensor]:
        return _Served(self._parameters, SERVED[self._spec.dtype])

    def save(self, folder: Path) -> None:
        _write(folder / "masters.safetensors", {name: _raw(p.detach()) for name, p in self._parameters.items()})
        _write(folder / "optimizer.safetensors", {name: _raw(value) for name, value in self._optimizer_state()})
        random = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self._device)
        _write(folder / "random.safetensors", {name: _raw(state) for name, state in random.items()})
        about = {"backend": "torch", "model": self._spec.name, "torch": torch.__version__}
        (folder / "backend.json").write_text(json.dumps(about) + "\n", encoding="utf-8")

    def load(self, folder: Path) -> None:
        from safetensors.torch import load_file

        masters = load_file(folder / "masters.safetensors", device=str(self._device))
        if masters.keys() != self._parameters.keys():
            raise ConfigError(f"{folder}: the checkpoint is of another model than {self._spec.name}; start a new run")
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(masters[name])
        moments = load_file(folder / "optimizer.safetensors", device=str(self._device))
        self._optimizer.state.clear()
        for key, value in moments.items():
            kind, _, name = key.partition("/")
            self._optimizer.state[self._parameters[name]][kind] = value
        random = load_file(folder / "random.safetensors")
        torch.set_rng_state(random["cpu"])
        if self._device.type == "cuda" and "cuda" in random:
            torch.cuda.set_rng_state(random["cuda"], self._device)

    def export(self, folder: Path) -> None:
        modelfolder.copy_companions(self._spec, folder)
        _write(folder / "model.safetensors", dict(self.served_tensors()), {"format": "pt"})

    def close(self) -> None:
        self._model, self._reference, self._parameters = None, None, {}

    # ------------------------------------------------------------------------------------------ one batch

    def _minibatches(
        self, rows: Sequence[TrainingRow], plan: UpdatePlan, *, whole_groups: bool
    ) -> list[tuple[list[_Inputs], Denominators]]:
        """Per optimizer step its micro-batches and denominators; rows and steps without unmasked tokens left out."""
        rows = [row for row in rows if row.loss_mask.any()]
        result = []
        for numbers in split_minibatches(np.asarray([row.group for row in rows], dtype=np.int64), plan.minibatches):
            chosen = [rows[number] for number in numbers]
            lengths_N = np.asarray([len(row.token_ids) for row in chosen])
            if whole_groups:
                groups_N = np.asarray([row.group for row in chosen])
                packed = pack_groups(lengths_N, groups_N, plan.tokens_per_microbatch)
            else:
                packed = pack_microbatches(lengths_N, plan.tokens_per_microbatch)
            inputs_of = [self._inputs([chosen[number] for number in part]) for part in packed]
            result.append((inputs_of, Denominators.of(chosen)))
        return result

    def _inputs(self, rows: Sequence[TrainingRow]) -> _Inputs:
        def on_device(arrays: list[np.ndarray], dtype: Any) -> Tensor:
            return torch.from_numpy(pad_rows([np.asarray(array, dtype) for array in arrays])).to(self._device)

        mask_BT = on_device([row.loss_mask for row in rows], np.float32)
        mask_BT[:, 0] = 0
        rows_N, places_N = mask_BT.nonzero(as_tuple=True)
        temperatures_B = torch.tensor([row.temperature for row in rows], device=self._device)
        return _Inputs(
            token_ids_BT=on_device([row.token_ids for row in rows], np.int64),
            rows_N=rows_N, places_N=places_N, temperatures_N=temperatures_B[rows_N],
            rows=MicroBatch(
                loss_mask_BT=mask_BT,
                behavior_logprobs_BT=on_device([row.behavior_logprobs for row in rows], np.float32),
                advantages_BT=on_device([row.advantages for row in rows], np.float32),
                additions={name: on_device([row.additions[name] for row in rows], np.float32)
                           for name in rows[0].additions if all(name in row.additions for row in rows)},
            ),
        )  # fmt: skip

    def _forward(self, inputs: _Inputs, network: _Network, *, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies [B, T], 0 at masked positions. The head sees only what predicts unmasked tokens.

        Padding is on the right, where causal attention never looks, so no attention mask is needed."""
        with self._autocast():
            hidden_BTD = network.hidden(inputs.token_ids_BT[:, :-1])  # the last token predicts nothing
            logprobs_N, entropy_N = chunked_token_logprobs(
                hidden_BTD[inputs.rows_N, inputs.places_N - 1], network.project,
                inputs.token_ids_BT[inputs.rows_N, inputs.places_N], inputs.temperatures_N,
                chunk_tokens=max(self._config.max_logits_bytes // (4 * self._model.config.vocab_size), 1),
                entropy_gradient=entropy_gradient,
            )  # fmt: skip
        places = (inputs.rows_N, inputs.places_N)
        zeros_BT = torch.zeros(inputs.token_ids_BT.shape, device=self._device)
        return zeros_BT.index_put(places, logprobs_N), zeros_BT.index_put(places, entropy_N)

    @torch.no_grad()
    def _proximal(self, inputs: _Inputs, network: _Network) -> Tensor:
        return self._forward(inputs, network, entropy_gradient=False)[0]

    def _accumulate(
        self, inputs_of: Sequence[_Inputs], old: Sequence[Tensor | None], base: Sequence[Tensor | None],
        algorithm: Algorithm, denominators: Denominators, sums: _Sums,
    ) -> float:  # fmt: skip
        """Gradients of one optimizer step, added up over its micro-batches; the loss."""
        total = torch.zeros((), device=self._device)
        for inputs, proximal_BT, reference_BT in zip(inputs_of, old, base, strict=True):
            policy_BT, entropy_BT = self._forward(inputs, self._policy, entropy_gradient="entropy" in algorithm.needs)
            loss, metrics = algorithm.loss(
                policy_BT, inputs.rows, denominators, entropy_BT=entropy_BT, proximal_logprobs_BT=proximal_BT,
                reference_logprobs_BT=reference_BT,
            )  # fmt: skip
            loss.backward()
            total += loss.detach()
            sums.add({"entropy": entropy_BT.detach().sum(), **metrics})
        sums.close_step(denominators.num_tokens, loss_value := float(total))
        return loss_value

    def _open_reference(self) -> _Network:
        """Always from the model folder, never from a checkpoint, so that a restart changes nothing."""
        if self._reference is None:
            with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
                self._reference = _split_head(_load_model(self._spec, self._device).requires_grad_(False))
        return self._reference

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]

    def _apply(self, norm: float, plan: UpdatePlan) -> None:
        if plan.max_grad_norm and norm > plan.max_grad_norm:
            torch._foreach_mul_(self._gradients(), plan.max_grad_norm / norm)
        for group in self._optimizer.param_groups:
            group["lr"] = plan.lr
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        wished = self._config.autocast
        if wished == "bfloat16" or (wished == "auto" and self._device.type == "cuda"):
            return torch.autocast(self._device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()

    # ------------------------------------------------------------------------------------------ state

    def _optimizer_state(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._parameters.items():
            for kind, value in self._optimizer.state.get(parameter, {}).items():
                yield f"{kind}/{name}", value

    def _copy_state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return (
            {name: parameter.detach().clone() for name, parameter in self._parameters.items()},
            {key: value.clone() for key, value in self._optimizer_state()},
        )

    @torch.no_grad()
    def _put_back(self, state: tuple[dict[str, Tensor], dict[str, Tensor]]) -> None:
        masters, moments = state
        for name, parameter in self._parameters.items():
            parameter.copy_(masters[name])
        self._optimizer.state.clear()
        for key, value in moments.items():
            kind, _, name = key.partition("/")
            self._optimizer.state[self._parameters[name]][kind] = value


class _Sums:
    """Metrics of a batch, added up over micro-batches and optimizer steps."""

    def __init__(self) -> None:
        self.num_tokens = 0.0
        self._values: dict[str, Any] = {}
        self._losses: list[float] = []

    def add(self, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            known = self._values.get(name)
            if known is None:
                self._values[name] = value
            else:
                self._values[name] = max(known, value) if name.startswith("max_") else known + value

    def close_step(self, num_tokens: float, loss: float) -> None:
        self.num_tokens += num_tokens
        self._losses.append(loss)

    def finish(self, algorithm: Algorithm) -> dict[str, float]:
        tokens = max(self.num_tokens, 1.0)
        values = {name: float(value) for name, value in self._values.items()}
        means = {name: value if name.startswith("max_") else value / tokens for name, value in values.items()}
        return {"loss": sum(self._losses) / max(len(self._losses), 1), **algorithm.summarise(means)}


# ---------------------------------------------------------------------------------------------- the model


def _load_model(spec: ModelSpec, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM, logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model: Any = AutoModelForCausalLM.from_pretrained(spec.folder, dtype=torch.float32, attn_implementation="sdpa")
    model.to(device)
    model.eval()  # samplers have no dropout, so the ratio must not see any either
    return model


def _split_head(model: Any) -> _Network:
    """Hidden states and head.

    Models that do more to their logits than one matrix product (soft caps, scales) are found by trying, and run whole.
    """
    base, head = model.base_model, model.get_output_embeddings()

    def hidden(token_ids_BT: Tensor) -> Tensor:
        return base(input_ids=token_ids_BT, use_cache=False).last_hidden_state  # type: ignore[no-any-return]

    def whole(token_ids_BT: Tensor) -> Tensor:
        return model(input_ids=token_ids_BT, use_cache=False).logits  # type: ignore[no-any-return]

    with torch.no_grad():
        probe_BT = torch.arange(4, device=model.device)[None] % model.config.vocab_size
        plain = head is not None and base is not model
        if plain and torch.allclose(head(hidden(probe_BT)), whole(probe_BT), rtol=1e-3, atol=1e-3):
            return _Network(hidden, head)
    return _Network(whole, lambda logits: logits)


def _build_optimizer(parameters: Any, settings: OptimizerSettings) -> torch.optim.AdamW:
    """Matrices decay, vectors (norms, biases) don't. Fused: one pass over memory."""
    parameters = list(parameters)
    groups = [
        {"params": [one for one in parameters if one.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [one for one in parameters if one.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=0.0, betas=settings.betas, eps=settings.eps, fused=True
    )


def _check_names(spec: ModelSpec, parameters: Mapping[str, Any]) -> None:
    """Weights travel under the checkpoint's names, so these must be the model's own."""
    from safetensors import safe_open

    known: set[str] = set()
    for file in spec.folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            known.update(opened.keys())
    if known and (odd := sorted(parameters.keys() - known)):
        raise ConfigError(
            f"model {spec.name}: transformers calls a weight {odd[0]!r}, which its checkpoint does not; models "
            "that are converted while loading can't be trained by the torch backend yet"
        )


def _switch_dropout_off(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0


class _Served(Mapping[str, RawTensor]):
    """Converts each tensor when it is asked for, so that no more than one is there twice."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], dtype: torch.dtype) -> None:
        self._parameters, self._dtype = parameters, dtype

    def __getitem__(self, name: str) -> RawTensor:
        return _raw(self._parameters[name].detach().to(self._dtype, copy=True))

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def _raw(value: Tensor) -> RawTensor:
    """The tensor's bytes, without a copy where it lies contiguous in main memory."""
    plain = value.detach().cpu().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy().data
    return RawTensor(DTYPES[str(plain.dtype).removeprefix("torch.")], tuple(plain.shape), data)


def _write(path: Path, tensors: Mapping[str, RawTensor], metadata: Mapping[str, str] | None = None) -> None:
    with path.open("wb") as file:
        write_snapshot(file, tensors, metadata)
