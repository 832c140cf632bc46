"""A rollout in progress: its segments, its turns, its conversation, and the part that is new since the last save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from rftstream.contracts.assistant import AssistantMessage
from rftstream.contracts.beside import cut_columns, wire_columns
from rftstream.contracts.rollouts import ImageSpan, Posted, Segment, StoredState, Turn
from rftstream.contracts.tasks import ChatMessage, Problem, Sampling
from rftstream.contracts.token_values import TokenValues
from rftstream.models.rendering import Renderer, image_spans
from rftstream.models.splice import BreakReason, Conversation
from rftstream.policies.base import Completion
from rftstream.roles.explorer.environment_session import EnvironmentSession
from rftstream.roles.explorer.open_segment import OpenSegment


@dataclass(frozen=True, slots=True, kw_only=True)
class Increment:
    """The part of a rollout that is new since the last save. The fields are those of PartialRollout."""

    turns: tuple[Turn, ...]
    segments: tuple[Segment, ...]
    continues: bool
    beside_before: dict[str, TokenValues]
    num_tokens: int
    kept_messages: int
    messages: tuple[ChatMessage, ...]
    metrics: dict[str, float]
    environment_state: bytes | StoredState | None
    """State of the environment. A large state is in the store already."""
    sampler_state: bytes | None
    started_at: float
    posted: Posted | None


class Phase(Enum):
    """The event that an open rollout waits for."""

    starting = "starting"
    """The environment starts or loads its saved state."""
    sampling = "sampling"
    """The policy samples a turn, or will do so when the rollout resumes."""
    replying = "replying"
    """The environment answers a turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextPrompt:
    """The prompt that the next turn is sampled from."""

    token_ids: Sequence[int]
    """Tokens to add to the open segment, or the tokens of a new segment."""
    length: int
    """Number of tokens in the whole prompt."""
    opens_segment: bool
    break_reason: BreakReason | None = None
    """Why the prompt begins a new segment; None for the first segment, and for a prompt that continues one."""
    images: tuple[ImageSpan, ...] = ()
    """Spans of images in `token_ids`."""


@dataclass(slots=True)
class _Mark:
    """The saved part of a rollout."""

    num_turns: int = 0
    segment: int = 0
    """Number of the last segment that has a saved part."""
    num_in_segment: int = 0
    num_bare: int = 0
    """Number of the last tokens in it that were saved without values beside them."""
    messages: tuple[ChatMessage, ...] = ()
    environment_turn: int = -1
    """Number of the turn before which the environment's state was last saved."""


