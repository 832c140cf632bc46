"""One realistic message of each contract, and more where it has forms that exclude each other.

    python -m tests.contracts.samples     writes the golden files that do not exist yet

A golden file that exists is never written again: it stands for what is on somebody's log. Who changes a contract
adds a field with a default to the newest sample *and raises the version*, or leaves the sample as it is. A new header
needs no version, as readers pass over headers that they do not know: it gets a sample of its own, a form of the newest
version (`partial_rollout.v6-given`).
"""

from __future__ import annotations

import base64
import dataclasses
import json
from pathlib import Path
from typing import Any

from rftstream.contracts.arrays import Array
from rftstream.contracts.batches import BatchManifest
from rftstream.contracts.codec import encode, headers_of, key_of
from rftstream.contracts.control import (
    Claim,
    DesiredState,
    Drawn,
    Request,
    RequestKind,
    RunFinished,
    RunManifest,
    RunState,
    TasksEnded,
    Trimmed,
)
from rftstream.contracts.dead import DeadDropped, DeadLetter
from rftstream.contracts.demonstrations import Demonstration, Preference
from rftstream.contracts.feedback import GOLD_ANNOTATOR, Feedback, FeedbackKind, PairChoice
from rftstream.contracts.messages import MESSAGES, SPEC_OF, Message
from rftstream.contracts.outcomes import (
    BatchReuse,
    GroupOutcome,
    GroupResult,
    GroupUse,
    MaskedSpan,
    OperatorAction,
    OperatorDecision,
    ReuseKind,
    ReuseOffer,
    RolloutSummary,
)
from rftstream.contracts.problems import (
    NewProblem,
    ProblemKind,
    ProblemMaker,
    RejectedProblem,
    RejectReason,
    problem_digest,
)
from rftstream.contracts.questions import Applied, Judgement, Question, QuestionReason, VoteEffect
from rftstream.contracts.rollouts import (
    PartialRollout,
    Posted,
    RolloutStatus,
    SavedCall,
    Segment,
    StoredState,
    VersionSpan,
)
from rftstream.contracts.summaries import (
    KeptVersion,
    MissingSiblings,
    OutcomesSummary,
    StepsSummary,
    Summary,
    VersionRun,
    WeightsSummary,
)
from rftstream.contracts.tasks import ChatMessage, Task
from rftstream.contracts.verdicts import UnscorableReason, VerifiedRollout
from rftstream.contracts.versions import (
    DeltaObject,
    EvalResult,
    StepRecord,
    StepTotals,
    VersionName,
    WeightsAnnounced,
    WeightsKind,
)
from tests.contracts.sample_parts import (
    ANNOTATOR,
    CALLING_TURNS,
    EXPERIENCE,
    EXPERIENCES_DIGEST,
    EXPERT,
    IDS,
    MODEL_CALL,
    PAIR,
    POSTED_ROLLOUT,
    PROBLEM,
    QUESTION,
    REACHED,
    REWORDED,
    ROLLOUT,
    SAMPLING,
    SEEN_PROBLEM,
    SEEN_SEGMENTS,
    SEGMENTS,
    STEP,
    TURNS,
    VERDICT,
)

COMMON_HEADERS = ("contract", "contract_version", "run", "writer_epoch")
GOLDEN = Path(__file__).parents[2] / "schemas" / "golden"

