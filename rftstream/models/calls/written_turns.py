"""The completion that a policy would have sampled to say a given message, such as a demonstration's.

A template may write a finished turn in another way than a completion after its own generation prompt. Templates of
reasoning models open the reasoning in the prompt and drop it from the finished turn. Or they open and close it in the
prompt, to turn reasoning off.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rftstream.contracts.tasks import ChatMessage
from rftstream.errors import ConfigError
from rftstream.models.chat_template import END_THINK, THINK, ChatTemplate, split_thinking, with_thinking

_OPENED = re.compile(rf"(?:{THINK}(\s*)|(?:{THINK}\s*)?{END_THINK}\s*)\Z")
"""The end of a prompt that opens reasoning, or that opens and closes it at once."""
_THOUGHT = re.compile(rf"\s*(?:{THINK}.*?)?{END_THINK}\s*", re.DOTALL)


def why_not_learned(prompt: str, said: str, ends: Collection[str]) -> str | None:
    """Return why a policy cannot sample the content `said` after `prompt`; None if it can. `ends`: the texts of the
    tokens that end a turn."""
    for end in ends:
        if end and end in said.rstrip().removesuffix(end):
            return (
                f"it has {end!r} in its text, which ends a turn, so that what follows would not be learned; take it out"
            )
    opened = _OPENED.search(prompt)
    if split_thinking(said)[0] and opened is not None and opened[1] is None:
        return (
            "it begins with a thought, but the prompt ends with an empty one, so that none can follow; take the "
            "thoughts out, or have the template leave room for them (chat_template_kwargs)"
        )
    return None


def said_after(
    prompt: str, template: ChatTemplate, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]
) -> str:
    """Return the text of the last message as the policy would sample it after the prompt of the earlier messages, and
    the text that the template writes behind it. ConfigError if the template leaves no place for the message."""
    message = messages[-1]
    reasoning, content = split_thinking(message.content)
    whole = template.render(messages, tools, add_generation_prompt=False)
    opened = _OPENED.search(prompt)
    bare = prompt[: opened.start()] if opened else prompt
    if whole.startswith(prompt):
        rest = whole[len(prompt) :]
    elif whole.startswith(bare):
        rest = whole[len(bare) :]
    elif message.tool_calls:
        raise ConfigError(
            "the chat template writes a message with tool calls otherwise than after its own prompt, expected the same "
            "beginning; give another model.chat_template"
        )
    else:
        rest = content if opened else message.content
    if opened is None:
        is_dropped = reasoning.strip() not in rest and END_THINK in template.source
        return with_thinking(reasoning, rest) if is_dropped else rest
    space = opened[1]
    if space is None and reasoning:  # `why_not_learned` refuses such a message where it matters
        return with_thinking(reasoning, _THOUGHT.sub("", rest, count=1) if _THOUGHT.match(rest) else rest)
    goes_on = space is not None and whole.startswith(prompt) and END_THINK in rest
    if goes_on and rest.lstrip().startswith(reasoning.strip()):
        return rest
    _, end, after = rest.partition(END_THINK) if goes_on else ("", "", "")
    body = after.lstrip("\n") if end else _THOUGHT.sub("", rest, count=1) if _THOUGHT.match(rest) else rest
    return body if space is None else f"{reasoning}{space}{END_THINK}{space * 2}{body}"
