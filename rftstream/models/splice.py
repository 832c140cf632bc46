"""Exact tokens over turns: the prompt of the next turn is the tokens that are there, and what is new.

What was sampled is never tokenised again. A template writes the conversation with a mark in place of what the
assistant said. The text after the mark is what follows the turn: its end, the new messages, the next generation
prompt. That text alone is encoded and appended. Before that, it is proved that nothing else would have changed:

1. `now` begins with the messages and tools of `before`, then one message of the assistant's.
2. The text before the mark is the text of the prompt that was sampled from. A template may differ only inside of turns
   of the assistant's, which stay as they were sampled: it may drop or add reasoning.
3. The text after the turn is the same whether the mark or the real message stands in it.
4. The first appended token begins where no piece of the tokenizer could reach over: behind a token at which texts are
   split, or, elsewhere, where encoding both sides together gives the same ids.

Where a proof fails, the `Continuation` has a reason and a new segment begins.
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
"""Stands for what the assistant said. It has no white space at its ends, since templates trim."""
NEXT_MARK = "<0marked-next0>"
"""Stands for what the message after it says."""
KEPT_TEXTS = 256
"""Number of conversations whose text is kept. With more open rollouts texts are written again."""
_EMPTY_THOUGHT = re.compile(rf"{THINK}\s*{END_THINK}\s*")
_ANY_THOUGHT = re.compile(rf"({THINK}.*?)?{END_THINK}\s*|{THINK}\s*\Z", re.DOTALL)
_WINDOWS = (16, 8, 4, 2, 1)
"""How many known tokens are encoded again with the new text, to see whether pieces would merge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The messages and tools that a prompt is rendered from."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, Any], ...] = ()


class BreakReason(StrEnum):
    """Why a turn begins a new segment instead of continuing the one before."""

    rewritten = "rewritten"
    """The conversation does not begin with the one before, followed by a message of the assistant's."""
    tools_changed = "tools_changed"
    """Other tools are offered than before."""
    template_changes_history = "template_changes_history"
    """The template writes what was there before the turn in another way than in the prompt; reasoning aside."""
    turn_hidden = "turn_hidden"
    """The template does not show what the assistant said."""
    other_stop = "other_stop"
    """The template ends the turn with another stop token than the one that was sampled."""
    no_stop = "no_stop"
    """The turn was cut before its end, and how it would have ended cannot be told."""
    tail_varies = "tail_varies"
    """The text that the template writes after the turn depends on the content of the turn."""
    pieces_merge = "pieces_merge"
    """Pieces of the tokenizer would reach over from what is there to what is new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """How the next prompt continues what is there: the tokens to append, or why there are none."""

    token_ids: tuple[int, ...] = ()
    """Ids to append to the tokens of the open segment. None of them was sampled."""
    break_reason: BreakReason | None = None
    """Why a new segment has to begin, rendered as a whole; None if `token_ids` continue this one."""


class _BreakError(Exception):
    """Carries the reason to the end of `Splicer.continue_prompt`; never leaves it."""

    def __init__(self, reason: BreakReason) -> None:
        self.reason = reason


class Splicer:
    """Continues prompts. A renderer makes it with its template and tokenizer and calls `continue_prompt`, from one
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
        """Ids of messages and tools -> these, so that the ids stay theirs, and the text. The oldest come first."""
        self._control = tuple(tokenizer.special.values())
        self._stops = {token: text for token in stop_token_ids if (text := tokenizer.full_text([token]))}

    def continue_prompt(
        self, known: Sequence[int], num_said: int, before: Conversation, now: Conversation
    ) -> Continuation:
        """Return what to append to `known`; `Renderer.continue_prompt` says what the arguments are."""
        if (reason := difference(before, now)) is not None:
            return Continuation(break_reason=reason)
        stop = known[-1] if num_said and known[-1] in self._stops else None
        try:
            prompt, whole = self._written(before), self._written(now)
            if MARK in whole or NEXT_MARK in whole:  # somebody says what must be said by nobody
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
        """Return the conversation as the template writes it. The newest texts are kept, since the whole conversation of
        one turn is the prompt of the next."""
        key = (*map(id, conversation.messages), 0, *map(id, conversation.tools))
        kept = self._kept.get(key)
        if kept is None:
            kept = (conversation, self._template.render(conversation.messages, conversation.tools))
            self._kept[key] = kept
            if len(self._kept) > KEPT_TEXTS:
                self._kept.pop(next(iter(self._kept)))
        return kept[1]

    def _tail(self, turn: _Turn, stop: int | None) -> tuple[str, bool]:
        """Return the text to append, and whether it begins with a stop token. `stop` is the one that was sampled."""
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
            return after, False  # the template writes no end of a turn
        first = min(places)
        if stop is None:
            if end[:first].strip():
                raise _BreakError(BreakReason.no_stop)
            return after[first:], True
        if places[first] != stop:
            raise _BreakError(BreakReason.other_stop)
        return after[first + len(self._stops[stop]) :], False

    def _encode(self, known: Sequence[int], tail: str, stop: int | None, begins_with_stop: bool) -> tuple[int, ...]:
        """Return the ids of the tail behind what is known."""
        if not tail:
            return ()
        encode = self._encoded
        if stop is not None:  # in its place, so that a tokenizer that treats the beginning of a text apart does not
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
    told."""

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
        """Check that the template writes what was there before the turn as it did in the prompt. `said` is the text of
        the turn with its special tokens."""
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
        """Return how long the part of `after` is that belongs to the end of the turn: it ends where the content of the
        next message begins, if there is one. Where that content could begin earlier, but behind a stop token, the
        length is up to there."""
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
        except ConfigError:  # it takes the conversation as it is, or the caller would know by now
            raise _BreakError(BreakReason.no_stop if self._is_cut else BreakReason.turn_hidden) from None


def difference(before: Conversation, now: Conversation) -> BreakReason | None:
    """Return why `now` is not `before` with a turn of the assistant's and more; None if it is."""
    count = len(before.messages)
    if len(now.tools) != len(before.tools) or not all(map(_is_same, before.tools, now.tools)):
        return BreakReason.tools_changed
    if len(now.messages) <= count or now.messages[count].role != "assistant":
        return BreakReason.rewritten
    if not all(map(_is_same, before.messages, now.messages)):
        return BreakReason.rewritten
    return None


def _is_same(one: Any, other: Any) -> bool:
    """Return whether templates write both in the same way. True and 1 are equal, and are written otherwise."""
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
    """Return the message with MARK in place of all that the model wrote."""
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
    """Return whether `head`, the text before the turn, is that of the prompt. `history` is the prompt without its
    generation prompt.

    The head of the turn itself may differ from the generation prompt. A generation prompt that opens the reasoning is
    longer. A head is longer where it has what the policy says by itself: reasoning, the channel that it speaks in, the
    beginning of a call. Without a generation prompt that has to be in what was said, or it could be of something
    else."""
    if not (prompt.startswith(history) and head.startswith(history)):
        return False
    asked, written = prompt[len(history) :], head[len(history) :]
    if asked.startswith(written):
        return True
    if written.startswith(asked) and (asked.strip() or _letters(written) in _letters(said)):
        return True
    return _ANY_THOUGHT.sub("", asked).rstrip() == _ANY_THOUGHT.sub("", written).rstrip()


def _letters(text: str) -> str:
    """Return the text without white space and what JSON writes around words, which models set in their own ways."""
    return re.sub(r"""[\s"'\[\]{}]+""", "", text)
