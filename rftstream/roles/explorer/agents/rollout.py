"""A rollout that an agent makes by its calls: its segments, and the tokens that each call adds to them.

A call continues the segment of its parent call (history.py), if no other call has continued that segment and both have
one role. Otherwise, or if the tokens cannot be continued exactly, the call opens a new segment. The tokens that a
branch repeats were sampled in another segment, so they are masked: each sampled token is trained once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rftstream.contracts.rollouts import AgentCall, PartialRollout, SavedCall, Segment, Turn
from rftstream.contracts.tasks import ChatMessage, Task
from rftstream.models.rendering import Renderer
from rftstream.models.splice import Conversation
from rftstream.policies.base import Completion
from rftstream.roles.explorer.agents.history import (
    CallHistory,
    RecordedCall,
    digest_of_tools,
)
from rftstream.roles.explorer.attempt import recordable_call
from rftstream.roles.explorer.model_calls import Dialect, ModelCall, SampledCall, digest
from rftstream.roles.explorer.open_segment import OpenSegment
from rftstream.roles.explorer.saved.pieces import CannotGoOnError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCall:
    """The plan for the tokens of a call. `AgentRollout.plan` makes it; `record` or `release` follows."""

    parent: int | None
    """Number of the call that this one continues; None if it continues none."""
    new_messages: tuple[ChatMessage, ...]
    """The conversation after the parent's answer."""
    conversation: Conversation
    """Conversation that the prompt is rendered from."""
    tools_digest: str
    """Digest of the tools."""
    segment: int | None
    """Why the call opens a new segment; empty if it does not."""
    opened: str
    """Why the call opens a segment; empty if it does not."""
    prompt: tuple[int, ...]
    """The whole prompt."""
    new_prompt: tuple[int, ...]
    """Tokens of the prompt that are not in the call's segment yet."""


