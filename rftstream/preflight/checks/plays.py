"""Plays an environment with one text in each turn: the problem's answer, nothing, and another problem's answer. People
see what the environment pays for, and how the model sees its replies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rftstream.contracts.tasks import ChatMessage, Problem
from rftstream.environments.base import Reply
from rftstream.models.rendering import Renderer, joined
from rftstream.models.splice import Conversation
from rftstream.queries.formatting import number, plural
from rftstream.queries.plain import Report
from rftstream.queries.records.shown import LINE_END

RIGHT = "the problem's answer"
SHOWN_CHARACTERS = 200
"""Most characters of a reply that are shown."""
MOST_TURNS = 4
"""Turns after which a play ends by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Play(Report):
    """The replies of an environment to one text that is said in each turn."""

    JSON = "said num_turns reward is_done"

    said: str
    """Name of the text that is said."""
    text: str
    """Text that is said in each turn."""
    replies: tuple[Reply, ...] = ()

    @property
    def num_turns(self) -> int:
        """Number of turns that were answered."""
        return len(self.replies)

    @property
    def is_done(self) -> bool:
        """Whether the environment has ended the rollout."""
        return any(reply.done for reply in self.replies)

    @property
    def reward(self) -> float | None:
        """The sum of the rewards. None if there was none."""
        given = [reply.reward for reply in self.replies if reply.reward is not None]
        return sum(given) if given else None

    def to_text(self) -> str:
        """Return the reward as words, with what is expected where it differs."""
        reward = self.reward
        if reward is None:
            found = "no reward"
        elif self.said == RIGHT:
            found = f"{number(reward)}{' (1 expected)' if self.is_done and reward != 1 else ''}"
        else:
            found = f"{number(reward)}{' (0 expected)' if reward > 0 else ''}"
        turns = "" if self.is_done else f" (not done after {plural(self.num_turns, 'turn')})"
        return f"{found} for {self.said}{turns}"


def texts_to_say(problem: Problem, others: Sequence[Problem]) -> dict[str, str]:
    """Return what is said in each turn of a play, by its name."""
    texts = {RIGHT: problem.answer} if problem.answer else {}
    other = next((one.answer for one in others if one.answer and one.answer != problem.answer), None)
    more = {"another problem's answer": other} if other and texts else {}
    return {**texts, "an empty turn": "", **more}


def doubts_about_rewards(place: str, plays: Sequence[Play]) -> Iterator[str]:
    """Yield a sentence if a wrong answer gets as much as the right one."""
    right = next((play.reward for play in plays if play.said == RIGHT), None)
    for play in plays:
        if right is not None and play.said != RIGHT and play.reward is not None and play.reward >= right:
            yield (
                f"{place}: {play.said} gets {number(play.reward)} from the environment, and {RIGHT} {number(right)}: "
                "it does not tell them apart; mend its reward, unless the answer is no move of it"
            )


def reply_text(reply: Reply) -> str:
    """Return a reply in words."""
    parts = [message.content.partition("\n")[0] for message in reply.messages[:1]]
    parts += ["the rollout ends"] if reply.done else []
    parts += [] if reply.reward is None else [f"reward {reply.reward:g}"]
    return "; ".join(parts) or "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenPlay(Report):
    """A play as the model sees it."""

    JSON = "said reply num_reply_tokens num_tokens num_turns"

    said: str
    """Name of the text that is said in each of its turns."""
    reply: str
    """Text of the tokens between the model's first turn and its second; empty if there is no second."""
    num_reply_tokens: int
    num_tokens: int
    """Tokens of the whole conversation."""
    num_turns: int


def play_lines(plays: Sequence[Play], seen: SeenPlay | None, *, is_given: bool) -> list[str]:
    """Return the lines about an environment: its first reply, a play as the model sees it and, where it gives the
    reward, that of each play."""
    replies = plays[0].replies if plays else ()
    lines = [f"  the environment replies to {plays[0].said}: {reply_text(replies[0])}"] if replies else []
    if seen is not None:
        shown = seen.reply.replace("\n", LINE_END)
        shown = shown if len(shown) <= SHOWN_CHARACTERS else f"{shown[:SHOWN_CHARACTERS]} ..."
        what = "it" if replies and seen.said == plays[0].said else f"that to {seen.said}"
        lines.append(f"  as the model sees {what}, {plural(seen.num_reply_tokens, 'token')}: {shown}")
        lines.append(f"  a conversation of {plural(seen.num_turns, 'turn')} has {plural(seen.num_tokens, 'token')}")
    if is_given and plays:
        lines.append(f"  reward: {', '.join(play.to_text() for play in plays)}")
    return lines


def as_seen(
    renderer: Renderer,
    messages: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, Any]],
    play: Play,
) -> SeenPlay:
    """Render a play with the chat template, turn by turn as in a rollout. ConfigError if a text cannot be rendered."""
    before = Conversation(messages=tuple(messages), tools=tuple(tools))
    known, first = [*renderer.render(before.messages, before.tools)], list[int]()
    said = (*renderer.encode(play.text), *sorted(renderer.stop_token_ids)[:1])
    for turn, reply in enumerate(play.replies):
        known += said
        if reply.done:
            break
        parsed = renderer.parse(
            known[: len(known) - len(said)], said, tools=before.tools, finish_reason="stop", turn=turn
        )
        shown = (*before.messages, renderer.as_chat_message(parsed, said), *reply.messages)
        now = Conversation(messages=shown if reply.rewrite is None else reply.rewrite, tools=before.tools)
        found = renderer.continue_prompt(known, len(said), before, now)
        if found.break_reason is None:
            new = list(found.token_ids)
            known += new
        else:  # a new segment, with the whole conversation in it
            new = known = [*renderer.render(now.messages, now.tools)]
        first, before = first or new, now
    pieces = renderer.pieces(first)
    return SeenPlay(
        said=play.said,
        reply=joined(pieces),
        num_reply_tokens=len(first),
        num_tokens=len(known),
        num_turns=play.num_turns,
    )
