"""One rollout in readable form: the prompt, the turns, each token with its numbers, and the verdict.

Bodies are read from the log, at the places in the catalog, one record at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rftstream.contracts import codec
from rftstream.contracts.messages import Message
from rftstream.contracts.records import TopicPartition
from rftstream.contracts.rollouts import Rollout, Segment
from rftstream.contracts.tasks import ChatMessage, Problem, Task
from rftstream.contracts.verdicts import Verdict, VerifiedRollout
from rftstream.errors import ContractError
from rftstream.models.rendering import Pieces
from rftstream.queries.catalog.finding import GroupRow, RolloutRow
from rftstream.queries.formatting import image_text
from rftstream.queries.records.shown import (
    CompletionReader,
    call_text,
    cut,
    model_call_text,
    posted_text,
    roles_of_turns,
    segment_starts,
    start_text,
)
from rftstream.service.reading import each_record
from rftstream.transport.base import Transport

MAX_CHARACTERS = 20_000
"""Most characters of one message on a page; the rest is counted."""
COLUMN_CHARACTERS, MAX_COLUMNS = 4_000, 50
"""Most characters of a column of a problem, and most columns, on a page."""
MAX_TURNS = 200
"""Most turns of one rollout on a page; the rest is counted."""
MAX_TOKENS = 1_500
"""Most tokens on one page of tokens."""
TOKEN_CHARACTERS = 60
"""Most characters of one token, since some vocabularies have very long tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownMessage:
    """A message of the problem, or a turn. Its text is cut to MAX_CHARACTERS."""

    role: str
    pieces: Pieces
    """Parts of the text, each with whether it is special tokens."""
    num_tokens: int = 0
    """Number of sampled tokens; 0 for a message that was not sampled."""
    finish_reason: str | None = None
    reward: float | None = None
    calls: tuple[str, ...] = ()
    """Tool calls, one line each."""
    begins: str = ""
    """Text that a segment begins here, unless it is the first one."""
    agent: str = ""
    """Role of the speaker in an episode of several agents."""
    images: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRollout:
    """A rollout with its bodies. `read_rollout` makes it."""

    row: RolloutRow
    group: GroupRow
    problem: tuple[ShownMessage, ...]
    answer: str | None
    columns: tuple[tuple[str, str], ...]
    """Names and values of the other columns of the problem."""
    turns: tuple[ShownMessage, ...]
    num_turns: int
    rollout: Rollout | None
    """The rollout. None: not sampled yet, deleted by retention, or not decodable; `missing` says which."""
    verdict: Verdict | None
    detail: str | None
    """More about the verdict, or about the reason why there is none."""
    missing: str
    """Why there is no body; empty if there is one."""
    calls: tuple[str, ...]
    """Model calls of an agent, one line each."""
    posted: str | None
    """Reward that the environment or agent gave, as text."""
    places: Mapping[str, str] = field(default_factory=dict)
    """Fact -> place of its record, as `topic[partition]@offset`."""

    @property
    def sampled_by(self) -> dict[tuple[int, int], int]:
        """Return (trainer epoch, version) -> number of tokens that it sampled."""
        counts: dict[tuple[int, int], int] = {}
        for segment in self.rollout.segments if self.rollout is not None else ():
            for span in segment.versions:
                name = (span.trainer_epoch, span.version)
                counts[name] = counts.get(name, 0) + span.count
        return counts


def read_rollout(
    transport: Transport, group: GroupRow, row: RolloutRow, reader: CompletionReader, *, num_partitions: int
) -> ShownRollout:
    """Read a rollout's record: `verified` if there is one, else `rollouts`, else its task."""
    partition = group.sequence % num_partitions
    message, missing = _message(transport, "verified", partition, row.verified_offset)
    if message is None:
        message, missing = _message(transport, "rollouts", partition, row.rollout_offset)
    verified = message if isinstance(message, VerifiedRollout) else None
    rollout = verified.rollout if verified is not None else message if isinstance(message, Rollout) else None
    problem = rollout.problem if rollout is not None else None
    if problem is None:
        task, _ = _message(transport, "tasks", partition, group.task_offset)
        problem = task.problem if isinstance(task, Task) else None
    places = {
        "task": (group.task_offset, "tasks", partition),
        "rollout": (row.rollout_offset, "rollouts", partition),
        "verdict": (row.verified_offset, "verified", partition),
        "outcome": (group.outcome_offset, "outcomes", 0),
    }
    return ShownRollout(
        row=row,
        group=group,
        problem=_asked(problem),
        answer=None if problem is None or problem.answer is None else problem.answer[:MAX_CHARACTERS],
        columns=_columns(problem),
        turns=() if rollout is None else _turns(rollout, reader),
        num_turns=0 if rollout is None else len(rollout.turns),
        rollout=rollout,
        verdict=None if verified is None else verified.verdict,
        detail=None if verified is None else verified.detail,
        missing="" if rollout is not None else missing or "the record has no rollout: its task could not be decoded",
        calls=() if rollout is None else tuple(map(model_call_text, rollout.calls[:MAX_TURNS])),
        posted=None if rollout is None or rollout.posted is None else posted_text(rollout.posted),
        places={
            what: f"{topic}[{number}]@{offset}"
            for what, (offset, topic, number) in places.items()
            if offset is not None
        },
    )


