"""`rftstream try`: a few rollouts for people to read, from the rendered prompt to the reward, before any training."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import tempfile
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rftstream.config.sections import RunConfig
from rftstream.contracts.rollouts import ImageSpan, Rollout, Segment
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.models.folders.folder import prepare_model
from rftstream.models.rendering import Pieces, Renderer, image_spans, joined, pieces_of_turns
from rftstream.preflight.checks.rendering import Rendering
from rftstream.preflight.trial_run import trial_config, try_tasks
from rftstream.queries.formatting import image_text, number, plural
from rftstream.queries.plain import Report, pick
from rftstream.queries.records.shown import (
    PLAIN,
    CompletionReader,
    has_many_turns,
    numbers,
    posted_text,
    role_numbers,
    roles_of_turns,
    segment_starts,
    start_text,
    turn_lines,
)
from rftstream.runs.folder import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRun:
    """Consecutive tokens of a segment that were either all sampled or all not."""

    text: str
    num_tokens: int
    sampled: bool
    """Whether the tokens are trained on; others are masked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedRollout(Report):
    """One rollout of a trial. `try_run` makes it."""

    JSON = (
        "rollout_id=verified.ids.rollout_id taskset=verified.ids.taskset status=rollout.status error=rollout.error "
        "prompt num_prompt_tokens answer=rollout.problem.answer turns=turns_to_json segments posted=rollout.posted "
        "num_tokens=rollout.num_tokens seconds metrics=rollout.metrics reward=verified.verdict.reward "
        "parts=parts_to_json roles=roles_to_json reward_metrics=metrics_to_json scorer reason=verified.reason "
        "detail=verified.detail"
    )

    verified: VerifiedRollout
    rollout: Rollout
    """The rollout as the explorer made it."""
    prompt_pieces: Pieces
    """The prompt as the policy first saw it, with special tokens, cut where the run would cut it."""
    num_prompt_tokens: int
    turns: tuple[Pieces, ...]
    """Parts of each turn of the rollout, with the sampled special tokens."""
    segments: tuple[tuple[TokenRun, ...], ...]
    """The tokens of each segment, as the model saw them."""

    @property
    def prompt(self) -> str:
        """Return the prompt as text."""
        return joined(self.prompt_pieces)

    @property
    def is_scored(self) -> bool:
        """Return whether the rollout has a reward."""
        return self.verified.verdict is not None

    def parts_to_json(self) -> dict[str, float]:
        """Return the parts of the reward."""
        return {} if self.verified.verdict is None else dict(self.verified.verdict.parts)

    def roles_to_json(self) -> dict[str, float | None]:
        """Return the rewards of roles."""
        return {} if self.verified.verdict is None else dict(self.verified.verdict.roles)

    def metrics_to_json(self) -> dict[str, float]:
        """Return the metrics of the reward."""
        return {} if self.verified.verdict is None else dict(self.verified.verdict.metrics)

    @property
    def scorer(self) -> str | None:
        """Name and version of the scorer."""
        verdict = self.verified.verdict
        return None if verdict is None else verdict.scored_by

    @property
    def seconds(self) -> float:
        """Return the seconds from the environment's start to its end. Other rollouts were sampled at the same time."""
        return max(0.0, self.rollout.finished_at - self.rollout.started_at) if self.rollout.started_at else 0.0

    @property
    def says_answer(self) -> bool:
        """Return whether the policy wrote the reference answer as a word of its own, which its prompt does not have."""
        problem = self.rollout.problem
        if problem is None or not problem.answer:
            return False
        word = re.compile(rf"(?<!\w){re.escape(problem.answer)}(?!\w)")
        said = "\n".join(turn.content for turn in self.rollout.turns if turn.role == "assistant")
        return word.search(said) is not None and word.search(self.prompt) is None

    def turns_to_json(self) -> list[dict[str, Any]]:
        """Return the turns, as text and as shown."""
        starts = segment_starts(self.rollout.turns, self.rollout.segments, self.rollout.calls)
        roles = roles_of_turns(self.rollout.turns, self.rollout.segments, self.rollout.calls)
        return [
            {
                **pick(turn, "role content num_tokens finish_reason reasoning tool_calls reward"),
                "shown": joined(pieces),
                "sampled": turn.num_tokens > 0,
                "agent": roles.get(index),
                "begins_segment": starts[index].segment if index in starts else None,
                "why_segment": starts[index].why or None if index in starts else None,
            }
            for index, (turn, pieces) in enumerate(zip(self.rollout.turns, self.turns, strict=True))
        ]

    def to_text(self, reader: CompletionReader = PLAIN) -> str:
        """Return the rollout as lines for a person."""
        return "\n".join(_text(self, reader))


