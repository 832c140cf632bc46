"""Model families whose completions the optional package `renderers` parses. Nothing else imports that package.

A family is recognised by what its chat template says, not by the name of a folder.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

import numpy as np

from rftstream.contracts.assistant import AssistantMessage
from rftstream.models.calls.call_blocks import Tools, find_blocks
from rftstream.models.calls.call_reading import EXPECTED, WrittenCall, checked_arguments
from rftstream.models.calls.tool_calls import PROMPT_END, ends_in_thought, tool_calls
from rftstream.models.chat_template import THINK
from rftstream.models.tokenizer import Tokenizer

log = logging.getLogger(__name__)

HARMONY = "gpt-oss"
FAMILIES: Mapping[str, tuple[str, ...]] = {
    HARMONY: ("<|channel|>", "<|message|>", "<|call|>"),
    "inkling": ("<|content_invoke_tool_json|>", "<|message_model|>"),
    "gemma4": ("<|tool_call>", "<|turn>"),
    "deepseek-v4": ("｜DSML｜", "parameter"),
    "hy3": ("tool_sep", "arg_key", "hy_Assistant"),
    "kimi-k2.5": ("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>", "<|media_begin|>"),
    "kimi-k2": ("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"),
    "deepseek-r1": ("<｜tool▁calls▁begin｜>", "```json", "<think>"),
    "deepseek-v3": ("<｜tool▁calls▁begin｜>", "```json"),
    "glm-4.5": ("<arg_key>", "<arg_value>", "<|observation|>"),
    "laguna-xs.2": ("<arg_key>", "<arg_value>", "<assistant>"),
    "minimax-m2": ("<minimax:tool_call>", "<invoke name="),
    "qwen3.5": ("<tool_call>", "<function=", "<parameter="),
    "prime-qwen3": ("<tool_call>", "<function=", "<parameter="),
    "qwen3": ("<tool_call>", "<tool_response>", "</think>"),
}
"""Name of a family in the package -> texts that its templates contain. The first family that matches and whose tokens
exist is taken. The package finds where reasoning ends and where the calls are; `call_blocks` reads the calls, if it
knows their form."""
_ALSO = {
    "glm-4.5": "glm-5 glm-5.1 glm-5.3",
    "prime-qwen3": "nemotron-3 nemotron-3-ultra nemotron-3.5",
    "qwen3": "qwen3-vl",
    "qwen3.5": "qwen3.6 qwen3.8",
    "laguna-xs.2": "laguna-m.1 laguna-s-2.1 laguna-xs-2.1",
}
SAME: Mapping[str, str] = {other: family for family, others in _ALSO.items() for other in others.split()}
"""Name of another family in the package -> the family above whose completions have the same form. Families without
marks around calls (llama-3) are left to `tool_calls`."""

ERRORS = {
    "invalid_json": "The arguments of the tool call are not valid JSON",
    "unclosed_block": "The tool call was cut off before its end",
    "missing_name": "The tool call has no name",
    "malformed_structure": "The tool call does not have the form that the tools ask for",
}
"""The package's name of a fault in a call -> the message for the model."""


def families_of(template: str) -> list[str]:
    """Return the names of the families that this template may belong to."""
    return [name for name, signs in FAMILIES.items() if all(sign in template for sign in signs)]