def last_answer(rollout: Rollout | None) -> str:
    """Return the policy's last answer."""
    said = [turn.content for turn in (() if rollout is None else rollout.turns) if turn.role == "assistant"]
    return said[-1] if said else ""


def _message(transport: Transport, topic: str, partition: int, offset: int | None) -> tuple[Message | None, str]:
    """Return the decoded record; or None, with the reason why there is none."""
    if offset is None:
        return None, "not yet"
    for record in each_record(transport, TopicPartition(topic, partition), [offset]):
        try:
            return codec.from_record(record), ""
        except ContractError as error:
            return None, str(error)
    return None, f"{topic}[{partition}]@{offset} was deleted by retention"


def _asked(problem: Problem | None) -> tuple[ShownMessage, ...]:
    return () if problem is None else tuple(map(_shown_message, problem.messages[:MAX_TURNS]))


def _columns(problem: Problem | None) -> tuple[tuple[str, str], ...]:
    found = {} if problem is None else problem.info
    texts = {name: value if isinstance(value, str) else json.dumps(value, default=str) for name, value in found.items()}
    return tuple((name, text[:COLUMN_CHARACTERS]) for name, text in sorted(texts.items())[:MAX_COLUMNS])


def _shown_message(message: ChatMessage) -> ShownMessage:
    return ShownMessage(
        role=message.role,
        pieces=cut([(message.content, False)], MAX_CHARACTERS),
        images=tuple(map(image_text, message.media)),
    )


def _turns(rollout: Rollout, reader: CompletionReader) -> tuple[ShownMessage, ...]:
    starts = segment_starts(rollout.turns, rollout.segments, rollout.calls)
    said = reader.turns(rollout.turns, rollout.segments, rollout.calls)
    roles = roles_of_turns(rollout.turns, rollout.segments, rollout.calls)
    return tuple(
        ShownMessage(
            role=turn.role,
            pieces=cut(pieces, MAX_CHARACTERS),
            num_tokens=turn.num_tokens,
            finish_reason=turn.finish_reason,
            reward=turn.reward,
            calls=tuple(map(call_text, turn.tool_calls)),
            begins=start_text(starts[i]) if i in starts and starts[i].segment > 0 else "",
            agent=roles.get(i, ""),
        )
        for i, (turn, pieces) in enumerate(zip(rollout.turns[:MAX_TURNS], said, strict=False))
    )


# --------------------------------------------------------------------------------------------- tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """A token with all its data on the log, and its advantage if that could be computed."""

    position: int
    token_id: int
    text: str
    special: bool
    sampled: bool
    """Whether the policy sampled it. Only sampled tokens are trained on."""
    logprob: float | None
    """Behaviour logprob; None if it was not sampled."""
    version: int | None
    """The version that sampled it."""
    trainer_epoch: int | None
    advantage: float | None


def list_tokens(
    segment: Segment, reader: CompletionReader, advantages: Sequence[float] | None = None, *, start: int = 0
) -> list[TokenRow]:
    """Return up to MAX_TOKENS tokens of a segment, starting at `start`."""
    ids = segment.token_ids.numpy()[start : start + MAX_TOKENS].tolist()
    logprobs = segment.behavior_logprobs.numpy()[start : start + MAX_TOKENS].tolist()
    mask = segment.loss_mask.numpy()[start : start + MAX_TOKENS].tolist()
    versions = dict(_versions(segment, start, start + len(ids)))
    texts: dict[int, tuple[str, bool]] = {}
    rows = []
    for i, (token_id, logprob, is_sampled) in enumerate(zip(ids, logprobs, mask, strict=True)):
        if token_id not in texts:
            texts[token_id] = _token_text(reader, token_id)
        text, special = texts[token_id]
        epoch, version = versions.get(start + i, (None, None))
        rows.append(
            TokenRow(
                position=start + i,
                token_id=token_id,
                text=text,
                special=special,
                sampled=bool(is_sampled),
                logprob=logprob if is_sampled else None,
                version=version,
                trainer_epoch=epoch,
                advantage=None if advantages is None or not is_sampled else float(advantages[start + i]),
            )
        )
    return rows


def _versions(segment: Segment, begin: int, end: int) -> Iterator[tuple[int, tuple[int, int]]]:
    for span in segment.versions:
        for position in range(max(begin, span.start), min(end, span.start + span.count)):
            yield position, (span.trainer_epoch, span.version)


def _token_text(reader: CompletionReader, token_id: int) -> tuple[str, bool]:
    """Return a token's text and whether it is special. An incomplete character is shown as a replacement character."""
    if reader.renderer is None:
        return f"<{token_id}>", False
    try:
        pieces = reader.renderer.pieces([token_id])
    except Exception:  # this tokenizer does not have the id: the model here is not the run's
        return f"<{token_id}>", True
    return "".join(text for text, _ in pieces)[:TOKEN_CHARACTERS], any(special for _, special in pieces)
