"""Scores a run's recorded rollouts with another reward: a new run that imports them and scores them with real
verifiers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from rftstream.algorithms.reward_changes import differs
from rftstream.clock import SystemClock
from rftstream.config.parts import registry
from rftstream.config.parts.part_specs import RewardSpec
from rftstream.config.parts.reward_uses import reward_names
from rftstream.config.role_sections import FeedbackSection
from rftstream.config.sections import RunConfig
from rftstream.contracts.control import RunManifest
from rftstream.contracts.verdicts import VerifiedRollout
from rftstream.data.tasksets.base import Taskset
from rftstream.data.tasksets.open import grows, open_taskset
from rftstream.errors import ConfigError
from rftstream.preflight.plan import Purpose, plan
from rftstream.queries.decoding import decoded
from rftstream.queries.people.feedback import read_feedback
from rftstream.queries.people.taints import judged_now
from rftstream.queries.records.dead import error_kinds, read_letters
from rftstream.replay.judged import JudgedImport
from rftstream.replay.mended import MendedImport, Operated
from rftstream.rewards.resolve import build_reward
from rftstream.roles.verifier import VERIFIER
from rftstream.runs.folder import OpenRun, RunFolder, open_run, shown_path
from rftstream.runs.making.create import write_config
from rftstream.runs.making.fork import begun_config, check_begun_with, derive_for_groups, differences
from rftstream.runs.making.imported import RolloutImport, check_whole
from rftstream.runs.making.made_from import begun_log
from rftstream.runs.manifest import data_digests, make_manifest
from rftstream.runs.services import build_service, drive, role_context
from rftstream.runs.writes.additions import Say
from rftstream.service.control_view import read_manifest
from rftstream.service.role import Log
from rftstream.service.service import Service
from rftstream.transport.base import Transport

SCORED_BY = ("tasksets.", "rewards.", "verifier.", "feedback.")
"""Prefixes of the settings that verdicts may depend on."""
SCORER = "scorer of "
"""Beginning of a line of the manifest with a taskset's scorer and its version."""
PROBLEMS = "problems of "
"""Beginning of a line of the manifest with a taskset whose rollouts are scored by the answers of its data now."""
NUM_KINDS = 3
"""Most kinds of errors that are told after scoring."""
FEEDBACK = "feedback"
"""Used instead of a reward's name: the judgements of people."""


def rescore(
    source: OpenRun, into: Path, *, reward: str | None, sets: Sequence[str] = (), say: Say, new_answers: bool = False
) -> OpenRun:
    """Return the new run, with all of its rollouts scored. `reward`: as `rftstream rescore --reward` has it; None:
    each taskset's own, by its code as it is now. `new_answers`: by the answers and columns that the data has now.

    After a crash, a second call continues where the first one stopped. If nothing is left to do, it does nothing.
    """
    folder = RunFolder(into.resolve())
    by_people = reward == FEEDBACK
    if by_people and new_answers:
        raise ConfigError(
            "--new-answers: people give the reward (--reward feedback), and read no answer; leave one out"
        )
    config = _config(source, folder, reward, sets)
    planned = plan(config, Purpose.build)
    config = planned.config
    if new_answers and all(grows(section.source) for section in config.tasksets.values()):
        raise ConfigError(
            "--new-answers: all problems come from the run itself, and have the same answers; leave it out"
        )
    for note in planned.notes:
        say(note)
    scorers = {} if by_people else _scorers(config)  # before anything is made
    if not folder.exists():
        check_whole(source.transport, "tasks", "rollouts", *(("verified",) if by_people else ()))
    with folder.held():
        begun = begun_config(source, folder, config, has_versions=False)
        check_begun_with(begun, config, folder, lambda line: line.startswith(SCORED_BY))
        with begun_log(source, folder, config) as (transport, model):
            if not folder.exists():
                write_config(config, folder)
            tasksets = {name: open_taskset(name, section, config) for name, section in config.tasksets.items()}
            digests = data_digests(config, model, tasksets)
            mended = {
                name: one for name, one in tasksets.items() if new_answers and not grows(config.tasksets[name].source)
            }
            judged_by = [
                *_lines(scorers),
                *(f"{PROBLEMS}{name} -> as now, {one.digest}" for name, one in mended.items()),
            ]
            operated = Operated(config, tasksets) if mended else None
            copy = _import_of(source, transport, folder, say, by_people=by_people, mended=mended, operated=operated)
            _check_begun(read_manifest(transport), judged_by, folder)
            if not mended:
                say_same(source, scorers, say)
                say_given(config, scorers, say)
                say_other_problems(source, digests, say)
            said = ("verdicts of the scorer -> of people, where they judged",) if by_people else ()
            changed = (*differences(source, config), *said, *judged_by)
            copy.run(lambda: make_manifest(config, folder.run_id, digests, time.time(), changed))
            _score(config, folder, transport, say)
    return open_run(folder.path)


def _scorers(config: RunConfig) -> dict[str, str]:
    """Return the scorer of each taskset, with its version."""
    scorers = {}
    for name, section in config.tasksets.items():
        reward = build_reward(section.reward, config, where=f"tasksets.{name}.reward", section=section)
        scorers[name] = f"{reward.scorer} {reward.version}"
    return scorers


def _lines(scorers: dict[str, str]) -> list[str]:
    return [f"{SCORER}{name} -> {scorer}" for name, scorer in scorers.items()]