@dataclass(slots=True)
class OpenRollout:
    """A rollout between its start and its end, with its conversation and its tokens. Only TurnLoop makes and calls it.
    For each turn it calls `ask` with the prompt, `carry` with sampled tokens, and `end_turn` with the environment's
    answer. In between `increment` returns the part that is new since the last save."""

    key: str
    session: EnvironmentSession
    problem: Problem
    sampling: Sampling
    seed: int
    messages: list[ChatMessage]
    started_at: float
    truncate: bool
    renderer: Renderer
    name: str
    """Name of the rollout in log lines, and for policies with several servers."""
    group: str = field(default="", kw_only=True)
    """Common name of the rollouts of one problem."""
    min_version: int = field(default=0, kw_only=True)
    """Oldest version that may sample a token."""
    context: float
    """Most tokens of prompt and completion together; infinity for no limit."""
    has_one_turn: bool = False
    """Whether the rollout always ends with its first turn."""
    phase: Phase = Phase.starting
    is_paused: bool = False
    """Whether sampling is paused. Calls of the environment continue."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """All tools on offer: the problem's, then the environment's."""
    asked: Conversation | None = None
    """Conversation that the last prompt was rendered from."""
    said: AssistantMessage | None = None
    """The turn that the environment is answering. Its tokens are the carried ones."""
    held: Completion | None = None
    """A completion that arrived while the environment's state was being saved."""
    gives_up: str | None = None
    """Why the rollout ends with the policy's next completion; None if it goes on."""
    environment_state: bytes | StoredState | None = None
    """Saved state of the environment, from before the turn `state_turn`."""
    state_turn: int = -1
    """Number of the turn before which the environment's state was last requested."""
    posted: Posted | None = None
    """Reward from the environment so far."""
    turns: list[Turn] = field(default_factory=list)
    segments: list[OpenSegment] = field(default_factory=list)
    num_tokens: int = 0
    """Number of sampled tokens in the segments."""
    turn: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    carried: int = 0
    """Number of tokens at the end of the last segment that belong to the turn being sampled."""
    sampler_state: bytes | None = None
    """State of the sampler after the carried tokens."""
    _mark: _Mark = field(default_factory=_Mark)

    def __post_init__(self) -> None:
        self._mark.messages = self.problem.messages

    def next_prompt(self, num_said: int) -> NextPrompt:
        """Return the next prompt. It continues the segment's tokens if the renderer can prove that they stay the same;
        the last `num_said` of these tokens are the previous turn. Errors are those of the template."""
        now, reason = Conversation(messages=tuple(self.messages), tools=self.tools), None
        if self.segments and self.asked is not None:
            known = self.segments[-1].token_ids
            found = self.renderer.continue_prompt(known, num_said, self.asked, now)
            if found.break_reason is None:
                return NextPrompt(
                    token_ids=found.token_ids,
                    length=len(known) + len(found.token_ids),
                    opens_segment=False,
                    images=image_spans(self.renderer, found.token_ids, now.messages[len(self.asked.messages) + 1 :]),
                )
            reason = found.break_reason
        prompt = self.renderer.render(now.messages, now.tools)
        return NextPrompt(
            token_ids=prompt,
            length=len(prompt),
            opens_segment=True,
            break_reason=reason,
            images=image_spans(self.renderer, prompt, now.messages),
        )

    def ask(self, prompt: NextPrompt) -> None:
        """Add the tokens of the next prompt."""
        if prompt.opens_segment:
            self.segments.append(OpenSegment())
        self.segments[-1].prompt(prompt.token_ids, prompt.images)
        self.asked = Conversation(messages=tuple(self.messages), tools=self.tools)

    def end_turn(self, *, reward: float | None = None) -> None:
        """Complete a turn from the carried tokens, with the environment's reward for it. `said` is None if sampling of
        the turn did not finish."""
        said, ids = self.said, self.carried_ids
        self.turns.append(
            Turn(
                role="assistant",
                content=self.renderer.decode(ids) if said is None else said.text,
                num_tokens=len(ids),
                finish_reason="timeout" if said is None else said.finish_reason,
                reasoning="" if said is None else said.reasoning,
                tool_calls=() if said is None else said.tool_calls,
                reward=reward,
            )
        )
        self.carried, self.sampler_state, self.said = 0, None, None

    def give_up_turn(self, so_far: Completion | None) -> None:
        """End the turn that is being sampled or answered with its tokens so far."""
        if so_far is not None:
            self.carry(so_far)
        if self.carried or self.said is not None:
            self.end_turn()
        elif self.segments and not self.segments[-1].num_sampled():
            del self.segments[-1]  # a prompt alone is useless for training

    @property
    def carried_ids(self) -> Sequence[int]:
        """Tokens of the turn that is being sampled or answered."""
        return self.segments[-1].token_ids[-self.carried :] if self.carried else ()

    def carry(self, so_far: Completion) -> None:
        """Take over the tokens sampled so far. The policy forgets them, and sampling continues after them."""
        self.segments[-1].sampled(so_far)
        self.num_tokens += len(so_far.token_ids)
        self.carried += len(so_far.token_ids)
        self.sampler_state = so_far.sampler_state

    def num_unsaved(self, so_far: Completion | None) -> int:
        """Return the number of sampled tokens that are not saved."""
        first = self._mark.segment
        return sum(
            segment.num_sampled(self._mark.num_in_segment if number == first else 0)
            for number, segment in enumerate(self._with(so_far))
            if number >= first
        )

    def increment(self, so_far: Completion | None) -> Increment | None:
        """Return the new part of the rollout, which counts as saved from now on. None if nothing is new, if the
        environment's state is needed and not known, or if a successor could not tell that the turn has ended.

        A turn that is being answered is saved as a turn that is being sampled. A successor finds it complete, and asks
        its environment for the answer."""
        mark, segments = self._mark, self._with(so_far)
        if self.num_unsaved(so_far) == 0:
            return None
        is_new = self.state_turn == self.turn and mark.environment_turn != self.turn
        state = self.environment_state if is_new else None
        if state is None and self.turn > 0 and mark.environment_turn != self.turn:
            return None
        if self.phase is Phase.replying and self.end_of_saved() is None:
            return None
        grown = segments[mark.segment]
        new = [grown.from_token(mark.num_in_segment), *segments[mark.segment + 1 :]]
        continues = mark.num_in_segment > 0
        if not new[0].token_ids:
            new, continues = new[1:], False
        bare = cut_columns(grown.beside, mark.num_in_segment - mark.num_bare, mark.num_in_segment)
        kept = 0
        while kept < min(len(mark.messages), len(self.messages)) and mark.messages[kept] == self.messages[kept]:
            kept += 1
        found = Increment(
            turns=tuple(self.turns[mark.num_turns :]),
            segments=tuple(segment.close() for segment in new),
            continues=continues,
            beside_before=wire_columns(bare),
            num_tokens=sum(segment.num_sampled() for segment in new),
            kept_messages=kept,
            messages=tuple(self.messages[kept:]),
            metrics=dict(self.metrics),
            environment_state=state,
            sampler_state=so_far.sampler_state if so_far is not None else self.sampler_state,
            started_at=self.started_at,
            posted=self.posted,
        )
        self.saved(segments[-1], environment=state is not None or mark.environment_turn == self.turn)
        return found

    def saved(self, last: OpenSegment, *, environment: bool) -> None:
        """Record that all of the rollout is saved, with the last segment as it is given."""
        self._mark = _Mark(
            len(self.turns),
            len(self.segments) - 1,
            len(last.token_ids),
            last.num_bare(),
            tuple(self.messages),
            self.turn if environment else -1,
        )

    @property
    def is_in_policy(self) -> bool:
        """Whether the policy has the rollout: it is sampling a turn, or has a completion that the next `step`
        returns."""
        return self.phase is Phase.sampling and not self.is_paused and self.held is None

    def lacks_state(self, so_far: Completion | None) -> bool:
        """Return whether the environment's state must be requested before the new part can be saved."""
        return (
            self.phase is Phase.sampling
            and self.turn not in (self.state_turn, self._mark.environment_turn)
            and self.num_unsaved(so_far) > 0
        )

    def end_of_saved(self) -> str | None:
        """Return why the turn of the carried tokens has ended, as far as a successor can tell; None if it has not
        ended."""
        if not self.carried:
            return None
        if self.carried_ids[-1] in self.renderer.stop_token_ids:
            return "stop"
        return "length" if self.num_left < 1 else None

    @property
    def num_left(self) -> int:
        """Number of tokens that may still be sampled in this turn."""
        context = self.context - len(self.segments[-1].token_ids)
        return int(min(context, self.sampling.max_tokens - self.num_tokens))

    def _with(self, so_far: Completion | None) -> list[OpenSegment]:
        if so_far is None:
            return self.segments
        last = self.segments[-1].from_token(0)
        last.sampled(so_far)
        return [*self.segments[:-1], last]


