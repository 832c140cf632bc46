"""The ranges of sampling settings in a run file. They are narrower than the ranges that the log can hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Meta

from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import PolicySpec
from rftstream.contracts.tasks import FORMS, Sampling
from rftstream.contracts.token_values import ALLOWED
from rftstream.errors import ConfigError

if TYPE_CHECKING:
    from rftstream.config.sections import RunConfig


def check_sampling(sampling: Sampling, *, where: str, given: Mapping[str, Any] | None = None) -> None:
    """Raise ConfigError for a value out of its range. The error names only keys that were `given`; by default all
    were."""
    if given is not None and "min_tokens" not in given and sampling.min_tokens > sampling.max_tokens >= 1:
        raise ConfigError(
            f"{where}.max_tokens: got {sampling.max_tokens}, expected at least min_tokens = {sampling.min_tokens}, as "
            "[sampling] has it; set min_tokens here as well"
        )
    for key, (bounds, expected) in SAMPLING_RANGES.items():
        fine = _is_within(getattr(sampling, key), bounds)
        if not fine or (key == "min_tokens" and sampling.min_tokens > sampling.max_tokens):
            raise ConfigError(f"{where}.{key}: got {getattr(sampling, key)}, expected {expected}")
    _check_form(sampling.grammar, where=f"{where}.grammar")


_FORM_VALUES = {
    "json": "a JSON Schema, as a table or a text",
    "json_object": "true",
    "regex": "a regular expression",
    "choice": "a list of texts",
    "grammar": "a grammar in GBNF",
}


def _check_form(grammar: Mapping[str, Any], *, where: str) -> None:
    if len(grammar) > 1:
        raise ConfigError(f"{where}: got {' and '.join(grammar)}, expected one of them")
    for kind, value in grammar.items():
        if kind not in FORMS:
            raise ConfigError(f"{where}.{kind}: unknown kind of form; {registry.suggest(kind, list(FORMS))}")
        if not isinstance(value, FORMS[kind]) or not value:
            raise ConfigError(f"{where}.{kind}: got {value!r}, expected {_FORM_VALUES[kind]}")


SAMPLING_RANGES = {
    "temperature": (Meta(ge=0), "at least 0"),
    "top_p": (Meta(gt=0, le=1), "in (0, 1]"),
    "top_k": (Meta(ge=0), "at least 0 (0 is off)"),
    "min_p": (Meta(ge=0, lt=1), "in [0, 1)"),
    "repetition_penalty": (Meta(gt=0), "above 0"),
    "max_tokens": (Meta(ge=1), "at least 1"),
    "min_tokens": (Meta(ge=0), "between 0 and max_tokens"),
}
"""Setting of [sampling] -> its bounds, as numbers and in words. Settings without bounds are left out."""


TRUNCATIONS = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""Setting of [sampling] that leaves unlikely tokens out -> the value that turns it off."""
CUTS = TRUNCATIONS | {"min_tokens": 0}
"""The same, of all settings that leave tokens out."""
MOST_LISTED = 1000
"""Largest `top_k` up to which a policy with `lists_sets` records what could be sampled."""
PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
"""Setting of [sampling] that changes the probabilities of tokens -> the value that turns it off."""


def inexact_settings(sampling: Sampling, config: RunConfig) -> list[str]:
    """Return the settings under which the recorded logprobs belong to another distribution than the trainer's
    (docs/algorithms.md)."""
    policy = registry.find_spec(PolicySpec, config.explorer.policy)
    off = CUTS | PENALTIES
    if ALLOWED in config.trainer.replayed.intersection(policy.records):
        is_listed = not policy.lists_sets or 0 < sampling.top_k <= MOST_LISTED
        off = PENALTIES if is_listed else TRUNCATIONS | PENALTIES
    changed = [name for name, value in off.items() if getattr(sampling, name) != value]
    return [*changed, "temperature"] if sampling.temperature == 0 else changed


def _is_within(value: float, bounds: Meta) -> bool:
    return (
        (bounds.ge is None or value >= bounds.ge)
        and (bounds.gt is None or value > bounds.gt)
        and (bounds.le is None or value <= bounds.le)
        and (bounds.lt is None or value < bounds.lt)
    )
