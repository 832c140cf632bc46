"""The tokens that may come next if a completion must have a form: a JSON Schema, a regular expression, a grammar.

llguidance computes them from the tokens before. It refuses what it cannot hold to, where other libraries pass over it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rftstream.config.loader import sampling_for
from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import PolicySpec
from rftstream.config.sections import RunConfig
from rftstream.errors import ConfigError, PolicyError, pip_install, require_package
from rftstream.models.spec import ModelSpec
from rftstream.models.tokenizer import open_tokenizer
from rftstream.policies.base import Constraint, SampleRequest, form_of

if TYPE_CHECKING:
    import llguidance


def grammar_text(constraint: Constraint) -> str:
    """Return a constraint in llguidance's form. ConfigError, with the setting's name, if it is no valid one."""
    require_package(constraint.setting, "llguidance", advice=pip_install("llguidance"))
    import llguidance

    kind, value = constraint.kind, constraint.value
    if kind == "json_object":
        kind, value = "json", {"type": "object"}
    try:
        text = llguidance.grammar_from(kind, value if isinstance(value, str) else json.dumps(value))
        error = llguidance.LLMatcher.validate_grammar(text)
    except ValueError as found:
        error = str(found)
    if error and not error.startswith("WARNING:"):
        raise ConfigError(f"{constraint.setting}: {kind}: {error.strip()}")
    return str(text)


def checker_of(policy: str) -> Callable[[Constraint], object] | None:
    """Return the function that raises ConfigError for a constraint that a policy cannot hold to; None for a policy that
    constrains no tokens. What a server cannot hold to, it says itself."""
    spec = registry.find_spec(PolicySpec, policy)
    if not spec.constrains:
        return None
    return grammar_text if spec.takes_weights else lambda constraint: None


def check_forms(config: RunConfig) -> None:
    """Raise ConfigError for a form in the sampling settings that its policy cannot hold to."""
    explorer, evaluator = config.explorer.policy, config.evaluator.policy or config.explorer.policy
    places = [(f"tasksets.{name}.sampling", one.sampling, explorer) for name, one in config.tasksets.items()]
    places += [(f"evaluations.{name}.sampling", one.sampling, evaluator) for name, one in config.evaluations.items()]
    for place, differences, policy in places:
        setting = f"{place if 'grammar' in differences else 'sampling'}.grammar"
        constraint = form_of(sampling_for(config, differences, where=place), setting)
        if constraint is None:
            continue
        if (check := checker_of(policy)) is None:
            raise ConfigError(
                f"{setting}: the policy {policy!r} does not constrain tokens; use 'hf', 'vllm' or 'openai'"
            )
        check(constraint)


class Grammars:
    """Grammars over the tokens of a model. A policy makes it when the first request has a constraint, and begins a
    `AnswerForm` for each such request."""

    def __init__(self, spec: ModelSpec, stop_ids: Sequence[int], vocabulary: int) -> None:
        """`vocabulary`: number of logits. ConfigError if the tokenizer is of a kind that llguidance does not know."""
        if not stop_ids:
            raise ConfigError(f"model {spec.name}: no token ends a text, expected one with which a form can end")
        self._stop_ids, self._vocabulary = frozenset(stop_ids), vocabulary
        self._tokens = _open_tokens(spec, sorted(stop_ids), vocabulary)
        self._compiled = functools.lru_cache(256)(self._compile)

    def begin(self, constraint: Constraint, request: SampleRequest) -> AnswerForm:
        """Return the form of a request's completion after the tokens that are sampled already. ConfigError for an
        invalid constraint, PolicyError for tokens that break it."""
        matcher = self._compiled(constraint.kind, json.dumps(constraint.value), constraint.setting)
        form = AnswerForm(matcher.deep_copy(), self._stop_ids, self._vocabulary)
        for token_id in request.token_ids[len(request.token_ids) - request.num_sampled :]:
            form.accept(token_id)
        if form.error:
            raise PolicyError(f"{constraint.setting}: the tokens sampled so far break it: {form.error}")
        return form

    def _compile(self, kind: str, value: str, setting: str) -> llguidance.LLMatcher:
        import llguidance

        text = grammar_text(Constraint(kind=kind, value=json.loads(value), setting=setting))
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(self._tokens, text, log_level=0, limits=limits)
        if matcher.is_error():
            raise ConfigError(f"{setting}: {kind}: {matcher.get_error().strip()}")
        return matcher


class AnswerForm:
    """The state of a completion's form. For each token the policy asks for `forbidden`, and then tells what it sampled
    with `accept`."""

    def __init__(self, matcher: llguidance.LLMatcher, stop_ids: frozenset[int], vocabulary: int) -> None:
        self._matcher, self._stop_ids, self._vocabulary = matcher, stop_ids, vocabulary

    @property
    def error(self) -> str:
        """The reason why the form cannot be followed further; empty if it can."""
        return self._matcher.get_error().strip() if self._matcher.is_error() else ""

    def forbidden(self) -> np.ndarray:
        """Return which tokens cannot come next, bool [V]. A stop token can if the form is complete."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.asarray(np.unpackbits(bits, bitorder="little", count=self._vocabulary) == 0)

    def accept(self, token_id: int) -> None:
        """Go on with a token. After a stop token the form stays as it is."""
        if token_id not in self._stop_ids:
            self._matcher.consume_token(token_id)


def _open_tokens(spec: ModelSpec, stop_ids: Sequence[int], vocabulary: int) -> llguidance.LLTokenizer:
    import llguidance

    serialized = open_tokenizer(spec).serialized
    if serialized is None:
        raise ConfigError(f"model {spec.name}: has no tokenizer.json, which forms of answers need; use another model")
    text = serialized()
    data = json.loads(text)
    known: Any = text
    if data["model"]["type"] == "WordLevel" and (data["decoder"] or {}).get("type") == "Fuse":
        # of a made model: a character each
        known = llguidance.TokenizerWrapper(_Words(data, stop_ids[0], vocabulary))
    try:
        return llguidance.LLTokenizer(known, n_vocab=vocabulary, eos_token=list(stop_ids))
    except ValueError as error:
        raise ConfigError(f"model {spec.name}: llguidance does not read its tokenizer: {error}") from error


class _Words:
    """A tokenizer whose tokens are words that follow one another without spaces, as llguidance asks for it."""

    def __init__(self, data: Mapping[str, Any], stop_id: int, vocabulary: int) -> None:
        self._ids: dict[str, int] = data["model"]["vocab"]
        special = {token["id"]: token["content"] for token in data["added_tokens"] if token["special"]}
        texts = {index: text for text, index in self._ids.items()} | special
        self.eos_token_id, self.bos_token_id = stop_id, None
        self.special_token_ids = sorted(special)
        self.tokens = [texts.get(index, "").encode() for index in range(vocabulary)]

    def __call__(self, text: bytes) -> list[int]:
        return [self._ids[character] for character in text.decode() if character in self._ids]
