"""A check: whether a chat template keeps earlier turns unchanged. Rollouts of several turns rely on it.

The turn loop goes on in one segment while the next prompt begins with the tokens that are there already: the prompt
before, what was sampled, and its stop token. A template that drops earlier thoughts, trims, or puts things elsewhere
breaks this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rftstream.contracts.tasks import ChatMessage
from rftstream.errors import ConfigError
from rftstream.models.rendering import Renderer

REPLIES = {
    "a plain reply": "4",
    "a reply with a thought": "<think>\n2+2\n</think>\n\n4",
    "a reply with white space around it": "  4  ",
}
"""Kind of reply -> what the policy could have said. Templates treat these kinds differently."""
ASKED = "3+3="
"""What the user asks in later turns."""
TURNS = 3


def first_difference(
    renderer: Renderer,
    messages: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, Any]],
    show: Callable[[int], str],
) -> str | None:
    """Return in words where a later prompt does not begin with what was there before, or None if it always does. `show`
    returns a token as text."""
    for what, reply in REPLIES.items():
        chat, known = list(messages), None
        try:
            renderer.encode(f"{reply}{ASKED}")
        except ConfigError:  # a policy with these tokens could not say it
            continue
        for turn in range(1, TURNS + 1):
            try:
                prompt = renderer.render(chat, tools)
            except ConfigError as error:
                return None if turn == 1 else f"it refuses turn {turn}: {error}"
            if known is not None and (found := _differs(renderer, prompt, known, show)):
                return f"after {what} the prompt of turn {turn} {found}"
            known = (*prompt, *renderer.encode(reply))
            chat += [ChatMessage(role="assistant", content=reply), ChatMessage(role="user", content=ASKED)]
    return None


def _differs(renderer: Renderer, prompt: Sequence[int], known: Sequence[int], show: Callable[[int], str]) -> str | None:
    def token(index: int) -> str:
        return f"{show(prompt[index])!r}" if index < len(prompt) else "its end"

    for index, before in enumerate(known):
        if index >= len(prompt) or prompt[index] != before:
            return f"has {token(index)} as token {index} instead of {show(before)!r}"
    stops = renderer.stop_token_ids
    if stops and (len(known) >= len(prompt) or prompt[len(known)] not in stops):
        names = " or ".join(repr(show(one)) for one in sorted(stops))
        return f"has {token(len(known))} as token {len(known)} instead of the sampled {names}"
    return None