@dataclass(slots=True)
class TrialReport(Report):
    """The rollouts of a trial, in order of admission. The command makes it, and `try_run` adds rollouts as they
    finish."""

    JSON = "rollouts=tried num_scored reward=mean_reward num_tokens sampling_s tokens_per_s"

    wanted: int
    tried: list[TriedRollout] = field(default_factory=list)

    @property
    def num_scored(self) -> int:
        """Return the number of rollouts with a reward."""
        return sum(one.is_scored for one in self.tried)

    @property
    def num_tokens(self) -> int:
        """Return the tokens of all rollouts."""
        return sum(one.rollout.num_tokens for one in self.tried)

    @property
    def sampling_s(self) -> float:
        """Return the seconds from the first start to the last end."""
        sampled = [one.rollout for one in self.tried if one.rollout.started_at]
        if not sampled:
            return 0.0
        return max(0.0, max(one.finished_at for one in sampled) - min(one.started_at for one in sampled))

    @property
    def tokens_per_s(self) -> float | None:
        """Return the tokens per second of sampling, or None if nothing was sampled."""
        return self.num_tokens / self.sampling_s if self.sampling_s > 0 and self.num_tokens else None

    @property
    def mean_reward(self) -> float | None:
        """Return the mean over rollouts with a reward, or None if there are none."""
        rewards = [one.verified.verdict.reward for one in self.tried if one.verified.verdict is not None]
        return sum(rewards) / len(rewards) if rewards else None

    def summary(self) -> str:
        """Return the totals as lines for a person."""
        rate = "" if self.tokens_per_s is None else f" ({self.tokens_per_s:,.0f} tokens/s)"
        lines = [
            f"{plural(len(self.tried), 'rollout')}, {self.num_scored:,} scored, "
            f"mean reward {number(self.mean_reward)}; "
            f"{plural(self.num_tokens, 'token')} in {self.sampling_s:.2f} s{rate}"
        ]
        if len(self.tried) < self.wanted:
            lines.append(f"{self.wanted:,} were asked for: the tasksets end before, or their prompts are too long")
        if reasons := sorted({str(one.verified.reason) for one in self.tried if not one.is_scored}):
            unscored = len(self.tried) - self.num_scored
            lines.append(f"{unscored:,} without a reward ({', '.join(reasons)}): see above; a run would leave them out")
        return "\n".join([*lines, *self._unread()])

    def _unread(self) -> Iterator[str]:
        """Yield a line about rewards that gave 0 to every completion with the reference answer in it."""
        saying = [one.verified.verdict for one in self.tried if one.says_answer and one.verified.verdict is not None]
        names = dict.fromkeys(name for verdict in saying for name in verdict.parts)
        zero = [name for name in names if not any(verdict.parts.get(name) for verdict in saying)]
        if zero:
            yield (
                f"{plural(len(saying), 'rollout')} with the reference answer in the text: 0 by {' and '.join(zero)}; "
                "where one is right, look at how the reward reads it"
            )


