"""Versions of the policy: announced on `weights`, recorded on `steps`, evaluated on `evals`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from enum import StrEnum
from itertools import zip_longest
from typing import Annotated

from msgspec import Meta

from rftstream.contracts.message_spec import Facts, Message, message
from rftstream.contracts.ranges import NonNegativeInt
from rftstream.contracts.rules import Violation, presence, rule
from rftstream.contracts.structs import message_part


class WeightsKind(StrEnum):
    """The kinds of content that an object of the store can hold."""

    full = "full"
    """A snapshot that needs nothing else (an anchor)."""
    delta = "delta"
    """Changes since the parent version."""


@message_part(frozen=True, slots=True, kw_only=True, order=True)
class VersionName:
    """A version's full name."""

    # The fields are in this order so that names are in order of age.

    trainer_epoch: NonNegativeInt
    """Number of the trainer's claim: how often a trainer had taken the run."""
    version: NonNegativeInt
    """Weights after batches 0 ... version-1."""

    @property
    def stem(self) -> str:
        """The name as names of objects have it, `000001-00000042`."""
        return f"{self.trainer_epoch:06d}-{self.version:08d}"

    @staticmethod
    def of_stem(stem: str) -> VersionName | None:
        """Return the version that the name of an object has; None if it has none."""
        epoch, _, version = stem.partition("-")
        if not epoch.isdecimal() or not version.isdecimal():
            return None
        return VersionName(trainer_epoch=int(epoch), version=int(version))


def _version_key(name: VersionName) -> str:
    return f"{name.version}/{name.trainer_epoch}"


def _version_headers(name: VersionName) -> Facts:
    return {"version": name.version, "trainer_epoch": name.trainer_epoch}


@message_part(frozen=True, slots=True, kw_only=True)
class ObjectPart:
    """A part of a version: an object with some of its tensors, each of them whole."""

    object: str
    """Name inside the object store."""
    num_bytes: NonNegativeInt
    """Size of the object."""
    digest: str
    """`sha256:<hex>` of the object."""


ObjectParts = Annotated[tuple[ObjectPart, ...], Meta(max_length=4096)]


@message_part(frozen=True, slots=True, kw_only=True)
class DeltaObject:
    """The changes since another version, as an object of the store, or as several."""

    parent: VersionName
    """The version that it applies to."""
    object: str
    """Name inside the object store. With parts, what their names begin with."""
    num_bytes: NonNegativeInt
    """Size of the object, or of all parts together."""
    digest: str
    """`sha256:<hex>` of the object. With parts, of a line for each, in their order: its own digest."""
    parts: ObjectParts = ()
    """The objects, if there are several. All tensors together are the version's, each in one part."""


@message(
    "weights_announced",
    version=4,
    readable_since=3,
    skippable=lambda weights: not weights.parts and not (weights.delta and weights.delta.parts),
    topic="weights",
    key=lambda weights: f"{weights.model}/{_version_key(weights.name)}",
    headers=lambda weights: _version_headers(weights.name),
)
class WeightsAnnounced(Message):
    """New weights are in the object store. `weights`: trainer -> explorer, evaluator. The object is durable by then."""

    model: str
    """Name of the model; weights of another one are refused."""
    name: VersionName
    """The version that is announced."""
    kind: WeightsKind
    """Snapshot or delta."""
    parent: VersionName | None
    """The version a delta applies to; None for full snapshots."""
    object: str
    """Name inside the object store. With parts, what their names begin with."""
    num_bytes: NonNegativeInt
    """Size of the object, or of all parts together."""
    digest: str
    """`sha256:<hex>` of the object. With parts, of a line for each, in their order: its own digest."""
    weights_digest: str
    """`sha256:<hex>` of the state: over each tensor's name and digest, sorted by name."""
    dtype: str
    """Served dtype, e.g. bfloat16."""
    resumed: bool = False
    """True for the anchor that a trainer publishes when it starts."""
    announced_at: float = 0.0
    """When the object was durable."""
    gone: tuple[VersionName, ...] = ()
    """Older versions whose objects are deleted once this record stands here, by whomever and whenever."""
    delta: DeltaObject | None = None
    """The same version once more as a delta, beside a full snapshot, for readers that have its parent."""
    parts: ObjectParts = ()
    """The objects, if there are several, since several processes wrote them. All tensors together are the version's,
    each in one part."""


@rule(
    WeightsAnnounced,
    json_schema={
        "if": {"properties": {"kind": {"const": "delta"}}},
        "then": {"properties": {"parent": {"type": "object"}, "delta": {"type": "null"}}},
        "else": {"properties": {"parent": {"type": "null"}}},
    },
)
def _check_weights_announced(weights: WeightsAnnounced) -> Violation | None:
    if (weights.parent is not None) is not (weights.kind is WeightsKind.delta):
        return ".parent", f"got {presence(weights.parent)} with kind {weights.kind}, expected one exactly for a delta"
    if weights.delta is not None and weights.kind is not WeightsKind.full:
        return ".delta", f"got one with kind {weights.kind}, expected none but with a full snapshot"
    return None


STALENESS_COUNTS = 65
"""Numbers in a histogram of staleness, at most: one for each staleness up to 63, and one for all above."""


StalenessCounts = Annotated[tuple[NonNegativeInt, ...], Meta(max_length=STALENESS_COUNTS)]


