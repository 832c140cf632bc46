"""Hypothesis strategies for every message, built from the types; by hand where rules tie fields together.

A message with a rule and no strategy by hand gets those that keep the rule, if chance finds enough of them."""

from __future__ import annotations

import dataclasses
import itertools
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec
from hypothesis import strategies as st

from rftstream.contracts.arrays import ITEM_BYTES, Array
from rftstream.contracts.batches import BatchManifest, Experience
from rftstream.contracts.checks import first_violation
from rftstream.contracts.demonstrations import Demonstration
from rftstream.contracts.feedback import Feedback, FeedbackKind, PairChoice, feedback_id_of, question_id_of
from rftstream.contracts.messages import MESSAGES, Message
from rftstream.contracts.outcomes import GroupOutcome, GroupResult
from rftstream.contracts.rollouts import ImageSpan, Rollout, RolloutStatus, Segment, VersionSpan
from rftstream.contracts.rules import RULES
from rftstream.contracts.summaries import SUMMARISED, Summary
from rftstream.contracts.tasks import ChatMessage, Media, RolloutIds
from rftstream.contracts.token_values import DTYPES, TokenValues
from rftstream.contracts.verdicts import UnscorableReason, VerifiedRollout
from rftstream.contracts.versions import StepRecord, WeightsAnnounced, WeightsKind

Strategy = st.SearchStrategy[Any]

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
INTS = st.integers(0, 2**63 - 1)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | FLOATS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
_SIMPLE: dict[Any, Strategy] = {
    str: TEXTS, int: INTS, float: FLOATS, bool: st.booleans(), bytes: st.binary(max_size=40), Any: PLAIN,
}  # fmt: skip


def messages(contract: str) -> st.SearchStrategy[Message]:
    cls = MESSAGES[contract].type
    if cls in RULES and cls not in _BY_HAND:
        return _of(cls).filter(lambda message: first_violation(message) is None)
    return _of(cls)