SAMPLES: dict[str, Message] = {
    "task.v1": Task(
        ids=IDS, problem=PROBLEM, sampling=SAMPLING, seed=8070450532247928832, environment="tools",
        stored_rollout="rollouts[1]@8172", created_at=1767225599.0,
    ),
    "task.v2": Task(ids=IDS, problem=SEEN_PROBLEM, sampling=SAMPLING, seed=17, created_at=1767225599.0),
    "task.v3": Task(
        ids=IDS, problem=PROBLEM, sampling=SAMPLING, seed=8070450532247928832, created_at=1767225599.0, seen=12,
    ),
    "task.v4": Task(
        ids=IDS, problem=PROBLEM, sampling=SAMPLING, seed=8070450532247928832, created_at=1767225599.0, seen=12,
        problems_end=41,
    ),
    "rollout.v1": ROLLOUT,
    "rollout.v2": POSTED_ROLLOUT,
    "rollout.v3": dataclasses.replace(ROLLOUT, problem=SEEN_PROBLEM, segments=SEEN_SEGMENTS),
    "rollout.v4": dataclasses.replace(POSTED_ROLLOUT, posted=REACHED),
    "partial_rollout.v1": PartialRollout(
        ids=IDS, piece=1, turns=TURNS[:1], segments=SEGMENTS, num_tokens=7, environment_state=b"\x82\xa1n\x01\xa1m\xc0",
        sampler_state=bytes(range(16)), saved_at=1767225605.75,
    ),
    "partial_rollout.v2": PartialRollout(
        ids=IDS, piece=2, turns=TURNS[1:2],
        segments=(
            Segment(
                token_ids=Array.of([151, 28, 36], "int32"), behavior_logprobs=Array.of([-2, 0, -0.0625], "float32"),
                loss_mask=Array.of([1, 0, 1], "uint8"),
                versions=(
                    VersionSpan(start=0, count=1, trainer_epoch=1, version=2),
                    VersionSpan(start=2, count=1, trainer_epoch=2, version=3),
                ),
            ),
        ),
        num_tokens=2, environment_state=b"\x81\xa1n\x02", saved_at=1767225607.75, continues=True, kept_messages=1,
        messages=(ChatMessage(role="assistant", content="4"), *QUESTION), metrics={"turns": 1.0},
        started_at=1767225600.25, explorer="explorer-1",
    ),
    "partial_rollout.v3": PartialRollout(
        ids=IDS, piece=1, turns=CALLING_TURNS[:1], segments=SEGMENTS, num_tokens=7, environment_state=b"\x81\xa1n\x01",
        saved_at=1767225605.75, started_at=1767225600.25, explorer="explorer-1",
        posted=Posted(reward=None, parts={"polite": 0.25}), session="sha256:" + "4d" * 32, calls=(MODEL_CALL,),
        saved_calls=(
            SavedCall(
                answer=b'{"id":"msg-1"}', parent=0, messages=(ChatMessage(role="user", content="go on"),),
                tools=({"type": "function", "function": {"name": "calculate"}},),
            ),
        ),
    ),
    "partial_rollout.v4": PartialRollout(
        ids=IDS, piece=2, turns=TURNS[1:2], segments=SEGMENTS, num_tokens=7, saved_at=1767225607.75, kept_messages=1,
        messages=(ChatMessage(role="assistant", content="4"), *QUESTION), started_at=1767225600.25,
        explorer="explorer-1",
        stored_state=StoredState(
            object="states/gsm8k-grpo/17/gsm8k/0/17/0/3/6f1d2c3b4a59-4-" + "8c" * 32, num_bytes=1 << 20,
            digest="sha256:" + "8c" * 32,
        ),
    ),
    "partial_rollout.v5": PartialRollout(
        ids=IDS, piece=0, turns=TURNS[:1], segments=SEEN_SEGMENTS, num_tokens=7, saved_at=1767225605.75,
        started_at=1767225600.25, explorer="explorer-1",
    ),
    "partial_rollout.v6": PartialRollout(
        ids=IDS, piece=2, turns=TURNS[:1], segments=SEGMENTS, num_tokens=7, saved_at=1767225605.75, posted=REACHED,
    ),
    "partial_rollout.v6-given": PartialRollout(
        ids=IDS, piece=0, turns=(), segments=(), num_tokens=0, saved_at=1767225605.75, started_at=1767225600.25,
        explorer="explorer-1", session="sha256:" + "4d" * 32,
    ),
    "verified_rollout.v1": VerifiedRollout(ids=IDS, rollout=ROLLOUT, verdict=VERDICT, verified_at=1767225612.0),
    "verified_rollout.v2": VerifiedRollout(
        ids=IDS, rollout=POSTED_ROLLOUT, verdict=None, reason=UnscorableReason.no_reward,
        detail="environment: the environment gave no reward", verified_at=1767225612.0,
    ),
    "verified_rollout.v3": VerifiedRollout(
        ids=IDS, rollout=dataclasses.replace(ROLLOUT, problem=SEEN_PROBLEM, segments=SEEN_SEGMENTS), verdict=VERDICT,
        verified_at=1767225612.0,
    ),
    "verified_rollout.v4": VerifiedRollout(
        ids=IDS, rollout=dataclasses.replace(POSTED_ROLLOUT, posted=REACHED), verdict=VERDICT, verified_at=1767225612.0,
    ),
    "verified_rollout.v1-undecodable": VerifiedRollout(
        ids=IDS, rollout=None, verdict=None, reason=UnscorableReason.undecodable,
        detail="rollouts[1]@8172 rollout.v1 $.turns[0].content: got int, expected str", verified_at=1767225612.0,
    ),
    "demonstration.v1": Demonstration(
        demonstration_id="gpt-traces/17", source="traces.jsonl",
        messages=(*QUESTION, ChatMessage(role="assistant", content="4")), weight=0.25, info={"grade": "A"},
    ),
    "demonstration.v1-preference": Demonstration(
        demonstration_id="pairs/3", source="pairs.parquet",
        preference=Preference(
            prompt=QUESTION, chosen=(ChatMessage(role="assistant", content="4"),),
            rejected=(ChatMessage(role="assistant", content="5"),),
        ),
    ),
    "demonstration.v2": Demonstration(
        demonstration_id="1f5ad3f4a98fd3b5a3c9a3b84e34a6f1", source="traces.jsonl",
        messages=(*QUESTION, ChatMessage(role="assistant", content="4")), number=17,
    ),
    "demonstration.v3": Demonstration(
        demonstration_id="1f5ad3f4a98fd3b5a3c9a3b84e34a6f2", source="traces.jsonl",
        messages=(SEEN_PROBLEM.messages[1], ChatMessage(role="assistant", content="4")), number=18,
    ),
    "problem.v1": NewProblem(
        problem_id="gsm8k/0/17/0/outcomes/reworded/1", taskset="more", problem=REWORDED,
        digest=problem_digest(REWORDED), maker=ProblemMaker.model, made_by="writer-8b",
        kind=ProblemKind.reworded, parent="gsm8k/17", parent_group="gsm8k/0/17/0", version=STEP,
        num_samples=4, num_agreed=3, made_at=1767225610.5,
    ),
    "problem.v1-given": NewProblem(
        problem_id="more/given/1f5ad3f4a98fd3b5a3c9a3b84e34a6f1", taskset="more", problem=REWORDED,
        digest=problem_digest(REWORDED), maker=ProblemMaker.person, made_by="ada", made_at=1767225599.0,
    ),
    "rejected_problem.v1": RejectedProblem(
        problem_id="gsm8k/0/17/0/outcomes/harder/0", taskset="more", kind=ProblemKind.harder, parent="gsm8k/17",
        parent_group="gsm8k/0/17/0", made_by="writer-8b", reason=RejectReason.disagreed,
        detail="1 of 4 attempts had its answer, expected 2 to 4", said='{"problem": "...", "answer": "73"}',
        version=STEP, num_samples=4, num_agreed=1, made_at=1767225611.0,
    ),
    "feedback.v1": Feedback(
        feedback_id="web/ada/gsm8k/0/17/0/3", rollout_id=IDS.rollout_id, source="web/ada", reward=-1.0,
        comment="right number, wrong reason", given_at=1767229200.0,
    ),
    "feedback.v2": Feedback(
        feedback_id=f"correction/{IDS.rollout_id}/{ANNOTATOR}/1", rollout_id=IDS.rollout_id, source="file",
        comment="right number, wrong unit", given_at=1767229300.0, kind=FeedbackKind.correction,
        question_id=f"correction/{IDS.rollout_id}", rollouts=(IDS.rollout_id,), sequence=17, annotator=ANNOTATOR,
        revision=1, correction="4 apples", lead_time_s=31.5,
    ),
    "feedback.v2-pair": Feedback(
        feedback_id=f"{PAIR}/{ANNOTATOR}/0", rollout_id="gsm8k/0/17/0/1", source="file", given_at=1767229300.0,
        kind=FeedbackKind.pair, question_id=PAIR, rollouts=("gsm8k/0/17/0/1", "gsm8k/0/17/0/3"), sequence=17,
        annotator=ANNOTATOR, choice=PairChoice.second, order=(1, 0), lead_time_s=8.25,
    ),
    "feedback.v2-gold": Feedback(
        feedback_id=f"{PAIR}/{GOLD_ANNOTATOR}/0", rollout_id="gsm8k/0/17/0/1", source="file", given_at=1767229301.0,
        kind=FeedbackKind.pair, question_id=PAIR, rollouts=("gsm8k/0/17/0/1", "gsm8k/0/17/0/3"), sequence=17,
        annotator=GOLD_ANNOTATOR, choice=PairChoice.first,
    ),
    "question.v1": Question(
        question_id=PAIR, kind=FeedbackKind.pair, rollouts=("gsm8k/0/17/0/1", "gsm8k/0/17/0/3"),
        group_id="gsm8k/0/17/0", sequence=17, reason=QuestionReason.share, quorum=2, asked_at=1767229200.0,
        expires_at=1767315600.0, held_until=1767229800.0, order=(1, 0),
    ),
    "judgement.v1": Judgement(
        judgement_id="5/812", feedback_id=f"label/{IDS.rollout_id}/{ANNOTATOR}/0", effect=VoteEffect.counted,
        question_id=f"label/{IDS.rollout_id}", kind=FeedbackKind.label, rollouts=(IDS.rollout_id,), quorum=2,
        num_votes=3, agreement=0.75, reward=1.0, applied=Applied.correction, result=GroupResult.batched,
        batch_sequence=3, decided_at=1767229310.0,
    ),
    "judgement.v1-pair": Judgement(
        judgement_id="5/813", feedback_id=f"{PAIR}/{ANNOTATOR}/0", effect=VoteEffect.counted, question_id=PAIR,
        kind=FeedbackKind.pair, rollouts=("gsm8k/0/17/0/1", "gsm8k/0/17/0/3"), quorum=1, num_votes=1, agreement=1.0,
        choice=PairChoice.second, applied=Applied.pair, decided_at=1767229311.0,
    ),
    "judgement.v1-correction": Judgement(
        judgement_id="5/814", feedback_id=f"correction/{IDS.rollout_id}/{ANNOTATOR}/1", effect=VoteEffect.counted,
        question_id=f"correction/{IDS.rollout_id}", kind=FeedbackKind.correction, rollouts=(IDS.rollout_id,), quorum=1,
        num_votes=1, agreement=1.0, correction=f"correction/{IDS.rollout_id}/{ANNOTATOR}/1",
        applied=Applied.correction, decided_at=1767229312.0,
    ),
    "judgement.v1-flag": Judgement(
        judgement_id="5/815", feedback_id=f"flag/{IDS.rollout_id}/{ANNOTATOR}/0", effect=VoteEffect.counted,
        question_id=f"flag/{IDS.rollout_id}", kind=FeedbackKind.flag, rollouts=(IDS.rollout_id,), quorum=1,
        num_votes=1, agreement=1.0, flagged=True, reason="the group is filtered", result=GroupResult.filtered,
        decided_at=1767229313.0,
    ),
    "judgement.v1-gold": Judgement(
        judgement_id="5/816", feedback_id=f"{PAIR}/{GOLD_ANNOTATOR}/0", effect=VoteEffect.gold, question_id=PAIR,
        kind=FeedbackKind.pair, rollouts=("gsm8k/0/17/0/1", "gsm8k/0/17/0/3"), decided_at=1767229314.0,
    ),
    "experience.v1": EXPERIENCE,
    "experience.v1-expert": EXPERT,
    "experience.v2": dataclasses.replace(EXPERIENCE, segments=SEEN_SEGMENTS),
    "experience.v3": dataclasses.replace(EXPERIENCE, reward=1.15, terms={"short": 0.25}, verified_reward=0.9),
    "experience.v4": dataclasses.replace(EXPERIENCE, batch_sequence=5, weight=0.25, use=2),
    "batch_manifest.v1": BatchManifest(
        batch_sequence=3, share=1, num_shares=2, count=2,
        digest=EXPERIENCES_DIGEST,
        groups=("gsm8k/0/17/0", "experts/0/2/0"), num_groups=4, total_groups=16, last=True, admitted=17,
        max_staleness=1,
        metrics={"reward_mean": 0.4375, "filtered_share": 0.125},
    ),
    "batch_manifest.v2": BatchManifest(
        batch_sequence=4, share=0, num_shares=1, count=2,
        digest=EXPERIENCES_DIGEST, groups=("gsm8k/0/17/0",), num_groups=1,
        total_groups=5, metrics={"experts": 1.0}, total_experts=9,
    ),
    "batch_manifest.v3": BatchManifest(
        batch_sequence=5, share=0, num_shares=1, count=2, digest=EXPERIENCES_DIGEST, groups=("gsm8k/0/24/0",),
        num_groups=1, total_groups=6, reused=("gsm8k/0/17/0",),
    ),
    "group_outcome.v1": GroupOutcome(
        group_id="gsm8k/0/17/0", taskset="gsm8k", sequence=17, result=GroupResult.batched, reason="complete",
        rollouts=(
            RolloutSummary(rollout_id="gsm8k/0/17/0/0", num_tokens=212, status=RolloutStatus.completed, reward=1.0),
            RolloutSummary(
                rollout_id="gsm8k/0/17/0/3", num_tokens=512, status=RolloutStatus.truncated,
                reason=UnscorableReason.timeout,
            ),
        ),
        batch_sequence=3, decided_at=1767225613.0,
    ),
    "group_outcome.v1-late": GroupOutcome(
        group_id="gsm8k/0/18/0", taskset="gsm8k", sequence=18, result=GroupResult.expired, reason="deadline",
        rollouts=(
            RolloutSummary(rollout_id="gsm8k/0/18/0/7", num_tokens=4096, status=RolloutStatus.completed, reward=0.0),
        ),
        late=True, decided_at=1767225699.0,
    ),
    "group_outcome.v2": GroupOutcome(
        group_id="gsm8k/0/19/0", taskset="gsm8k", sequence=19, result=GroupResult.expired, reason="deadline",
        rollouts=(
            RolloutSummary(rollout_id="gsm8k/0/19/0/2", num_tokens=90, status=RolloutStatus.completed, reward=0.0),
        ),
        decided_at=1767225699.0, group_size=8,
    ),
    "group_outcome.v3": GroupOutcome(
        group_id="gsm8k/0/20/0", taskset="gsm8k", sequence=20, result=GroupResult.dead, reason="unscored",
        rollouts=(
            RolloutSummary(
                rollout_id="gsm8k/0/20/0/0", num_tokens=90, status=RolloutStatus.completed,
                reason=UnscorableReason.no_reward,
            ),
        ),
        decided_at=1767225699.0, group_size=1,
    ),
    "group_outcome.v4": GroupOutcome(
        group_id="gsm8k/0/21/0", taskset="gsm8k", sequence=21, result=GroupResult.batched, reason="complete",
        rollouts=(
            RolloutSummary(rollout_id="gsm8k/0/21/0/0", num_tokens=90, status=RolloutStatus.completed, reward=1.0),
            RolloutSummary(
                rollout_id="gsm8k/0/21/0/1", num_tokens=512, status=RolloutStatus.truncated, reward=0.0,
                rejected="truncated: a token limit ended it",
            ),
        ),
        batch_sequence=4, decided_at=1767225700.0, group_size=2, seen=19, parts={"math": 0.5, "format": 1.0},
        decisions=(
            OperatorDecision(
                operator="truncated", action=OperatorAction.reject, reason="a token limit ended it", siblings=(1,),
            ),
            OperatorDecision(operator="my_ops:Mask", action=OperatorAction.mask, siblings=(0,), num_tokens=7),
            OperatorDecision(
                operator="my_ops:Short", action=OperatorAction.shape, reason="short", siblings=(0,), terms=(0.25,),
            ),
        ),
    ),
    "group_outcome.v5": GroupOutcome(
        group_id="gsm8k/0/22/0", taskset="gsm8k", sequence=22, result=GroupResult.filtered, reason="stale: too old",
        rollouts=(
            RolloutSummary(
                rollout_id="gsm8k/0/22/0/0", num_tokens=90, status=RolloutStatus.completed, reward=1.0,
                rejected="stale: too old",
            ),
        ),
        decided_at=1767225701.0, group_size=1, seen=20, version=5, parts={"math": 1.0},
        decisions=(
            OperatorDecision(operator="stale", action=OperatorAction.reject, reason="too old", siblings=(0,)),
        ),
    ),
    "group_outcome.v6": GroupOutcome(
        group_id="gsm8k/0/23/0", taskset="gsm8k", sequence=23, result=GroupResult.batched, reason="complete",
        rollouts=(
            RolloutSummary(rollout_id="gsm8k/0/23/0/0", num_tokens=90, status=RolloutStatus.completed, reward=1.0),
            RolloutSummary(rollout_id="gsm8k/0/23/0/1", num_tokens=80, status=RolloutStatus.completed, reward=0.0),
        ),
        batch_sequence=4, decided_at=1767225702.0, group_size=2, seen=21, parts={"math": 0.5},
        decisions=(
            OperatorDecision(operator="priority", action=OperatorAction.prioritise, reason="difficulty", terms=(0.5,)),
            OperatorDecision(operator="replay", action=OperatorAction.offer, reason="replay"),
        ),
        priority=0.5, offsets=(31, 35),
        offers=(
            ReuseOffer(kind=ReuseKind.replay, operator=2, since=3, until=11),
            ReuseOffer(kind=ReuseKind.hindsight, operator=3, since=3, until=7, siblings=(1,)),
        ),
        masks=(MaskedSpan(sibling=0, segment=0, start=2, stop=9),),
    ),
    "batch_reuse.v1": BatchReuse(
        batch_sequence=6, seen=24,
        uses=(
            GroupUse(
                group_id="gsm8k/0/23/0", taskset="gsm8k", sequence=23, kind=ReuseKind.replay, operator=2, use=1,
                weight=0.5, staleness=3, rollouts=("gsm8k/0/23/0/0", "gsm8k/0/23/0/1"),
            ),
        ),
    ),
    "summary.v1": Summary(
        topic="outcomes", through=4711,
        outcomes=OutcomesSummary(
            below=40, above=(42, 43), groups={"batched": 38, "dead": 4},
            missing=(MissingSiblings(sequence=17, siblings=(2, 3)),), next_batch=9, next_reuse=9,
        ),
    ),
    "summary.v1-steps": Summary(
        topic="steps", through=12,
        steps=StepsSummary(
            versions=(
                VersionRun(trainer_epoch=1, first=0, last=5, resumed=True),
                VersionRun(trainer_epoch=2, first=4, last=4, resumed=True),
            ),
            name=STEP, trained_groups=32, trained_rollouts=120, last=True,
        ),
    ),
    "summary.v1-weights": Summary(
        topic="weights", through=3,
        weights=WeightsSummary(
            versions=(VersionRun(trainer_epoch=1, first=0, last=2, resumed=True, model="SmolLM2-135M-Instruct"),)
        ),
    ),
    "summary.v2": Summary(
        topic="outcomes", through=4711, outcomes=OutcomesSummary(below=40, groups={"batched": 40}, next_batch=9),
    ),
    "summary.v2-weights": Summary(
        topic="weights", through=3,
        weights=WeightsSummary(
            versions=(
                VersionRun(trainer_epoch=1, first=0, last=2, resumed=True, model="SmolLM2-135M-Instruct", kept=(
                    KeptVersion(version=0), KeptVersion(version=2, parent=VersionName(trainer_epoch=1, version=0)),
                )),
            ),
        ),
    ),
    "weights_announced.v1": WeightsAnnounced(
        model="SmolLM2-135M-Instruct", name=STEP, kind=WeightsKind.delta,
        parent=VersionName(trainer_epoch=2, version=3), object="weights/2-4.delta", num_bytes=612_000,
        digest="sha256:" + "0d" * 32, weights_digest="sha256:" + "c4" * 32, dtype="bfloat16",
        announced_at=1767225620.0,
    ),
    "weights_announced.v1-anchor": WeightsAnnounced(
        model="SmolLM2-135M-Instruct", name=VersionName(trainer_epoch=2, version=3), kind=WeightsKind.full,
        parent=None, object="weights/2-3.safetensors", num_bytes=269_060_552, digest="sha256:" + "1f" * 32,
        weights_digest="sha256:" + "b2" * 32, dtype="bfloat16", resumed=True, announced_at=1767225590.0,
    ),
    "weights_announced.v2": WeightsAnnounced(
        model="SmolLM2-135M-Instruct", name=STEP, kind=WeightsKind.full, parent=None,
        object="versions/000002-00000004.safetensors", num_bytes=269_060_552, digest="sha256:" + "1e" * 32,
        weights_digest="sha256:" + "c4" * 32, dtype="bfloat16", announced_at=1767225620.0,
        gone=(VersionName(trainer_epoch=1, version=1), VersionName(trainer_epoch=1, version=2)),
    ),
    "weights_announced.v3": WeightsAnnounced(
        model="SmolLM2-135M-Instruct", name=STEP, kind=WeightsKind.full, parent=None,
        object="versions/000002-00000004.safetensors", num_bytes=269_060_552, digest="sha256:" + "1e" * 32,
        weights_digest="sha256:" + "c4" * 32, dtype="bfloat16", announced_at=1767225620.0,
        gone=(VersionName(trainer_epoch=1, version=1),),
        delta=DeltaObject(
            parent=VersionName(trainer_epoch=2, version=3), object="versions/000002-00000004.delta", num_bytes=341_552,
            digest="sha256:" + "2f" * 32,
        ),
    ),
    "step_record.v1": StepRecord(
        name=STEP, batch_sequence=3, positions=(40, 41), trained_groups=16, trained_rollouts=127,
        weights_digest="sha256:" + "c4" * 32, metrics={"loss": 31.5, "grad_norm": 0.75, "reward_mean": 0.4375},
        skipped=True, announced=False, last=True, recorded_at=1767225620.0,
    ),
    "step_record.v1-resumed": StepRecord(
        name=VersionName(trainer_epoch=2, version=3), batch_sequence=None, positions=(30, 31), trained_groups=12,
        trained_rollouts=96, weights_digest=None, metrics={}, resumed=True, recorded_at=1767225590.0,
    ),
    "step_record.v2": StepRecord(
        name=VersionName(trainer_epoch=2, version=3), batch_sequence=None, positions=(30, 31), trained_groups=12,
        trained_rollouts=96, weights_digest="sha256:" + "c5" * 32, metrics={}, resumed=True, recorded_at=1767225590.0,
        config='[run]\nname = "gsm8k-grpo"\nsteps = 400\n', computed_with={"torch": "2.9.0", "threads": "4"},
    ),
    "step_record.v3": StepRecord(
        name=STEP, batch_sequence=3, positions=(40, 41), trained_groups=16, trained_rollouts=127, weights_digest=None,
        metrics={"loss": 31.5}, announced=False, recorded_at=1767225620.0, token_staleness=(412, 96, 0, 5),
        group_staleness=(2, 1, 0, 1),
    ),
    "step_record.v4": StepRecord(
        name=STEP, batch_sequence=3, positions=(40, 41), trained_groups=16, trained_rollouts=127, weights_digest=None,
        metrics={"loss": 31.5, "spent/requests": 8.0}, announced=False, recorded_at=1767225620.0,
        token_staleness=(412, 96), group_staleness=(2, 1),
        totals=StepTotals(steps=4, spent={"requests": 24.0}, token_staleness=(1600, 42, 7), group_staleness=(8, 4)),
    ),
    "eval_result.v1": EvalResult(
        evaluation="held-out", name=STEP, num_tasks=200, num_samples=4, num_unscored=1,
        metrics={"mean": 0.53, "pass@1": 0.53, "pass@4": 0.71, "length_mean": 180.5},
        generations="evals/held-out-2-4.jsonl", request_id="evaluate-now-1", best=True, evaluated_at=1767225700.0,
    ),
    "run_manifest.v1": RunManifest(
        run="gsm8k-grpo", created_at=1767225590.0, config='[run]\nname = "gsm8k-grpo"\nsteps = 400\n',
        digests={"model": "sha256:" + "11" * 32, "taskset.gsm8k": "sha256:" + "22" * 32}, partitions=8, shares=2,
        seed=7, rftstream_version="0.1.0",
    ),
    "run_manifest.v2": RunManifest(
        run="gsm8k-slower", created_at=1767235590.0, config='[run]\nname = "gsm8k-slower"\nsteps = 400\n',
        digests={"model": "sha256:" + "11" * 32, "taskset.gsm8k": "sha256:" + "22" * 32}, partitions=8, shares=2,
        seed=7, rftstream_version="0.1.0", changed=("trainer.lr 1e-06 -> 5e-07",),
    ),
    "claim.v1": Claim(
        role="trainer", epoch=2, host="node-3", pid=4711, process="trainer-0", claimed_at=1767225589.0,
    ),
    "run_state.v1": RunState(state=DesiredState.paused, by="ada", reason="disk swap", since=1767225650.0),
    "drawn.v1": Drawn(
        seen=12, admitted=17, drawn={"gsm8k": 40, "sums": 2}, left_out={"gsm8k": 3},
        skipped={"gsm8k": {"solve_rate": {"too easy": 15, "too hard": 6}}}, changed={"sums": {"budget": 1}},
        put_back=1, alone=True,
    ),
    "drawn.v2": Drawn(seen=12, admitted=17, drawn={"gsm8k": 40, "more": 2}, problems_end=41),
    "tasks_ended.v1": TasksEnded(admitted=3200, reason="taskset"),
    "tasks_ended.v2": TasksEnded(admitted=0, reason="experts", experts=1000, batches=188),
    "run_finished.v1": RunFinished(reason="no_signal", name=STEP, finished_at=1767225800.0, exit_code=6),
    "request.v1": Request(
        request_id="retry-1", kind=RequestKind.retry_dead, arguments={"groups": ["gsm8k/0/17/0"], "rescore": True},
        expires_at=1767229200.0,
    ),
    "request.v2": Request(
        request_id="retry-1", kind=RequestKind.retry_dead, arguments={"groups": ["gsm8k/0/17/0"], "rescore": True},
        expires_at=1767229200.0, by="ada@host-3",
    ),
    "dead_letter.v1": DeadLetter(
        topic="rollouts", partition=1, offset=8172, key=b"gsm8k/0/17/0/3", value=b"\x81\xa3ids\x01",
        headers=(("contract", b"rollout"), ("contract_version", b"1")), role="verifier", reason="undecodable",
        detail="$.ids: got int, expected object", tries=1, dead_at=1767225612.0,
    ),
    "dead_dropped.v1": DeadDropped(
        letters=("verifier/rollouts/1/8172",), groups=("gsm8k/0/17/0",), by="ada", reason="bad problem",
        dropped_at=1767225900.0,
    ),
    "trimmed.v1": Trimmed(
        name=VersionName(trainer_epoch=2, version=60),
        checkpoints=(VersionName(trainer_epoch=1, version=40), VersionName(trainer_epoch=2, version=60)),
        offsets={"tasks": (640, 648), "rollouts": (632, 640), "verified": (632, 640), "batches": (1312, 1300)},
        version=40, sequence=161, groups={"trained": 160, "dead": 1}, rollouts={"trained": 1271, "dead": 17},
        trimmed_at=1767225950.0,
    ),
}  # fmt: skip
"""`<contract>.v<N>` or `<contract>.v<N>-<form>`, the stem of the golden files -> the message in them."""