def try_run(
    config: RunConfig, report: TrialReport, *, num_tasks: int, samples: int, taskset: str | None, seed: int | None
) -> Generator[TriedRollout]:
    """Yield rollouts in the order of their tasks, and add each to the report. The user's modules must be importable by
    now."""
    config = trial_config(config, num_tasks=num_tasks, samples=samples, taskset=taskset, seed=seed)
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="rftstream-try-"))
        stack.enter_context(_quiet())
        folder = RunFolder(Path(scratch) / config.run.name)
        results = stack.enter_context(
            contextlib.closing(try_tasks(config, folder, num_tasks=num_tasks, samples=samples))
        )
        waiting: dict[tuple[int, int], VerifiedRollout] = {}
        expected = (0, 0)
        rendering: Rendering | None = None
        for verified in results:
            waiting[verified.ids.sequence, verified.ids.sibling] = verified
            while (found := waiting.pop(expected, None)) is not None:
                if rendering is None:
                    rendering = Rendering.of(prepare_model(config.model, folder.model, config.run.seed))
                one = _tried(found, rendering)
                report.tried.append(one)
                yield one
                sequence, sibling = expected
                expected = (sequence, sibling + 1) if sibling + 1 < samples else (sequence + 1, 0)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the warnings of roles out of the output. The rollouts have them, too."""
    logger = logging.getLogger("rftstream")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _tried(verified: VerifiedRollout, rendering: Rendering) -> TriedRollout:
    rollout = verified.rollout
    assert rollout is not None, "its task was made by a feeder"
    token_ids: list[int] = []
    images: tuple[ImageSpan, ...] = ()
    if rollout.segments:
        first = rollout.segments[0]
        token_ids = first.token_ids.numpy()[: _num_prompt_tokens(first.loss_mask.numpy().tolist())].tolist()
        images = first.images
    elif rollout.problem is not None:
        with contextlib.suppress(Exception):  # then it is the reason of the rollout's failure, and `error` has it
            token_ids = list(rendering.renderer.render(rollout.problem.messages, rollout.problem.tools))
            images = image_spans(rendering.renderer, token_ids, rollout.problem.messages)
    return TriedRollout(
        verified=verified,
        rollout=rollout,
        prompt_pieces=_pieces(token_ids, images, rendering.renderer),
        num_prompt_tokens=len(token_ids),
        turns=tuple(pieces_of_turns(rendering.renderer, rollout.turns, rollout.segments, rollout.calls)),
        segments=tuple(_runs(segment, rendering) for segment in rollout.segments),
    )


def _pieces(token_ids: list[int], images: tuple[ImageSpan, ...], renderer: Renderer) -> Pieces:
    """Return the text of a prompt, with a description of each image in place of its tokens."""
    pieces: Pieces = []
    begin = 0
    for span in images:
        if span.start + span.count <= len(token_ids):
            pieces += [*renderer.pieces(token_ids[begin : span.start]), (image_text(span.image), True)]
            begin = span.start + span.count
    return pieces + renderer.pieces(token_ids[begin:])


def _runs(segment: Segment, rendering: Rendering) -> tuple[TokenRun, ...]:
    tokens = zip(segment.token_ids.numpy().tolist(), segment.loss_mask.numpy().tolist(), strict=True)
    runs = []
    for sampled, run in itertools.groupby(tokens, key=lambda token: bool(token[1])):
        ids = [token for token, _ in run]
        runs.append(TokenRun(text=joined(rendering.renderer.pieces(ids)), num_tokens=len(ids), sampled=sampled))
    return tuple(runs)


def _num_prompt_tokens(mask: list[int]) -> int:
    return mask.index(1) if 1 in mask else len(mask)


# --------------------------------------------------------------------------------------------- output


def _text(tried: TriedRollout, reader: CompletionReader) -> list[str]:
    rollout, problem = tried.rollout, tried.rollout.problem
    lines = [
        f"{tried.verified.ids.rollout_id}  {rollout.status}, {plural(rollout.num_tokens, 'token')} "
        f"in {tried.seconds:.2f} s",
        f"  prompt, {plural(tried.num_prompt_tokens, 'token')}:",
        *_indented(reader.text(tried.prompt_pieces)),
    ]
    starts = segment_starts(rollout.turns, rollout.segments, rollout.calls)
    roles = roles_of_turns(rollout.turns, rollout.segments, rollout.calls)
    for index, (turn, pieces) in enumerate(zip(rollout.turns, tried.turns, strict=True)):
        if index in starts and starts[index].segment > 0:
            lines.append(f"  -- {start_text(starts[index])}")
        cut = ", cut at its limit" if turn.finish_reason == "length" else ""
        tokens = f", {plural(turn.num_tokens, 'token')}{cut}" if turn.role == "assistant" else ", masked"
        shown = pieces if turn.role == "assistant" else [(text, True) for text, _ in pieces]
        speaker = f"{turn.role} as {roles[index]}" if index in roles else turn.role
        lines += [f"  {speaker}{tokens}:", *_indented(reader.text(shown))]
        lines += [f"    -> {line}" for line in turn_lines(turn)]
    if has_many_turns(rollout):
        lines.append(f"  {plural(len(tried.segments), 'segment')}: {'; '.join(map(_segment_text, tried.segments))}")
    if problem is not None and problem.answer is not None:
        lines += ["  reference answer:", *_indented(problem.answer)]
    if rollout.error is not None:
        lines += ["  error:", *_indented(rollout.error)]
    if rollout.metrics:
        lines.append(f"  environment: {numbers(rollout.metrics)}")
    if rollout.posted is not None:
        lines.append(f"  {posted_text(rollout.posted)}")
    return [*lines, *_reward_lines(tried)]


def _reward_lines(tried: TriedRollout) -> list[str]:
    verdict = tried.verified.verdict
    if verdict is None:
        detail = tried.verified.detail or ""
        why = [] if detail == (tried.rollout.error or "") else _indented(detail.strip())
        return [f"  no reward: {tried.verified.reason}", *why]
    lines = [f"  reward {verdict.reward:.6g} by {verdict.scorer}"]
    if verdict.parts != {verdict.scorer: verdict.reward}:
        lines[0] += f": {numbers(verdict.parts)}"
    if verdict.roles:
        lines.append(f"  roles: {role_numbers(verdict.roles)}")
    if verdict.metrics:
        lines.append(f"  measured: {numbers(verdict.metrics)}")
    return [*lines, *_indented((tried.verified.detail or "").strip())] if tried.verified.detail else lines


def _segment_text(runs: tuple[TokenRun, ...]) -> str:
    num_sampled = sum(run.num_tokens for run in runs if run.sampled)
    return f"{plural(sum(run.num_tokens for run in runs), 'token')}, {num_sampled:,} of them sampled"


def _indented(text: str) -> list[str]:
    return [f"    {line}".rstrip() for line in text.split("\n")]
