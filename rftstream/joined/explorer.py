"""A joined sampler: tasks for an engine of the user's own."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from rftstream.contracts.versions import VersionName
from rftstream.desk import AnswerRefused, WorkItem
from rftstream.joined.tasks import JoinedTask, TaskIterator, TaskLoop, plain_reason
from rftstream.joined.worker import RoleThread
from rftstream.policies.base import SampleRequest
from rftstream.policies.joined import Sampled, SamplerDesk

ROUNDING = 1e-5
"""A logprob may be above 0 by this much, by rounding, and then counts as 0."""


class SampleTask(JoinedTask):
    """A completion to sample. `JoinedExplorer.tasks` hands it out."""

    __slots__ = ("_before",)

    _request: SampleRequest

    def __init__(self, item: WorkItem) -> None:
        super().__init__(item)
        self._before: Sampled | None = item.draft  # by a loop that was interrupted

    @property
    def prompt_ids(self) -> list[int]:
        """The tokens before the next one: the prompt, and what another process has sampled of the completion."""
        return [*self._request.token_ids, *([] if self._before is None else self._before.token_ids.tolist())]

    @property
    def num_sampled(self) -> int:
        """How many tokens at the end of `prompt_ids` belong to the completion already."""
        return self._request.num_sampled + self._num_before

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation that the prompt renders, in OpenAI's form."""
        return [_message(asdict(message)) for message in self._request.messages]

    @property
    def sampling(self) -> dict[str, Any]:
        """Settings under vLLM's names: temperature, top_p, top_k, min_p, penalties, min_tokens, max_tokens (of this
        completion), stop, seed."""
        settings = asdict(self._request.sampling)
        return {**settings, "stop": list(settings["stop"]), "max_tokens": self.max_tokens, "seed": self._request.seed}

    @property
    def max_tokens(self) -> int:
        """Most tokens that may be handed in."""
        return self._request.max_tokens - self._num_before

    @property
    def _num_before(self) -> int:
        return 0 if self._before is None else len(self._before.token_ids)

    @property
    def min_version(self) -> int:
        """Oldest version that may sample a token of this task."""
        return self._request.min_version