def readable(value: object) -> Any:
    """The JSON twin of a message: arrays as flat lists, bytes as {"$base64": ...}."""
    if isinstance(value, Array):
        dtype = "uint8" if value.dtype == "bool" else value.dtype
        elements = Array(dtype=dtype, shape=value.shape, data=value.data).numpy().ravel().tolist()
        return {"dtype": value.dtype, "shape": list(value.shape), "data": elements}
    if dataclasses.is_dataclass(value):
        return {field.name: readable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {name: readable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [readable(item) for item in value]
    if isinstance(value, bytes):
        return {"$base64": base64.b64encode(value).decode("ascii")}
    return value


def twin_text(message: Message) -> str:
    return json.dumps(readable(message), indent=2, ensure_ascii=False) + "\n"


def record_text(message: Message) -> str:
    """Key and headers of a message's record, without the headers that all have and that do not depend on it."""
    headers = {name: value.decode("ascii") for name, value in headers_of(message, "a-run", 4)}
    for name in COMMON_HEADERS:
        del headers[name]
    headers.pop("readable_since", None)  # it tells of the newest version, not of the message
    return json.dumps({"key": key_of(message).decode("utf-8"), "headers": headers}, indent=2) + "\n"


def contract_of(name: str) -> str:
    return name.partition(".")[0]


def is_newest(name: str) -> bool:
    return name.partition("-")[0] == f"{contract_of(name)}.v{MESSAGES[contract_of(name)].version}"


def write_missing() -> None:
    for name, message in SAMPLES.items():
        assert SPEC_OF[type(message)].contract == contract_of(name), f"{name} is a {type(message).__name__}"
        for suffix, content in (
            (".msgpack", encode(message)),
            (".json", twin_text(message).encode()),
            (".record.json", record_text(message).encode()),
        ):
            path = GOLDEN / f"{name}{suffix}"
            if not path.exists():
                path.write_bytes(content)
                print(f"wrote {path.name}")


if __name__ == "__main__":
    write_missing()
