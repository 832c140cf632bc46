"""Exact tokens across turns: the prompt of the next turn is the known tokens plus the tokens of the new text.

Sampled tokens are never tokenised again. The template renders the conversation with a mark in place of the assistant's
message. The text after the mark is what follows the turn: its end, the new messages, the next generation prompt. Only
that text is encoded and appended. Before that, these checks prove that nothing else would have changed:

1. `now` begins with the messages and tools of `before`, then one message of the assistant's.
2. The text before the mark is the text of the prompt that was sampled from. A template may differ only inside of turns
   of the assistant's, which stay as they were sampled: it may drop or add reasoning.
3. The text after the turn is the same whether the mark or the real message stands in it.
4. The first appended token begins where no piece of the tokenizer could reach over: behind a token at which texts are
   split, or, elsewhere, where encoding both sides together gives the same ids.

If a check fails, the `Continuation` has a reason and a new segment begins.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from rftstream.contracts.tasks import ChatMessage
from rftstream.errors import ConfigError
from rftstream.models.chat_template import END_THINK, THINK, ChatTemplate, split_thinking
from rftstream.models.tokenizer import Tokenizer

MARK = "<0marked-turn0>"
"""Text in place of the assistant's message. It has no white space at its ends, since templates strip it."""
NEXT_MARK = "<0marked-next0>"
"""Text in place of the message after it."""
KEPT_TEXTS = 256
"""Number of conversations whose rendered text is kept. If more rollouts are open, texts are rendered again."""
_EMPTY_THOUGHT = re.compile(rf"{THINK}\s*{END_THINK}\s*")
_ANY_THOUGHT = re.compile(rf"({THINK}.*?)?{END_THINK}\s*|{THINK}\s*\Z", re.DOTALL)
_WINDOWS = (16, 8, 4, 2, 1)
"""Numbers of known tokens that are encoded again with the new text, to see whether tokens would merge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The messages and tools that a prompt is rendered from."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, Any], ...] = ()


class BreakReason(StrEnum):
    """The reason why a turn begins a new segment and does not continue the one before."""

    rewritten = "rewritten"
    """The conversation is not the one before followed by an assistant's message."""
    tools_changed = "tools_changed"
    """Other tools are offered than before."""
    template_changes_history = "template_changes_history"
    """The template writes the earlier conversation differently than in the prompt, apart from reasoning."""
    turn_hidden = "turn_hidden"
    """The template does not show the assistant's message."""
    other_stop = "other_stop"
    """The template ends the turn with another stop token than the sampled one."""
    no_stop = "no_stop"
    """The turn was cut before its end, and the end that it would have had is unknown."""
    tail_varies = "tail_varies"
    """The text that the template writes after the turn depends on the content of the turn."""
    pieces_merge = "pieces_merge"
    """The tokenizer would merge known text and new text into one token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """How the next prompt continues the open segment: the tokens to append, or the reason why it cannot."""

    token_ids: tuple[int, ...] = ()
    """Ids to append to the tokens of the open segment. None of them was sampled."""
    break_reason: BreakReason | None = None
    """Reason why a new segment has to begin, rendered as a whole; None if `token_ids` continue this one."""


class _BreakError(Exception):
    """Carries the reason to the end of `Splicer.continue_prompt`. It never leaves the splicer."""

    def __init__(self, reason: BreakReason) -> None:
        self.reason = reason


class Splicer:
    """Continues prompts. A renderer makes it with its template and tokenizer, and calls `continue_prompt` from one
    thread."""

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        stop_token_ids: frozenset[int],
        *,
        encode: Callable[[str], Sequence[int]],
    ) -> None:
        self._template, self._tokenizer, self._encoded = template, tokenizer, encode
        self._kept: dict[tuple[int, ...], tuple[Conversation, str]] = {}
        """`id()` of messages and tools -> the conversation and its text. The conversation is kept so that these ids
        stay its own. The oldest entries come first."""
        self._control = tuple(tokenizer.special.values())
        self._stops = {token: text for token in stop_token_ids if (text := tokenizer.full_text([token]))}

    def continue_prompt(
        self, known: Sequence[int], num_said: int, before: Conversation, now: Conversation
    ) -> Continuation:
        """Return the ids to append to `known`; `Renderer.continue_prompt` explains the arguments."""
        if (reason := difference(before, now)) is not None:
            return Continuation(break_reason=reason)
        stop = known[-1] if num_said and known[-1] in self._stops else None
        try:
            prompt, whole = self._written(before), self._written(now)
            if MARK in whole or NEXT_MARK in whole:  # a message contains the text of a mark
                raise _BreakError(BreakReason.turn_hidden)
            turn = _Turn(self._template, prompt, before, now, is_cut=stop is None)
            turn.prove_history(said=self._tokenizer.full_text(known[len(known) - num_said :]))
            tail, begins_with_stop = self._tail(turn, stop)
            if not whole.endswith(tail):
                raise _BreakError(BreakReason.tail_varies)
            return Continuation(token_ids=self._encode(known, tail, stop, begins_with_stop))
        except _BreakError as found:
            return Continuation(break_reason=found.reason)

    def _written(self, conversation: Conversation) -> str:
        """Return the conversation as the template writes it. The newest texts are kept, since the conversation of one
        turn is the prompt of the next."""
        key = (*map(id, conversation.messages), 0, *map(id, conversation.tools))
        kept = self._kept.get(key)
        if kept is None:
            kept = (conversation, self._template.render(conversation.messages, conversation.tools))
            self._kept[key] = kept
            if len(self._kept) > KEPT_TEXTS:
                self._kept.pop(next(iter(self._kept)))
        return kept[1]

    def _tail(self, turn: _Turn, stop: int | None) -> tuple[str, bool]:
        """Return the text to append, and whether it begins with a stop token. `stop` is the sampled one."""
        after = turn.after
        if stop is not None and after.startswith(self._stops[stop]):
            return after[len(self._stops[stop]) :], False
        end = after[: turn.length_of_end(self._stops.values())]
        places = {place: token for token, text in self._stops.items() if (place := end.find(text)) >= 0}
        if not places:
            if end.lstrip().startswith(self._control):
                raise _BreakError(BreakReason.other_stop)
            if turn.shows_calls:
                raise _BreakError(BreakReason.no_stop)
            return after, False  # the template writes no end of turn
        first = min(places)
        if stop is None:
            if end[:first].strip():
                raise _BreakError(BreakReason.no_stop)
            return after[first:], True
        if places[first] != stop:
            raise _BreakError(BreakReason.other_stop)
        return after[first + len(self._stops[stop]) :], False

    def _encode(self, known: Sequence[int], tail: str, stop: int | None, begins_with_stop: bool) -> tuple[int, ...]:
        """Return the ids of the tail after the known tokens."""
        if not tail:
            return ()
        encode = self._encoded
        if stop is not None:  # encoded in its place, for tokenizers that treat the beginning of a text differently
            ids = encode(self._stops[stop] + tail)
            if ids[0] == stop:
                return tuple(ids[1:])
        ids = encode(tail)
        if begins_with_stop and ids[0] in self._tokenizer.added:
            return tuple(ids)
        for size in _WINDOWS:
            last = list(known[-size:])
            if size <= len(known) and list(encode(text := self._tokenizer.full_text(last))) == last:
                if list(encode(text + tail)) == [*last, *ids]:
                    return tuple(ids)
                break
        raise _BreakError(BreakReason.pieces_merge)


class _Turn:
    """The text that a template writes around the assistant's last turn. Raises _BreakError if that text cannot be
    determined."""

    def __init__(
        self, template: ChatTemplate, prompt: str, before: Conversation, now: Conversation, *, is_cut: bool
    ) -> None:
        self._template, self._prompt, self._before, self._now = template, prompt, before, now
        self._is_cut = is_cut
        said = now.messages[len(before.messages)]
        self._marked = _marked(said, with_calls=not is_cut and template.call_form is not None)
        self.text = self._write(now.messages[len(before.messages) + 1 :])
        if MARK not in self.text:
            raise _BreakError(BreakReason.turn_hidden)
        self.shows_calls = self.text.rfind(MARK) != self.text.find(MARK)
        self.after = self.text[self.text.rfind(MARK) + len(MARK) :]
        """Text that the template writes after the turn."""

    def prove_history(self, said: str) -> None:
        """Check that the template writes the earlier conversation as it did in the prompt. `said`: the text of the turn
        with its special tokens."""
        before, now = self._before, self._now
        head = self.text[: self.text.find(MARK)]
        if head == self._prompt:
            return
        try:
            history = self._template.render(before.messages, before.tools, add_generation_prompt=False)
            if _is_kept(self._prompt, history, head, said):
                return
            bare = tuple(map(_without_reasoning, before.messages))
            texts = [
                self._template.render(bare, before.tools),
                self._template.render(bare, before.tools, add_generation_prompt=False),
                self._template.render((*bare, self._marked, *now.messages[len(bare) + 1 :]), now.tools),
            ]
        except ConfigError:
            raise _BreakError(BreakReason.template_changes_history) from None
        prompt, history, text = (_EMPTY_THOUGHT.sub("", text) for text in texts)
        if MARK not in text or not _is_kept(prompt, history, text[: text.find(MARK)], said):
            raise _BreakError(BreakReason.template_changes_history)

    def length_of_end(self, stops: Collection[str]) -> int:
        """Return the length of the part of `after` that belongs to the end of the turn: up to the content of the next
        message, if there is one. If that content appears earlier, after a stop token, the part ends there."""
        later = self._now.messages[len(self._before.messages) + 1 :]
        if not later:
            return len(self.after)
        content = later[0].content.strip()
        place = self.after.find(content) if content else -1
        if any(0 <= self.after.find(stop) <= place - len(stop) for stop in stops):
            return place
        text = self._write((replace(later[0], content=NEXT_MARK), *later[1:]))
        after = text[text.rfind(MARK) + len(MARK) :]
        length = after.find(NEXT_MARK)
        if length < 0 or after[:length] != self.after[:length]:
            raise _BreakError(BreakReason.tail_varies)
        return length

    def _write(self, later: Sequence[ChatMessage]) -> str:
        try:
            return self._template.render((*self._before.messages, self._marked, *later), self._now.tools)
        except ConfigError:  # the template accepts the conversation, or the caller would know by now
            raise _BreakError(BreakReason.no_stop if self._is_cut else BreakReason.turn_hidden) from None


def difference(before: Conversation, now: Conversation) -> BreakReason | None:
    """Return why `now` is not `before` followed by an assistant's turn and further messages; None if it is."""
    count = len(before.messages)
    if len(now.tools) != len(before.tools) or not all(map(_is_same, before.tools, now.tools)):
        return BreakReason.tools_changed
    if len(now.messages) <= count or now.messages[count].role != "assistant":
        return BreakReason.rewritten
    if not all(map(_is_same, before.messages, now.messages)):
        return BreakReason.rewritten
    return None


