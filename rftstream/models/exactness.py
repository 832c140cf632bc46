"""Finds by trial which ways to compute a model are exact. The truth is transformers' eager attention, one row at a
time.

Our own attention is not the only one that may change a model: for some models transformers' `sdpa` and its caches
differ from `eager` as well. The trial uses a small copy of the model (`models.tiny_copy`) with random weights, on rows
longer than its windows. A second trial uses the model's own weights on short rows; docs/decisions/0020 says why.

Shapes: T tokens of a row, U rows, L tokens of the longest row, V vocabulary, or the outputs of another head.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rftstream.errors import ConfigError, PolicyError
from rftstream.models.folders.folder import loading
from rftstream.models.folders.outlines import outline_of
from rftstream.models.folders.tiny_copy import VOCABULARY, tiny_config
from rftstream.models.spec import ModelSpec
from rftstream.models.vision.seeing import model_class

log = logging.getLogger(__name__)

NEAR = 1e-3
"""Largest difference of logits that counts as rounding, in standard deviations of the logits. float32 rounds by 1e-5;
computing another model differs by 0.01 and more."""
ROUNDED_NEAR = 1.0
"""The same limit for 16-bit weights, whose rounding adds up over the layers of a large model: 30 layers in bfloat16
differ by up to 0.6, another model by 3.5 and more (SmolLM2-135M)."""
LENGTHS = (40, 3, 17, 9)
"""Tokens of the rows on which a copy is tried: some longer than its windows, some shorter."""
SHORT_LENGTHS = (11, 3, 7)
"""Tokens of the rows on which a model is tried with its own weights."""
SPREAD = 0.2
"""Standard deviation of a copy's weights. With transformers' own 0.02, attention would hardly matter."""
FAILURES = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError),
    *(NameError, RuntimeError, TypeError, ValueError),
)
"""Errors that a model's code raises if the model cannot be built, or cannot be called in some way."""
EAGER, SDPA = "eager", "sdpa"

PathT = TypeVar("PathT")
Pairs = Iterable[tuple[Tensor, Tensor]]
"""Pairs of logits: computed in some way, and the truth."""