def _check_begun(manifest: RunManifest | None, now: Sequence[str], folder: RunFolder) -> None:
    """Raise ConfigError if the new run was begun with other code of a scorer, or with other answers, so that its
    verdicts would be mixed or stale."""
    if manifest is None:
        return
    before = [line for line in manifest.changed if line.startswith((SCORER, PROBLEMS))]
    if before and before != list(now):
        then, found = (
            "; ".join(one for one in these if one not in those) or "recorded problems"
            for these, those in ((before, now), (now, before))
        )
        raise ConfigError(
            f"--into {shown_path(folder.path)}: was begun with {then}, but found other code or data by now: {found}; "
            "nothing is scored twice there, take another folder"
        )


def say_same(source: OpenRun, scorers: dict[str, str], say: Say) -> None:
    """Say which scorers are those that all of the source's rollouts were scored by."""
    left, seen = dict(scorers), set()
    for record in Log(source.transport).read("verified") if left else ():
        verified = decoded(record, VerifiedRollout)
        if verified is None or verified.verdict is None or (name := verified.ids.taskset) not in left:
            continue
        seen.add(name)
        if differs(left[name], verified.verdict.scored_by):
            del left[name]
        if not left:
            return
    for name in sorted(left.keys() & seen):
        say(
            f"{name}: {left[name]} has scored all of {source.run_id}, too: nothing can change, except by what it asks "
            "or imports from elsewhere"
        )


def say_given(config: RunConfig, scorers: Iterable[str], say: Say) -> None:
    """Say of which tasksets the environment gave the reward: that reward is recorded, and nothing is played again."""
    for name in scorers:
        uses = reward_names(config.tasksets[name].reward)
        if any(registry.find_spec(RewardSpec, one).takes_given for one in uses):
            say(
                f"{name}: the reward of its environment is taken as it was recorded with each rollout; what the "
                "environment says since a change of its code or settings, only new rollouts tell (`rftstream evaluate`)"
            )


def say_other_problems(source: OpenRun, digests: Mapping[str, str], say: Say) -> None:
    """Say which tasksets have other data by now: mended answers or tests are not those that rollouts are judged by."""
    manifest = read_manifest(source.transport)
    for key, digest in sorted(digests.items()):
        kind, _, name = key.partition(".")
        if kind == "taskset" and manifest is not None and manifest.digests.get(key, digest) != digest:
            say(
                f"{name}: its data has changed since {source.run_id} began, but rollouts are scored by the answers and "
                "columns that they were sampled with; --new-answers, into another folder, scores by those of now"
            )


def _import_of(
    source: OpenRun,
    transport: Transport,
    folder: RunFolder,
    say: Say,
    *,
    by_people: bool,
    mended: Mapping[str, Taskset],
    operated: Operated | None,
) -> RolloutImport:
    """Return the import that copies the rollouts. With `by_people`, the verdicts come from people's judgements.
    `mended`: tasksets whose answers are taken, as `operated`."""
    if operated is not None:
        return MendedImport(source.transport, transport, folder.run_id, say, mended, operated)
    if not by_people:
        return RolloutImport(source.transport, transport, folder.run_id, say)
    view = read_feedback(Log(source.transport), source.config)
    rewards = judged_now(view, source.config.feedback or FeedbackSection())
    if not rewards.num_rewards:
        raise ConfigError(
            f"{source.run_id}: nobody has judged a rollout by {(source.config.feedback or FeedbackSection()).ask}, "
            "expected votes; `rftstream feedback add RUN --from FILE` adds some"
        )
    say(f"{rewards.num_rewards:,} rollouts have the reward that people gave, the others keep theirs")
    return JudgedImport(source.transport, transport, folder.run_id, say, rewards)


def _config(source: OpenRun, folder: RunFolder, reward: str | None, sets: Sequence[str]) -> RunConfig:
    """Return the source's config with the new reward, if there is one. Judgements of people need no verifier."""
    if reward == FEEDBACK:
        changes = ["verifier.count=0"]
    elif reward is None:
        changes = []
    else:
        value = reward if reward.lstrip().startswith(("[", "{")) else json.dumps(reward)
        changes = [f'tasksets."{name}".reward={value}' for name in source.config.tasksets]
    needs, made = "rollouts to score", "rollouts that are scored again"
    return derive_for_groups(source, folder, [*changes, *sets], needs=needs, made=made)


def _score(config: RunConfig, folder: RunFolder, transport: Transport, say: Say) -> None:
    """Run a verifier of the new run until all rollouts are scored."""
    if not sum(transport.admin.lag(VERIFIER.name, "rollouts").values()):
        return
    ends = transport.admin.end_offsets("rollouts")
    context = role_context(config=config, folder=folder, transport=transport, clock=SystemClock(), process="rescore")
    service = build_service(VERIFIER.name, context)

    def progress(service: Service) -> str:  # a count of records would have to read them
        return f"{sum(service.done_up_to().values()) / max(1, sum(ends.values())):.0%} of the rollouts scored"

    with closing(drive(service, say, progress)) as slices:
        for done in (service.done_up_to() for _ in slices):
            if all(done.get(place, -1) >= end for place, end in ends.items()):
                break
    say("all rollouts are scored")
    for kind in error_kinds(read_letters(Log(transport)))[:NUM_KINDS]:
        say(f"{kind.count:,} of them without a reward, {kind.reason}: {kind.error}")
