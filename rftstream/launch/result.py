"""The end of a run, as `run` and `resume` return it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rftstream.contracts.role_names import RoleName
from rftstream.contracts.versions import EvalResult
from rftstream.errors import RUN_LOST, RftError, StopRule
from rftstream.queries.formatting import plural, size
from rftstream.queries.records.dead import error_kinds, read_dead
from rftstream.queries.state.disk import disk_bytes
from rftstream.runs.folder import RunFolder, read_config, shown_path
from rftstream.runs.observer import Observer
from rftstream.service.role import Log


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The state of a run when `run` or `resume` returned. `result_of` makes it."""

    run_dir: Path
    steps: int
    """Steps trained in all, those before a resume included."""
    new_steps: int
    """Steps that this command trained."""
    version: int
    reward_first: float | None
    """Mean over the first tenth of the steps, of at most 100; None if nothing was scored, or by another reward."""
    reward_last: float | None
    reward_since: int = 0
    """First version that the reward of now has scored; 0: it scored all, as far as the kept steps say."""
    wall_s: float
    """Seconds that this command took, with the start of the processes."""
    reason: str
    """Reason of the end: steps, hours, reward, taskset, ...; interrupted or failed."""
    exit_code: int = 0
    final: Path | None = None
    """The trained model, an ordinary Hugging Face model folder."""
    error: str | None = None
    evaluations: Mapping[str, Mapping[str, float | int | None]] = field(default_factory=dict)
    """Evaluation -> its mean at the first and at the newest evaluated version, with these versions."""
    disk_bytes: int = 0
    """Bytes of the run folder."""
    dead_groups: int = 0
    """Groups that died and were neither put back nor dropped."""
    no_reward: int = 0
    """Rollouts that got no reward while this command ran, also those whose group did not die."""
    no_reward_why: str = ""
    """The most frequent error of these."""
    sampled_by: Path | None = None
    """The run that sampled all rollouts of this one, which `replay --into` or `rescore` made: no reward here says what
    this run's model does."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, with paths as texts."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}

    def summary(self) -> str:
        """Return the summary that is shown at the end."""
        folder = shown_path(self.run_dir)
        lines = [f"{folder}: {self._steps_done()}; ended by: {self.reason}"]
        is_news = self.new_steps > 0 or self.reason not in ("interrupted", "failed")  # else `run` told it before
        if not is_news:
            pass
        elif self.reward_first is not None and self.reward_last is not None:
            whose = f", of what {shown_path(self.sampled_by)} sampled" if self.sampled_by else ""
            lines.append(f"reward {self.reward_first:.3f} -> {self.reward_last:.3f} (first and last tenth{whose})")
        elif self.reward_last is not None:
            why = (
                f"another one scored before version {self.reward_since}" if self.reward_since else "the first have none"
            )
            lines.append(f"reward {self.reward_last:.3f} (last tenth of the steps; {why})")
        for name, result in self.evaluations.items() if is_news else ():
            first, last = ("-" if mean is None else f"{mean:.3f}" for mean in (result["first"], result["last"]))
            begin, end = result["first_version"], result["last_version"]
            changed = f"{first} -> {last} (versions {begin} and {end})" if begin != end else f"{last} (version {end})"
            lines.append(f"evaluation {name} {changed}")
        if self.final is not None:
            lines.append(f"the model is in {shown_path(self.final)}")
        if not RunFolder(self.run_dir).exists():
            return "\n".join([*lines, f"nothing was begun; the logs are in {folder}/logs"])
        lines.append(f"disk: {size(self.disk_bytes)} in {folder}")
        new, in_all = ("new ", " in all") if self.new_steps < self.steps else ("", "")
        if self.no_reward:
            why = f", most of them: {self.no_reward_why}" if self.no_reward_why else ""
            lines.append(
                f"{plural(self.no_reward, f'{new}rollout')} without a reward{why}: `rftstream dead list {folder}`"
            )
        if self.dead_groups:
            back = "" if self.sampled_by else f", `rftstream dead retry {folder} --all` puts them back"
            what = "are not trained here" if self.sampled_by else f"died{in_all}"
            died = f"{plural(self.dead_groups, 'group')} {what}"
            lines.append(f"{died}: `rftstream dead list {folder}` says {'why' if self.sampled_by else 'of what'}{back}")
        if self.reason == "interrupted" or self.exit_code:
            if self.exit_code != RUN_LOST:
                lines.append(f"go on with: rftstream resume {folder}")
        else:
            lines.append(f"look closer with: rftstream studio {folder}    or `audit`, `plot`, `trace`")
        return "\n".join(lines)

    def _steps_done(self) -> str:
        if self.new_steps == self.steps:
            return f"{plural(self.steps, 'step')} in {self.wall_s:.1f} s"
        if self.new_steps > self.steps:  # a trainer died, and the next one began at its checkpoint
            again = plural(self.new_steps - self.steps, "step")
            return f"{plural(self.steps, 'step')} in {self.wall_s:.1f} s, and {again} that had to be trained again"
        new = plural(self.new_steps, "new step") if self.new_steps else "no new step"
        return f"{new} in {self.wall_s:.1f} s, {self.steps:,} in all"


def result_of(
    folder: RunFolder,
    observer: Observer,
    reason: str,
    exit_code: int,
    began: float,
    error: str | None = None,
    *,
    new_steps: int = 0,
) -> RunResult:
    """Return the result of a run, as its log records it, after a command that trained `new_steps`."""
    curve, finished = observer.curve, observer.control.finished
    imported_from = read_config(folder).run.imported_from if folder.exists() else None
    return RunResult(
        run_dir=folder.path,
        steps=curve.num_steps,
        new_steps=new_steps,
        version=curve.version,
        reward_first=curve.reward_first(),
        reward_last=curve.reward_last(),
        reward_since=curve.changed_at,
        wall_s=round(time.monotonic() - began, 3),
        reason=reason,
        exit_code=exit_code,
        final=folder.final if finished is not None and folder.final.is_dir() else None,
        error=error,
        evaluations={name: _means(*results) for name, results in observer.evaluations.items()},
        disk_bytes=sum(disk_bytes(folder).values()),
        **(_dead(observer, time.time() - (time.monotonic() - began)) if exit_code in (0, StopRule.exit_code) else {}),
        sampled_by=Path(imported_from) if imported_from else None,
    )


def _dead(observer: Observer, since: float) -> dict[str, Any]:
    """Return how many groups are dead and not put back, and how many rollouts got no reward since a time; nothing if
    the log does not answer any more."""
    with suppress(RftError):
        view = read_dead(Log(observer.transport), now=time.time())
        letters = [letter for letter in view.letters if letter.role == RoleName.verifier and letter.at >= since]
        why = next((kind.error for kind in error_kinds(reversed(letters))), "")
        num_dead = sum(group.state == "dead" for group in view.groups)
        return {"dead_groups": num_dead, "no_reward": len(letters), "no_reward_why": why}
    return {}


def _means(first: EvalResult, last: EvalResult) -> dict[str, float | int | None]:
    return {
        "first": first.metrics.get("mean"),
        "first_version": first.name.version,
        "last": last.metrics.get("mean"),
        "last_version": last.name.version,
    }