@dataclass(frozen=True, slots=True)
class FamilyParser:
    """Parses completions of one family. `open_parser` makes it; a renderer calls `parse`."""

    name: str
    _renderer: Any
    _tokenizer: Tokenizer

    def parse(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        *,
        text: str,
        tools: Sequence[Mapping[str, Any]],
        finish_reason: str,
        turn: int,
        on_lines: bool | None = None,
    ) -> AssistantMessage | None:
        """Return the completion split into its parts; None if the package fails. `on_lines` is the same as in
        `parse_text`."""
        if ends_in_thought(self._tokenizer.full_text(prompt[-PROMPT_END:])):
            prompt = self._tokenizer.encode(f"{THINK}\n")  # not every prompt has the header that is looked for
        try:
            found = self._renderer.parse_response(
                list(completion), tools=[dict(tool) for tool in tools] or None, prompt_ids=list(prompt)
            )
            calls = list(self._calls(found.tool_calls, completion, Tools.of(tools, on_lines)))
        except Exception as error:  # a completion that cannot be parsed must not end the rollout
            log.debug("renderers cannot parse a completion of %s: %r", self.name, error)
            return None
        if calls and not tools:
            return None
        return AssistantMessage(
            content=found.content,
            reasoning=found.reasoning_content or "",
            tool_calls=tool_calls(calls, turn),
            finish_reason=finish_reason,
            text=text,
        )

    def _calls(self, found: Sequence[Any], completion: Sequence[int], tools: Tools) -> Iterator[WrittenCall]:
        """Yield the calls. The text of each single call is read again, since the package strips white space."""
        for span, group in groupby(found, lambda call: call.token_span):
            calls = list(group)
            written = None if span is None else self._tokenizer.full_text(completion[span[0] : span[1]])
            again = None if written is None else find_blocks(written, False, tools)
            read = again[1] if again is not None and len(again[1]) == len(calls) else [None] * len(calls)
            for call, mine in zip(calls, read, strict=True):
                yield mine if mine is not None and mine.error is None else _attempt(call, written or call.raw)


def _attempt(found: Any, written: str) -> WrittenCall:
    said = ERRORS.get(str(found.status))
    error = f"{said}; {EXPECTED}." if said else checked_arguments(found.arguments)
    arguments = found.arguments if error is None else None
    return WrittenCall(
        text=written, name=str(found.name or ""), arguments=arguments, error=error, id=str(found.id or "")
    )


def open_parser(template: str, tokenizer: Tokenizer) -> FamilyParser | None:
    """Return the parser for models with this template; None if its family is not known, the package is missing, or the
    tokenizer lacks a token of the family."""
    names = families_of(template)
    if not names or importlib.util.find_spec("renderers") is None:
        return None
    from renderers import config_from_name, create_renderer

    adapter = _Adapter(tokenizer)
    for name in names:
        try:
            made = _Harmony(adapter) if name == HARMONY else create_renderer(adapter, config_from_name(name))
            return FamilyParser(name, made, tokenizer)
        except Exception as error:  # the package asserts that a token exists
            level = logging.WARNING if isinstance(error, ImportError) else logging.DEBUG
            log.log(level, "the package renderers cannot parse for a template like %s: %r", name, error)
    return None


class _Adapter:
    """A tokenizer with the methods that `renderers` calls."""

    name_or_path = ""
    unk_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = {text: token for token, text in tokenizer.added.items()}
        self.eos_token_id = None

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        return list(self._tokenizer.encode(text))

    def decode(self, token_ids: Any, *_: Any, skip_special_tokens: bool = False, **__: Any) -> str:
        ids = np.asarray(token_ids, dtype=np.int64).tolist()
        return self._tokenizer.decode(ids) if skip_special_tokens else self._tokenizer.full_text(ids)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        return self._ids.get(tokens) if isinstance(tokens, str) else [self._ids.get(token) for token in tokens]


class _Harmony:
    """The parser of gpt-oss without its renderer, because the renderer would download a vocabulary."""

    NAMES: ClassVar = ("return", "call", "start", "end", "channel", "message", "constrain")

    def __init__(self, adapter: _Adapter) -> None:
        self._adapter = adapter
        self._ids = {f"{name}_id": adapter.convert_tokens_to_ids(f"<|{name}|>") for name in self.NAMES}
        if None in self._ids.values():
            raise KeyError(f"tokens of {HARMONY}")

    def parse_response(self, token_ids: list[int], *, tools: Any, prompt_ids: list[int]) -> Any:
        from renderers.parsing import parse_gpt_oss

        start = self._ids["start_id"]
        head = prompt_ids[len(prompt_ids) - 1 - prompt_ids[::-1].index(start) :] if start in prompt_ids else [start]
        found = parse_gpt_oss(self._adapter, [*head, *token_ids], **self._ids)
        for call in found.tool_calls:
            call.token_span = tuple(max(0, place - len(head)) for place in call.token_span)
        return found