class AgentRollout:
    """The calls of an agent for one task. The agent loop makes it when the task comes, empty or by `restore`. For each
    call it asks `plan`, submits the prompt, and calls `record`, or `release` if there is no completion."""

    def __init__(self, task: Task, renderer: Renderer, dialects: Mapping[str, Dialect]) -> None:
        self.task = task
        self.num_tokens = 0
        """Sampled tokens of all calls."""
        self._renderer, self._dialects = renderer, dialects
        self._history = CallHistory()
        self._segments: list[OpenSegment] = []
        self._reserved: set[int] = set()
        """Segments for which a call is being sampled."""

    @property
    def calls(self) -> Sequence[RecordedCall]:
        """Recorded calls, by number."""
        return self._history.calls

    def calls_of(self, request_digest: str) -> Sequence[RecordedCall]:
        """Recorded calls with equal requests, in order."""
        return self._history.of_request(request_digest)

    # ------------------------------------------------------------------------------------------ a call

    def plan(self, call: ModelCall) -> PlannedCall:
        """Return the plan for a call's tokens. The segment is reserved until `record` or `release`. ConfigError if the
        chat template or the tokenizer rejects the messages."""
        tools_digest = digest_of_tools(call.tools)
        count, parents = self._history.deepest(call.messages, tools_digest)
        new = call.messages[count:]
        if not parents:
            conversation = Conversation(messages=call.messages, tools=call.tools)
            has_history = any(message.role == "assistant" for message in call.messages)
            opened = "first" if not self.calls else "unknown_history" if has_history else "new_conversation"
            prompt = new_prompt = self._renderer.render(conversation.messages, conversation.tools)
            parent, segment = None, None
        else:
            parent = next((parent for parent in parents if self._is_open(parent, call.role)), parents[-1])
            conversation = Conversation(
                messages=(*parent.conversation.messages, parent.said, *new), tools=parent.conversation.tools
            )
            segment, opened, prompt, new_prompt = self._continue(parent, conversation, call.role)
        if segment is not None:
            self._reserved.add(segment)
        return PlannedCall(
            parent=None if parent is None else parent.call.number,
            new_messages=new,
            conversation=conversation,
            tools_digest=tools_digest,
            segment=segment,
            opened=opened,
            prompt=prompt,
            new_prompt=new_prompt,
        )

    def _continue(
        self, parent: RecordedCall, conversation: Conversation, role: str
    ) -> tuple[int | None, str, tuple[int, ...], tuple[int, ...]]:
        known = tuple(self._segments[parent.call.segment].token_ids[: parent.end])
        found = self._renderer.continue_prompt(known, parent.call.count, parent.conversation, conversation)
        if found.break_reason is not None:
            prompt = self._renderer.render(conversation.messages, conversation.tools)
            return None, str(found.break_reason), prompt, prompt
        prompt = known + found.token_ids
        if not self._is_open(parent, role):
            return None, "branch" if self._segments[parent.call.segment].role == role else "role", prompt, prompt
        return parent.call.segment, "", prompt, found.token_ids

    def _is_open(self, parent: RecordedCall, role: str) -> bool:
        """Whether the segment ends with this call, is of the role, and no planned call continues it."""
        number = parent.call.segment
        segment = self._segments[number]
        return number not in self._reserved and len(segment.token_ids) == parent.end and segment.role == role

    def release(self, plan: PlannedCall) -> None:
        """Drop a planned call that has no completion. Its prompt does not become part of the rollout."""
        if plan.segment is not None:
            self._reserved.discard(plan.segment)

    def result(self, plan: PlannedCall, call: ModelCall, completion: Completion, now: float) -> SampledCall:
        """Return the answer of a planned call. The call gets the next number."""
        number, token_ids = len(self.calls), completion.token_ids.tolist()
        said = self._renderer.parse(
            plan.prompt,
            token_ids,
            tools=plan.conversation.tools,
            finish_reason=completion.finish_reason,
            turn=number,
        )
        return SampledCall(
            call_id=call_id(self.task.ids.rollout_id, number),
            created=int(now),
            model=call.model,
            said=said,
            num_prompt_tokens=len(plan.prompt),
            num_sampled_tokens=len(token_ids),
            stop=call.stop,
        )

    def new_call(
        self, plan: PlannedCall, call: ModelCall, completion: Completion, times: tuple[float, float]
    ) -> AgentCall:
        """Return the log's record of a planned call. The call gets the next number."""
        number = len(self._segments) if plan.segment is None else plan.segment
        before = 0 if plan.segment is None else len(self._segments[plan.segment].token_ids)
        return AgentCall(
            number=len(self.calls),
            dialect=call.dialect.name,
            request_digest=call.digest,
            tools_digest=plan.tools_digest,
            segment=number,
            start=before + len(plan.new_prompt),
            count=len(completion.token_ids),
            finish_reason=completion.finish_reason,
            opened=plan.opened,
            idempotency_digest="" if call.idempotency_key is None else digest(call.idempotency_key),
            asked=dict(call.asked),
            started_at=times[0],
            finished_at=times[1],
        )

    def record(
        self,
        plan: PlannedCall,
        result: SampledCall,
        call: AgentCall,
        answer: bytes,
        told: Mapping[str, Any],
        added: OpenSegment,
    ) -> RecordedCall:
        """Record a call that was sampled. `told` is the message in `answer`, and `added` holds the tokens that the call
        adds."""
        self.release(plan)
        parent = None if plan.parent is None else self.calls[plan.parent]
        served = self._dialects[call.dialect].served(told)
        recorded = RecordedCall(
            call=call,
            answer=answer,
            parent=plan.parent,
            new_messages=plan.new_messages,
            conversation=plan.conversation,
            said=self._renderer.as_chat_message(result.said, added.token_ids[len(added.token_ids) - call.count :]),
            place=self._history.place_behind(parent, plan.tools_digest, plan.new_messages, served),
        )
        self._add(recorded, added)
        return recorded

    def _add(self, recorded: RecordedCall, added: OpenSegment) -> None:
        if recorded.call.segment == len(self._segments):
            self._segments.append(OpenSegment(role=added.role))
        self._segments[recorded.call.segment].append(added)
        self.num_tokens += recorded.call.count
        self._history.add(recorded)

    # ------------------------------------------------------------------------------------------ restoring

    def restore(self, pieces: Sequence[PartialRollout]) -> None:
        """Restore the saved calls. CannotGoOnError if the pieces do not give the calls that were saved."""
        first = pieces[0].piece if pieces else 0  # pieces before it were withdrawn if the number is not 0
        for number, piece in enumerate(pieces, start=first):
            if piece.ids != self.task.ids or piece.piece != number:
                raise CannotGoOnError(f"got piece {piece.piece} of {piece.ids.rollout_id}, expected {number}")
            if not len(piece.calls) == len(piece.saved_calls) == len(piece.segments):
                raise CannotGoOnError(f"piece {number} has not one segment for each call")
            for call, saved, segment in zip(piece.calls, piece.saved_calls, piece.segments, strict=True):
                self._restore(call, saved, segment)
        for recorded in self.calls:
            if recorded.parent is not None:  # a call can only continue an answer that was delivered
                self.calls[recorded.parent].is_delivered = True

    def _restore(self, call: AgentCall, saved: SavedCall, segment: Segment) -> None:
        self._check(call, saved, segment)
        parent = None if saved.parent is None else self.calls[saved.parent]
        if parent is None:
            conversation = Conversation(messages=saved.messages, tools=saved.tools)
        else:
            messages = (*parent.conversation.messages, parent.said, *saved.messages)
            conversation = Conversation(messages=messages, tools=parent.conversation.tools)
        if call.segment < len(self._segments):
            known: Sequence[int] = self._segments[call.segment].token_ids
        else:
            known = ()
        token_ids = [*known, *segment.token_ids.numpy().tolist()]
        completion = token_ids[call.start :]
        said = self._renderer.parse(
            token_ids[: call.start],
            completion,
            tools=conversation.tools,
            finish_reason=call.finish_reason,
            turn=call.number,
        )
        served = self._dialects[call.dialect].served(msgspec.json.decode(saved.answer))
        recorded = RecordedCall(
            call=call,
            answer=saved.answer,
            parent=saved.parent,
            new_messages=saved.messages,
            conversation=conversation,
            said=self._renderer.as_chat_message(said, completion),
            place=self._history.place_behind(parent, call.tools_digest, saved.messages, served),
        )
        self._add(recorded, OpenSegment.of(segment))

    def _check(self, call: AgentCall, saved: SavedCall, segment: Segment) -> None:
        before = self._segments[call.segment] if call.segment < len(self._segments) else OpenSegment(role=segment.role)
        whole, sampled = len(before.token_ids) + segment.token_ids.shape[0], int(segment.loss_mask.numpy().sum())
        if (
            call.number != len(self.calls)
            or call.dialect not in self._dialects
            or call.segment > len(self._segments)
            or (saved.parent is not None and saved.parent >= call.number)
            or (call.start + call.count, call.count, before.role) != (whole, sampled, segment.role)
        ):
            raise CannotGoOnError(f"call {call.number} does not fit to those before it")
        oldest = min((span.version for span in segment.versions), default=None)
        if oldest is not None and oldest < self.task.ids.min_version:
            raise CannotGoOnError(f"version {oldest} sampled of it, expected at least {self.task.ids.min_version}")

    # ------------------------------------------------------------------------------------------ what has become of it

    def segments(self) -> tuple[Segment, ...]:
        """Return the segments in the form of a rollout record."""
        return tuple(segment.close() for segment in self._segments)

    def turns(self) -> tuple[Turn, ...]:
        """Return the turns, call by call: new messages, then the answer. The problem's messages are left out."""
        turns: list[Turn] = []
        for recorded in self.calls:
            messages = recorded.new_messages
            if recorded.parent is None and messages[: len(self.task.problem.messages)] == self.task.problem.messages:
                messages = messages[len(self.task.problem.messages) :]
            turns += [Turn(role=message.role, content=message.content) for message in messages]
            turns.append(self._turn(recorded))
        return tuple(turns)

    def _turn(self, recorded: RecordedCall) -> Turn:
        call, token_ids = recorded.call, self._segments[recorded.call.segment].token_ids
        completion = token_ids[call.start : recorded.end]
        said = self._renderer.parse(
            token_ids[: call.start],
            completion,
            tools=recorded.conversation.tools,
            finish_reason=call.finish_reason,
            turn=call.number,
        )
        return Turn(
            role="assistant",
            content=self._renderer.decode(completion),
            num_tokens=call.count,
            finish_reason=call.finish_reason,
            reasoning=said.reasoning,
            tool_calls=tuple(map(recordable_call, said.tool_calls)),
        )


def call_id(rollout_id: str, number: int) -> str:
    """Return the id of a call."""
    return f"{rollout_id}/call/{number}"