@dataclass(frozen=True, slots=True)
class RolloutView:
    """A read-only view of an open rollout for the step. For an ended rollout all values are 0 or empty. `TurnLoop.view`
    makes it."""

    _state: OpenRollout | None
    _so_far: Completion | None
    """Tokens of the current turn that the policy has sampled."""

    @property
    def num_sampled(self) -> int:
        """Number of tokens sampled so far."""
        if self._state is None:
            return 0
        return self._state.num_tokens + (0 if self._so_far is None else len(self._so_far.token_ids))

    @property
    def num_unsaved(self) -> int:
        """Number of tokens that would be lost if the rollout were aborted."""
        return 0 if self._state is None else self._state.num_unsaved(self._so_far)

    @property
    def is_calling(self) -> bool:
        """Whether a call of the environment is running."""
        return self._state is not None and self._state.session.is_busy

    def newest_tokens(self, count: int) -> np.ndarray:
        """Return the newest tokens of the turn that is being sampled, int32 [at most count]."""
        if self._state is None or self._state.phase is not Phase.sampling:
            return np.zeros(0, np.int32)
        tokens = np.zeros(0, np.int32) if self._so_far is None else self._so_far.token_ids[-count:]
        if (before := min(self._state.carried, count - len(tokens))) > 0:
            carried = np.asarray(self._state.segments[-1].token_ids[-before:], dtype=np.int32)
            tokens = np.concatenate([carried, tokens])
        return tokens