class JoinedExplorer(TaskLoop[SampleTask]):
    """An explorer whose engine is the user's own. `rftstream.join(RUN, role="explorer")` makes it.

    with rftstream.join("runs/x", role="explorer") as me:
        for task in me.tasks():
            if me.new_version:
                engine.load(me.weights_folder())
            answer = engine.generate(task.prompt_ids, **task.sampling)
            me.finish(task, tokens=answer.ids, logprobs=answer.logprobs, version=me.version)
    """

    _desk: SamplerDesk
    _kind = SampleTask

    def __init__(self, desk: SamplerDesk, thread: RoleThread | None = None) -> None:
        super().__init__(desk, thread)
        self._version: VersionName | None = None

    # ------------------------------------------------------------------------------------------ versions

    @property
    def version(self) -> int | None:
        """Number of the version that the loop's engine has: the one of the last `weights_folder`. Without folders
        (`weights=False`), the newest one. None before the first."""
        name = self._version if self._desk.folders else self._desk.newest
        return None if name is None else name.version

    @property
    def new_version(self) -> bool:
        """Whether there is a version that the loop has not asked `weights_folder` for. True from the first task on.
        False once the loop was told that no more tasks come, and has none in hand."""
        desk = self._desk
        return desk.folders and desk.newest != self._version and bool(desk.num_taken or not desk.was_told)

    def weights_folder(self) -> Path:
        """Return a model folder with the newest version, as transformers, vLLM and SGLang load it. `version` is its
        number from now on. The folder stays until the next call, the last one until `close`."""
        desk = self._desk
        with desk.changed:
            if not desk.folders:
                raise AnswerRefused("weights_folder: this loop joined with weights=False; join without it")
            desk.changed.wait_for(lambda: desk.folder is not None or desk.has_ended)
            desk.check()
            if desk.folder is None:
                raise AnswerRefused("weights_folder: the run has ended, so no version comes; leave the loop")
            before, desk.in_use = desk.in_use, desk.folder
            self._version = desk.newest
        if before is not None and before != desk.in_use:
            shutil.rmtree(before, ignore_errors=True)
        return desk.in_use

    def close(self) -> None:
        """Commit what was handed in, give back the rest, and leave the run. Errors of the role are raised."""
        try:
            super().close()
        finally:
            self._desk.remove_folders()

    # ------------------------------------------------------------------------------------------ tasks

    def tasks(self) -> TaskIterator[SampleTask]:
        """Return the loop over tasks, oldest first. It waits for the next task, and ends when the run has finished or
        `stop` was called. Several tasks may be in hand; `explorer.max_concurrent` are claimed at once. A loop that was
        interrupted is followed by one that begins with what is still in hand."""
        return self._begin()

    def take(self, most: int = 1, *, wait_s: float | None = None) -> list[SampleTask]:
        """Return up to `most` waiting tasks, for an engine that samples many at once. Wait for the first one, at most
        `wait_s` seconds. An empty list without `wait_s` says that no more tasks come: leave the loop."""
        return self._take(most, wait_s)

    def finish(
        self,
        task: SampleTask,
        *,
        tokens: Any,
        logprobs: Any,
        version: int | Sequence[int] | None = None,
        finish_reason: str | None = None,
    ) -> bool:
        """Hand in a completion: all tokens after `task.prompt_ids`, the stop token included, with the logprobs under
        the distribution that was sampled from. `version` sampled all of them, or those that were not saved; or it names
        one version for each token. It is `self.version` by default. `finish_reason` is `stop` or `length`.

        Return False if the task was given to another process meanwhile; the completion then counts for nothing.
        AnswerRefused if it cannot be right; the task stays in hand."""
        sampled = self._sampled(task, tokens, logprobs, version)
        if not len(sampled.token_ids):
            raise AnswerRefused(f"{task.id}: got no tokens, expected at least one, such as the stop token")
        if finish_reason not in (None, "stop", "length"):
            raise AnswerRefused(f"{task.id}: finish_reason: got {finish_reason!r}, expected 'stop' or 'length'")
        if finish_reason is None:
            is_full = len(sampled.token_ids) >= task.max_tokens
            is_cut = is_full and int(sampled.token_ids[-1]) not in self._desk.stop_token_ids
            finish_reason = "length" if is_cut else "stop"
        return self._answer(task, replace(sampled, finish_reason=finish_reason))

    def save(self, task: SampleTask, *, tokens: Any, logprobs: Any, version: int | Sequence[int] | None = None) -> bool:
        """Save what there is of a completion: all tokens after `task.prompt_ids` so far. It is written to the log at
        intervals (`explorer.partial_every_s`), and when this process leaves; whoever has the task then goes on from
        there. The arguments are those of `finish`. Saved tokens cannot be taken back."""
        sampled = self._sampled(task, tokens, logprobs, version)
        return self._if_counts(task, self._desk.draft(task._item, sampled))

    def fail(self, task: SampleTask, reason: str) -> bool:
        """Say that the task cannot be sampled. The rollout is recorded as failed, with the reason."""
        self._check_open(task)
        failed = Sampled(
            token_ids=np.zeros(0, np.int32),
            logprobs=np.zeros(0, np.float32),
            versions=(),
            finish_reason="error",
            error=plain_reason(reason),
        )
        return self._answer(task, failed)

    # ------------------------------------------------------------------------------------------ checks

    def _sampled(self, task: SampleTask, tokens: Any, logprobs: Any, version: int | Sequence[int] | None) -> Sampled:
        self._check_open(task)
        ids = _array(tokens, f"{task.id}: tokens")
        if ids.size and ids.dtype.kind not in "iu":
            raise AnswerRefused(f"{task.id}: tokens: got {ids.dtype} values, expected integers, the tokens' ids")
        size = self._desk.vocabulary_size
        if ids.size and (odd := ids[(ids < 0) | (ids >= size)]).size:
            raise AnswerRefused(
                f"{task.id}: tokens: got the id {int(odd[0])}, expected 0 to {size - 1}, the ids of the run's model; "
                "is it another tokenizer's?"
            )
        if len(ids) > task.max_tokens:
            raise AnswerRefused(
                f"{task.id}: tokens: got {len(ids)}, expected at most {task.max_tokens} (task.max_tokens)"
            )
        found = _array(logprobs, f"{task.id}: logprobs").astype(np.float64)
        if len(found) != len(ids):
            raise AnswerRefused(f"{task.id}: got {len(found)} logprobs for {len(ids)} tokens, expected one for each")
        if not np.isfinite(found).all():
            raise AnswerRefused(f"{task.id}: logprobs: got {found[~np.isfinite(found)][0]}, expected finite numbers")
        if (found > ROUNDING).any():
            raise AnswerRefused(
                f"{task.id}: logprobs: got {found.max():g}, expected at most 0; are they probabilities, or logits?"
            )
        sampled = Sampled(
            token_ids=ids.astype(np.int32),
            logprobs=np.minimum(found, 0.0).astype(np.float32),
            versions=self._versions(task, len(ids), version),
        )
        return _going_on(task, task._item.draft, _after(task._before, sampled))

    def _versions(self, task: SampleTask, count: int, version: int | Sequence[int] | None) -> tuple[VersionName, ...]:
        """Return the version of each token. `version` may name them all, or those that were not saved."""
        draft: Sampled | None = task._item.draft
        saved = () if draft is None else draft.versions[task._num_before :][:count]
        version = self.version if version is None else version
        if version is None:
            raise AnswerRefused(f"{task.id}: version: got none, expected one; load `weights_folder()` first")
        if isinstance(version, int | np.integer):
            return (*saved, *[self._name(task, int(version))] * (count - len(saved)))
        if isinstance(version, str | float) or getattr(version, "ndim", 1) == 0:
            what = f"a {type(version).__name__}"
            raise AnswerRefused(f"{task.id}: version: got {what}, expected a version's number, or one for each token")
        numbers = _array(version, f"{task.id}: version").tolist()
        if len(numbers) != count:
            raise AnswerRefused(f"{task.id}: version: got {len(numbers)} for {count} tokens, expected one for each")
        names = {number: self._name(task, number) for number in set(numbers[len(saved) :])}
        return (*saved, *(names[number] for number in numbers[len(saved) :]))

    def _name(self, task: SampleTask, version: int) -> VersionName:
        known, newest = self._desk.known, self._desk.newest
        if version not in known:
            raise AnswerRefused(
                f"{task.id}: version: got {version}, which this loop was never given, expected "
                f"{'one after weights came' if newest is None else f'at most {newest.version}'}; hand in `me.version`"
            )
        if version < task.min_version:
            raise AnswerRefused(
                f"{task.id}: version: got {version}, expected at least {task.min_version} (task.min_version): the run "
                "takes no older tokens; load `me.weights_folder()` and sample again"
            )
        return known[version]