@message_part(frozen=True, slots=True, kw_only=True)
class StepTotals:
    """Totals of all steps up to a version, so that no reader has to read them all."""

    steps: NonNegativeInt = 0
    """Number of steps."""
    spent: dict[str, float] = field(default_factory=dict)
    """Cost of the verdicts of their batches, by kind such as `requests`."""
    token_staleness: StalenessCounts = ()
    """Trained tokens by staleness, as a step has them."""
    group_staleness: StalenessCounts = ()
    """Trained groups by staleness, as a step has them."""

    def plus(
        self, metrics: Mapping[str, float], token_staleness: Sequence[int], group_staleness: Sequence[int]
    ) -> StepTotals:
        """Return the totals with one step more, by its metrics and its histograms."""
        spent = dict(self.spent)
        for name, amount in metrics.items():
            if name.startswith(SPENT):
                kind = name.removeprefix(SPENT)
                spent[kind] = spent.get(kind, 0.0) + amount
        return StepTotals(
            steps=self.steps + 1,
            spent=spent,
            token_staleness=_added(self.token_staleness, token_staleness),
            group_staleness=_added(self.group_staleness, group_staleness),
        )


SPENT = "spent/"
"""How the names of metrics begin that say what verdicts cost."""


def _added(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(sum, zip_longest(one, other, fillvalue=0)))


def _step_headers(step: StepRecord) -> Facts:
    names = ("batch_sequence", "trained_groups", "resumed", "skipped")
    return {**_version_headers(step.name), **{name: getattr(step, name) for name in names}}


@message(
    "step_record",
    version=5,
    readable_since=2,
    topic="steps",
    key=lambda step: _version_key(step.name),
    headers=_step_headers,
)
class StepRecord(Message):
    """One trained batch, or (`resumed`) the start of a trainer. `steps`: trainer -> feeder, gateway."""

    name: VersionName
    """The version that resulted."""
    batch_sequence: NonNegativeInt | None
    """The batch that was trained; None on resumed records."""
    positions: tuple[NonNegativeInt, ...]
    """Next offset to read on `batches`, per share."""
    trained_groups: NonNegativeInt
    """Number in all batches up to this version."""
    trained_rollouts: NonNegativeInt
    """Number in all batches up to this version."""
    weights_digest: str | None
    """Digest of the published weights; None when this version was not published."""
    metrics: dict[str, float]
    """Loss, gradient norm, reward, lengths, times, ...; may hold a NaN."""
    resumed: bool = False
    """Written by a trainer that starts, with the anchor."""
    skipped: bool = False
    """The batch gave a NaN or infinite loss or gradient; the version equals its parent."""
    announced: bool = True
    """The version was published on `weights`."""
    last: bool = False
    """The run's last step."""
    recorded_at: float = 0.0
    """When the step was done."""
    config: str = ""
    """Set on resumed records: the resolved config that this trainer works by, as TOML, secrets left out."""
    computed_with: dict[str, str] = field(default_factory=dict)
    """Set on resumed records: what the bits of the weights depend on (versions of libraries, threads, device, cpu)."""
    token_staleness: StalenessCounts = ()
    """Trained tokens by staleness, the batch minus the version that sampled the token: number i is of staleness i, and
    the 65th of 64 and more. Zeros at the end are left out. It is empty if the batch was skipped, if no token of it was
    sampled, and in runs of imported rollouts."""
    group_staleness: StalenessCounts = ()
    """Trained groups by the staleness of the oldest token that was trained, in the same form."""
    totals: StepTotals | None = None
    """Totals of this step and all before it that are in force. None in a run that a release without them has
    trained."""
    scorers: dict[str, str] = field(default_factory=dict)
    """Taskset -> name and version of the reward that scored the newest of its rollouts, as the batch has it."""


@rule(
    StepRecord,
    json_schema={
        "if": {"required": ["resumed"], "properties": {"resumed": {"const": True}}},
        "then": {"properties": {"batch_sequence": {"type": "null"}}},
        "else": {"properties": {"batch_sequence": {"type": "integer"}}},
    },
)
def _check_step_record(step: StepRecord) -> Violation | None:
    if (step.batch_sequence is None) is not step.resumed:
        return ".batch_sequence", f"got {presence(step.batch_sequence)}, expected none exactly when resumed"
    return None


@message(
    "eval_result",
    version=2,
    readable_since=1,
    topic="evals",
    key=lambda result: f"{result.evaluation}/{_version_key(result.name)}",
    headers=lambda result: _version_headers(result.name),
)
class EvalResult(Message):
    """One evaluation of one version. `evals`: evaluator -> trainer, gateway."""

    evaluation: str
    """Name in the run file."""
    name: VersionName
    """The version that was evaluated."""
    num_tasks: NonNegativeInt
    """Tasks of the evaluation."""
    num_samples: NonNegativeInt
    """Samples per task (n)."""
    num_unscored: NonNegativeInt
    """Samples without a reward; not in the means."""
    metrics: dict[str, float]
    """mean, std; pass@k, best@k and worst@k for each k; length_mean, truncated_share, unscored_share, and what rewards
    measured."""
    generations: str | None
    """Object of the store with every completion and its reward, one JSON object a line."""
    request_id: str | None = None
    """The request that asked for it; None when it was due by itself."""
    best: bool = False
    """Best mean of this evaluation so far, among those by the same scorer; never set for a canary."""
    evaluated_at: float = 0.0
    """When it was done."""
    scorer: str = ""
    """Name of the reward that scored the samples; empty if none could be scored."""
    scorer_version: str = ""
    """Version of that reward. Results of two versions do not compare."""

    @property
    def scored_by(self) -> str:
        """Return the name and the version of the scorer; empty if it is not known."""
        return f"{self.scorer} {self.scorer_version}" if self.scorer else ""

    @property
    def rank(self) -> float:
        """Return what results of one evaluation are ordered by, the best last: the mean; of a canary, where what is
        rewarded is wrong, the mean reversed."""
        mean = self.metrics.get("mean", -math.inf)
        return -mean if "canary" in self.metrics else mean