class Probe:
    """Rows and a model's true logits for them. `of_copy` and `of_model` make it."""

    def __init__(self, model: Callable[[str], Any], lengths: Sequence[int], vocabulary: int, device: Any) -> None:
        """`model`: returns the model with the attention of this name. The model that it returned before is not used
        afterwards."""
        self.model = model
        random = torch.Generator().manual_seed(len(lengths))
        self.rows = [torch.randint(vocabulary, (length,), generator=random).to(device) for length in lengths]
        for number, row_T in enumerate(self.rows[1:]):  # some begin alike, at several depths, for trees
            same = len(row_T) * number // (number + 1)
            row_T[:same] = self.rows[0][:same]
        with torch.no_grad():
            self.true = [logits(model(EAGER), input_ids=row_T[None])[0] for row_T in self.rows]

    def holds(self, attention: str, compute: Callable[[Any, Probe], Pairs]) -> bool:
        """Return whether the model gives its true logits with this attention, computed by `compute`. A failure counts
        as a difference."""
        try:
            with torch.no_grad():
                return all(is_near(found, true) for found, true in compute(self.model(attention), self))
        except (*FAILURES, PolicyError) as error:
            log.debug("%s: %s: %s", attention, type(error).__name__, error)
            return False

    @torch.no_grad()
    def is_causal(self) -> bool:
        """Return whether earlier logits stay the same when later tokens are changed or removed."""
        row_T, true_TV = self.rows[0], self.true[0]
        place = len(row_T) - 2
        changed_T = row_T.clone()
        changed_T[place] = row_T[place] - 1 if row_T[place] else 1
        model = self.model(EAGER)
        for other_T, end in ((changed_T, place), (row_T[:place], place), (row_T[: place // 2], place // 2)):
            if not is_near(logits(model, input_ids=other_T[None])[0, :end], true_TV[:end]):
                return False
        return True


def logits(model: Any, **inputs: Any) -> Tensor:
    """Return the model's output for the inputs, computed without a cache: its logits, or its states if it has no
    head."""
    output = model(**inputs, use_cache=False)
    found: Tensor = output.last_hidden_state if getattr(output, "logits", None) is None else output.logits
    return found


def is_near(found: Tensor, true: Tensor) -> bool:
    """Return whether logits are equal up to rounding."""
    if found.shape != true.shape:
        return False
    largest = (found.float() - true.float()).abs().max()
    near = NEAR if true.dtype in (torch.float32, torch.float64) else ROUNDED_NEAR
    return bool(largest <= near * true.float().std())  # False for NaN


def padded(model: Any, probe: Probe) -> Iterator[tuple[Tensor, Tensor]]:
    """Compute the rows together, padded on the right."""
    token_ids_UL = nn.utils.rnn.pad_sequence(probe.rows, batch_first=True)
    for found_LV, true_TV in zip(logits(model, input_ids=token_ids_UL), probe.true, strict=True):
        yield found_LV[: len(true_TV)], true_TV


def alone(model: Any, probe: Probe) -> Iterator[tuple[Tensor, Tensor]]:
    """Compute each row by itself."""
    for row_T, true_TV in zip(probe.rows, probe.true, strict=True):
        yield logits(model, input_ids=row_T[None])[0], true_TV


def of_head(model: Any, probe: Probe) -> Iterator[tuple[Tensor, Tensor]]:
    """Compute the logits with the head's matrix alone, from the states of the model without its head."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or model.base_model is model:
        raise TypeError("the model has no head that is one matrix")
    for row_T, true_TV in zip(probe.rows, probe.true, strict=True):
        yield head(logits(model.base_model, input_ids=row_T[None]))[0], true_TV


def of_copy(kind: Any, config: Any) -> Probe | None:
    """Return a probe of the small copy of a model of this class; None if such a copy cannot be made."""
    made: dict[str, Any] = {}

    def model(attention: str) -> Any:
        if attention not in made:
            with torch.random.fork_rng([]):
                torch.manual_seed(0)
                made[attention] = kind._from_config(copy.deepcopy(tiny), attn_implementation=attention).eval().float()
                if attention == EAGER:
                    _draw(made[attention])
                else:
                    made[attention].load_state_dict(made[EAGER].state_dict())
        return made[attention]

    try:
        tiny = tiny_config(config)
        return Probe(model, LENGTHS, VOCABULARY, "cpu")
    except FAILURES as error:
        log.info("%s: cannot be made small: %s: %s", kind.__name__, type(error).__name__, error)
        return None


def once_per_kind(find: Callable[[Any, Any, Probe], PathT]) -> Callable[[Any, Any], PathT | None]:
    """Return `find` as a cached function of a model's class and config, which tries each small copy once in a process.
    The function returns None if there is no small copy, and raises ConfigError if the model is no decoder."""
    found: dict[tuple[Any, str], PathT | None] = {}

    def path(kind: Any, config: Any) -> PathT | None:
        key = kind, config.to_json_string(use_diff=False)
        if key not in found:
            probe = of_copy(kind, config)
            found[key] = None if probe is None else find(kind, config, probe)
        return found[key]

    return path


def of_model(model: Any, lengths: Sequence[int] = SHORT_LENGTHS) -> Probe | None:
    """Return a probe of a model with its own weights; None if the model's attention cannot be switched to eager.
    ConfigError if eager attention fails as well."""
    before = model.config._attn_implementation
    may_exchange = model._can_set_attn_implementation()
    if not may_exchange and before != EAGER:
        return None

    def with_attention(attention: str) -> Any:
        if may_exchange:
            model.set_attn_implementation(attention)
        return model

    try:
        return Probe(with_attention, lengths, model.config.get_text_config().vocab_size, model.device)
    except FAILURES as error:
        raise ConfigError(
            f"model.path: {model.config.model_type} does not compute a text by its tokens alone: "
            f"{type(error).__name__}: {error}; use a causal language model"
        ) from error
    finally:
        with_attention(before)


def outline(spec: ModelSpec) -> Any:
    """Return a model without weights, as it is loaded from its folder. ConfigError if transformers cannot load it."""
    with loading(spec):
        return outline_of(model_class(spec.folder), spec.folder)


def check_model(model: Any) -> None:
    """Raise ConfigError if a model, which may have no weights, is no decoder."""
    if (probe := of_copy(type(model), model.config)) is not None:
        check_causal(probe, model.config)


def whole(model: Any) -> Any:
    """Return the model itself: the default `part`."""
    return model


def takes_other_attention(kind: Any) -> bool:
    """Return whether transformers says that models of this class work with any registered attention with the interface
    of `sdpa`. Then the arguments beside queries, keys and values are known."""
    return bool(kind._supports_sdpa) and bool(kind._can_set_attn_implementation())


def check_causal(probe: Probe, config: Any) -> None:
    """Raise ConfigError if the model's logits depend on later tokens."""
    if not probe.is_causal():
        raise ConfigError(
            f"model.path: {config.model_type} sees what comes after a token, expected a decoder, which sees what comes "
            "before it alone; use a causal language model"
        )


def _draw(model: Any) -> None:
    """Draw random weights large enough that attention prefers some tokens to others, so that differences show."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, SPREAD)
            else:  # scales, biases, sinks: stay near their initial values
                parameter.add_(torch.randn_like(parameter) * SPREAD)