def _after(before: Sampled | None, sampled: Sampled) -> Sampled:
    """Return the tokens with those before them that an interrupted loop has saved."""
    if before is None:
        return sampled
    return Sampled(
        token_ids=np.concatenate([before.token_ids, sampled.token_ids]),
        logprobs=np.concatenate([before.logprobs, sampled.logprobs]),
        versions=(*before.versions, *sampled.versions),
    )


def _going_on(task: SampleTask, draft: Sampled | None, sampled: Sampled) -> Sampled:
    """Return the tokens, which must begin with the saved ones: those may be on the log."""
    if draft is None:
        return sampled
    count = len(draft.token_ids)
    if len(sampled.token_ids) < count or (sampled.token_ids[:count] != draft.token_ids).any():
        raise AnswerRefused(
            f"{task.id}: tokens: got others than the {count} that were saved, expected these and what follows"
        )
    return replace(sampled, logprobs=np.concatenate([draft.logprobs, sampled.logprobs[count:]]))


def _array(values: Any, what: str) -> np.ndarray:
    """Return a sequence of numbers (list, array, tensor) as an array with one axis."""
    kind = type(values).__name__
    if isinstance(values, list | tuple):
        values = [one.detach().cpu() if hasattr(one, "detach") else one for one in values]
    elif hasattr(values, "detach"):
        values = values.detach().cpu()
        values = (values.double() if values.is_floating_point() else values).numpy()  # numpy has no bfloat16
    try:
        found = np.asarray(values)
    except (ValueError, TypeError):
        found = np.zeros((0, 0))
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iuf"):
        odd = [one for one in values if type(one) not in (int, float)] if isinstance(values, list) else []
        shape = f" of shape {found.shape}" if found.size and found.ndim > 1 else ""
        what_is = shape or (f" with a {type(odd[0]).__name__}" if odd else "")
        raise AnswerRefused(f"{what}: got {kind}{what_is}, expected a row of numbers")
    return found


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without its empty fields."""
    kept = {name: list(value) if isinstance(value, tuple) else value for name, value in message.items() if value}
    return {"role": message["role"], "content": message["content"], **kept}