def _is_same(one: Any, other: Any) -> bool:
    """Return whether templates write both values in the same way. True and 1 are equal, but are written differently."""
    if one is other:
        return True
    if one != other:
        return False
    if isinstance(one, ChatMessage):
        return not one.tool_calls or _canonical(one.tool_calls) == _canonical(other.tool_calls)
    return _canonical(one) == _canonical(other)


def _canonical(value: Any) -> str:
    return json.dumps(value, default=repr)


def _marked(said: ChatMessage, *, with_calls: bool) -> ChatMessage:
    """Return the message with MARK in place of everything that the model wrote."""
    if not with_calls:
        return replace(said, content=MARK, tool_calls=())
    calls = tuple(
        {**call, "function": {**call["function"], "arguments": {MARK: MARK}}} if "function" in call else call
        for call in said.tool_calls
    )
    return replace(said, content=MARK, tool_calls=calls)


def _without_reasoning(message: ChatMessage) -> ChatMessage:
    if message.role != "assistant" or THINK not in message.content:
        return message
    return replace(message, content=split_thinking(message.content)[1])


def _is_kept(prompt: str, history: str, head: str, said: str) -> bool:
    """Return whether `head`, the text before the turn, is the text of the prompt.

    `history` is the prompt without its generation prompt. The head of the turn may differ from the generation prompt.
    The generation prompt is longer if it opens the reasoning. The head is longer if it has text that the policy samples
    itself: reasoning, the name of a channel, the beginning of a call. If there is no generation prompt, that text has
    to be in what was sampled, since it could belong to something else."""
    if not (prompt.startswith(history) and head.startswith(history)):
        return False
    asked, written = prompt[len(history) :], head[len(history) :]
    if asked.startswith(written):
        return True
    if written.startswith(asked) and (asked.strip() or _letters(written) in _letters(said)):
        return True
    return _ANY_THOUGHT.sub("", asked).rstrip() == _ANY_THOUGHT.sub("", written).rstrip()


def _letters(text: str) -> str:
    """Return the text without white space and without JSON's punctuation, which models write in different ways."""
    return re.sub(r"""[\s"'\[\]{}]+""", "", text)