def _of(kind: Any) -> Strategy:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _in_range(arguments[0], [meta for meta in arguments[1:] if isinstance(meta, msgspec.Meta)])
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if origin in (Union, UnionType):
        (inner,) = (argument for argument in arguments if argument is not NoneType)
        return st.none() | _of(inner)
    if origin is dict:
        return st.dictionaries(TEXTS, _of(arguments[1]), max_size=2)
    if origin is tuple and arguments[-1] is ...:
        return st.lists(_of(arguments[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*map(_of, arguments))
    if issubclass(kind, Enum):
        return st.sampled_from(kind)
    return _BY_HAND[kind]() if kind in _BY_HAND else _build(kind)


def _in_range(kind: Any, metas: list[msgspec.Meta]) -> Strategy:
    """Numbers between the bounds that their type declares; of other types, any."""
    if kind is float and any(meta.ge is not None for meta in metas):
        lowest = max(float(meta.ge) for meta in metas if meta.ge is not None)
        return st.floats(min_value=lowest, allow_nan=False, allow_infinity=False)
    if kind is not int:
        return _of(kind)
    least = max((meta.ge for meta in metas if meta.ge is not None), default=0)
    most = min((meta.le for meta in metas if meta.le is not None), default=2**63 - 1)
    return st.integers(int(least), int(most))


def _build(cls: type, **given: Strategy) -> Strategy:
    hints = get_type_hints(cls, include_extras=True)
    names = [field.name for field in dataclasses.fields(cls)]
    return st.builds(cls, **{name: given[name] if name in given else _of(hints[name]) for name in names})


@st.composite
def _arrays(draw: st.DrawFn, dtype: str | None = None, shape: tuple[int, ...] | None = None) -> Array:
    if dtype is None:
        dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
    if shape is None:
        shape = tuple(draw(st.lists(st.integers(0, 3), max_size=4)))
    num_bytes = ITEM_BYTES[dtype]
    for length in shape:
        num_bytes *= length
    return Array(dtype=dtype, shape=shape, data=draw(st.binary(min_size=num_bytes, max_size=num_bytes)))


@st.composite
def _token_values(draw: st.DrawFn, num_tokens: int | None = None) -> TokenValues:
    if num_tokens is None:
        num_tokens = draw(st.integers(0, 12))
    edges = [0, *sorted(draw(st.sets(st.integers(0, num_tokens), max_size=3))), num_tokens]
    runs = [(stop - start, draw(st.integers(0, 3))) for start, stop in itertools.pairwise(edges)]
    total = sum(tokens * count for tokens, count in runs)
    return TokenValues(runs=Array.of(runs, "int32"), values=draw(_arrays(draw(st.sampled_from(DTYPES)), (total,))))


@st.composite
def _segments(draw: st.DrawFn) -> Segment:
    num_tokens = draw(st.integers(0, 12))
    cuts = sorted(draw(st.sets(st.integers(0, num_tokens), max_size=6)))
    spans = [
        VersionSpan(start=start, count=end - start, trainer_epoch=draw(INTS), version=draw(INTS))
        for start, end in zip(cuts[::2], cuts[1::2], strict=False)
    ]
    mask = draw(st.lists(st.sampled_from([0, 1]), min_size=num_tokens, max_size=num_tokens))
    places = [place for place, is_sampled in enumerate(mask) if not is_sampled][: draw(st.integers(0, 2))]
    return Segment(
        token_ids=draw(_arrays("int32", (num_tokens,))),
        behavior_logprobs=draw(_arrays("float32", (num_tokens,))),
        loss_mask=Array.of(mask, "uint8"),
        versions=tuple(spans),
        images=tuple(ImageSpan(start=place, count=1, image=draw(_of(Media))) for place in places),
        beside={name: draw(_token_values(num_tokens)) for name in draw(st.sets(TEXTS, max_size=2))},
    )


@st.composite
def _ids(draw: st.DrawFn) -> RolloutIds:
    group_size = draw(st.integers(1, 2**31))
    sibling = draw(st.integers(0, group_size - 1))
    taskset = draw(st.from_regex(r"[a-z0-9_-]{1,12}", fullmatch=True))
    group_id = f"{taskset}/{draw(INTS)}/{draw(INTS)}/{draw(INTS)}"
    return RolloutIds(
        rollout_id=f"{group_id}/{sibling}", group_id=group_id, taskset=taskset, sibling=sibling,
        group_size=group_size, sequence=draw(INTS), min_version=draw(INTS),
    )  # fmt: skip


def _tied(cls: type, name: str, when: Any, then: dict[str, Any], otherwise: dict[str, Any]) -> Strategy:
    """`name` decides about other fields: those of `then` if it is `when`, else those of `otherwise`."""
    choices = _of(get_type_hints(cls, include_extras=True)[name]).filter(lambda value: value != when)
    return _build(cls, **{name: st.just(when)}, **then) | _build(cls, **{name: choices}, **otherwise)


@st.composite
def _summaries(draw: st.DrawFn) -> Summary:
    topic = draw(st.sampled_from(SUMMARISED))
    said = {name: draw(_present(Summary, name)) if name == topic else None for name in SUMMARISED}
    if said["outcomes"] is not None:
        counts = draw(st.dictionaries(st.sampled_from([str(one) for one in GroupResult]), INTS))
        said["outcomes"] = dataclasses.replace(said["outcomes"], groups=counts)
    return Summary(topic=topic, through=draw(INTS), **said)


def _present(cls: type, name: str) -> Strategy:
    return _of(get_type_hints(cls, include_extras=True)[name]).filter(lambda value: value is not None)


@st.composite
def _verified(draw: st.DrawFn) -> VerifiedRollout:
    ids = draw(_ids())
    rollout = dataclasses.replace(draw(_of(Rollout)), ids=ids)
    reason = draw(_of(UnscorableReason | None))
    verified: VerifiedRollout = draw(
        _build(
            VerifiedRollout,
            ids=st.just(ids),
            rollout=st.just(None if reason is UnscorableReason.undecodable else rollout),
            verdict=_present(VerifiedRollout, "verdict") if reason is None else st.none(),
            reason=st.just(reason),
        )
    )
    return verified


def _demonstrations() -> Strategy:
    chat = st.lists(_of(ChatMessage), min_size=1, max_size=2).map(tuple)
    return _build(Demonstration, messages=chat, preference=st.none()) | _build(
        Demonstration, messages=st.just(()), preference=_present(Demonstration, "preference")
    )


@st.composite
def _feedback(draw: st.DrawFn) -> Feedback:
    """Of version 2, or as it was in version 1."""
    told: Feedback = draw(_build(Feedback, question_id=st.just(""), annotator=st.just("")))
    if draw(st.booleans()):
        return told
    kind = draw(st.sampled_from([one for one in FeedbackKind if one is not FeedbackKind.retract]))
    ids = draw(_ids())
    first = f"{ids.group_id}/0"
    rollouts = (first, f"{ids.group_id}/{draw(st.integers(1, 9))}") if kind is FeedbackKind.pair else (first,)
    question_id, revision = question_id_of(kind, rollouts), draw(INTS)
    annotator = draw(st.from_regex(r"[0-9a-f]{32}", fullmatch=True))
    return dataclasses.replace(
        told,
        feedback_id=feedback_id_of(question_id, annotator, revision), rollout_id=first, rollouts=rollouts,
        kind=FeedbackKind.retract if draw(st.booleans()) else kind, question_id=question_id, annotator=annotator,
        revision=revision, sequence=draw(INTS), reward=draw(FLOATS), choice=draw(st.sampled_from(PairChoice)),
        correction=draw(TEXTS), order=tuple(draw(st.permutations(range(len(rollouts))))),
    )  # fmt: skip


def _placed(outcome: GroupOutcome) -> GroupOutcome:
    """Give each rollout its offset, where something is offered."""
    return dataclasses.replace(outcome, offsets=tuple(range(len(outcome.rollouts)))) if outcome.offers else outcome


_BY_HAND: dict[type, Any] = {
    Array: _arrays,
    Segment: _segments,
    TokenValues: _token_values,
    RolloutIds: _ids,
    Rollout: lambda: _tied(
        Rollout, "status", RolloutStatus.undecodable, {"problem": st.none()}, {"problem": _present(Rollout, "problem")}
    ),
    VerifiedRollout: _verified,
    Demonstration: _demonstrations,
    Feedback: _feedback,
    Experience: lambda: _build(Experience, pair=st.sampled_from([None, "chosen", "rejected"])),
    BatchManifest: lambda: _build(
        BatchManifest,
        share=st.integers(0, 3),
        num_shares=st.integers(4, 8),
        digest=st.from_regex(r"sha256:[0-9a-f]{64}", fullmatch=True),
    ),
    GroupOutcome: lambda: _tied(
        GroupOutcome, "result", GroupResult.batched, {"batch_sequence": INTS, "late": st.just(False)},
        {"batch_sequence": st.none(), "late": st.just(False)},
    ).map(_placed),
    Summary: _summaries,
    WeightsAnnounced: lambda: _tied(
        WeightsAnnounced, "kind", WeightsKind.delta,
        {"parent": _present(WeightsAnnounced, "parent"), "delta": st.none()}, {"parent": st.none()},
    ),
    StepRecord: lambda: _tied(
        StepRecord, "resumed", True, {"batch_sequence": st.none()}, {"batch_sequence": INTS}
    ),
}  # fmt: skip
