"""What the log may say of rollouts that are not finished, and of those that were continued."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from rftstream.contracts.records import Record
from rftstream.contracts.rollouts import PartialRollout, Rollout, RolloutStatus, Segment, StoredState
from rftstream.contracts.tasks import Task
from rftstream.contracts.versions import VersionName
from rftstream.models.fake_renderer import FakeRenderer
from rftstream.models.spec import ModelSpec
from rftstream.policies.base import Completion, SampleRequest
from rftstream.policies.fake import FakePolicy
from rftstream.policies.fake_model import solve
from rftstream.roles.explorer.saved.partials import parse_key
from tests.simulation.games import check_rollout

if TYPE_CHECKING:
    from tests.simulation.laws import Laws

SAMPLED = (RolloutStatus.completed, RolloutStatus.truncated)


class Unfinished:
    def __init__(self, laws: Laws) -> None:
        self._laws = laws
        self.pieces: dict[str, list[PartialRollout]] = defaultdict(list)
        """By rollout_id, all that there ever were."""
        self._live: dict[str, set[int]] = defaultdict(set)
        self._finished: set[str] = set()
        self._stored: dict[str, StoredState] = {}
        """By rollout_id, the state of its environment that its pieces refer to now."""
        self._finished_now: list[str] = []
        """By the transaction that is looked at."""
        self.num_continued = 0
        """Rollouts that another process finished than the one that saved some of them."""
        self.num_stored = 0
        """Pieces that refer to a state in the store."""
        fake = laws.config.policies.get("fake", {})
        self._by_weights = fake.get("answer_depends_on", "weights") == "weights"
        self._renderer = FakeRenderer()
        options = {**fake, "tokens_per_s": 0.0, "answer_depends_on": "task", "batch_size": 1}
        self._policy = FakePolicy(
            FakePolicy.Config(**options), model=ModelSpec(name="fake", folder=None, dtype="float32", context=None),
            renderer=self._renderer, clock=laws.simulation.clock,
        )  # fmt: skip
        self._policy.load({}, VersionName(trainer_epoch=0, version=0))

    def look(self, record: Record) -> None:
        if record.topic == "partials" and record.value is None:
            rollout_id, piece = parse_key(record.key or b"")
            assert piece in self._live[rollout_id], f"{record}: takes back what is not there"
            self._live[rollout_id].remove(piece)

    def piece(self, record: Record, piece: PartialRollout) -> None:
        rollout_id, known = piece.ids.rollout_id, self.pieces[piece.ids.rollout_id]
        assert piece.ids == self._laws.tasks[rollout_id].ids
        assert record.partition == piece.ids.sequence % self._laws.config.transport.partitions
        assert rollout_id not in self._finished, f"{record}: a piece of what is finished"
        assert piece.piece == len(known), f"{record}: piece {piece.piece}, expected {len(known)}"
        assert piece.num_tokens == sum(sum(one.loss_mask.data) for one in piece.segments) > 0
        self._laws.versions(piece.ids, piece.segments)
        known.append(piece)
        if piece.environment_state is not None:
            self._stored.pop(rollout_id, None)
        elif piece.stored_state is not None:
            self._stored[rollout_id] = piece.stored_state
            self.num_stored += 1
        self._live[rollout_id].add(piece.piece)

    def rollout(self, rollout: Rollout) -> None:
        rollout_id = rollout.ids.rollout_id
        task = self._laws.tasks[rollout_id]
        self._finished_now.append(rollout_id)
        check_rollout(self._laws.config, task, rollout)
        if rollout.status in SAMPLED and task.stored_rollout is None:
            self._as_undisturbed(task, rollout)
            if pieces := self.pieces[rollout_id]:
                self._goes_on(rollout, pieces)

    def transaction(self, transactional_id: str) -> None:
        """It is through."""
        for rollout_id in self._finished_now:
            self.num_continued += any(f".{one.explorer}." not in transactional_id for one in self.pieces[rollout_id])
            assert not self._live[rollout_id], f"{rollout_id}: finished, and pieces {self._live[rollout_id]} are left"
        for rollout_id in self._finished_now:
            self._stored.pop(rollout_id, None)
        self._finished.update(self._finished_now)
        self._finished_now.clear()

    def kept(self) -> None:
        """What a successor would go on from is there."""
        objects = self._laws.simulation.store.objects
        for rollout_id, stored in self._stored.items():
            data = objects.get(stored.object)
            assert data is not None, f"{rollout_id}: {stored.object} is deleted, and a piece refers to it"
            assert f"sha256:{hashlib.sha256(data).hexdigest()}" == stored.digest

    def _goes_on(self, rollout: Rollout, pieces: list[PartialRollout]) -> None:
        """It begins with all its pieces: nobody began anew, or went on from a part of them."""
        (whole,) = rollout.segments
        parts = [segment for piece in pieces for segment in piece.segments]
        assert [piece.continues for piece in pieces] == [number > 0 for number in range(len(pieces))]
        for name in ("token_ids", "behavior_logprobs", "loss_mask"):
            joined = b"".join(getattr(one, name).data for one in parts)
            assert bytes(getattr(whole, name).data).startswith(joined), (
                f"{rollout.ids.rollout_id}: {name} of pieces are lost"
            )
        stamps = [name for one in parts for name in _stamps(one)]
        assert _stamps(whole)[: len(stamps)] == stamps
        assert rollout.started_at == pieces[0].started_at

    def _as_undisturbed(self, task: Task, rollout: Rollout) -> None:
        """Bit for bit what one process gives that nobody disturbs; whether the last digit is right may depend on the
        weights."""
        (segment,) = rollout.segments
        tokens, mask = segment.token_ids.numpy(), segment.loss_mask.numpy()
        said = [turn for turn in rollout.turns if turn.role == "assistant"]
        place, left = 0, task.sampling.max_tokens
        for number, turn in enumerate(said):
            place = int(np.argmax(mask[place:])) + place if turn.num_tokens else place
            expected = self._alone(task, tokens[:place], number)
            length = min(len(expected.token_ids), left)
            if turn.finish_reason == "timeout":
                length = min(length, turn.num_tokens)
            compared = np.ones(length, bool)
            if self._by_weights and solve(self._renderer.decode(tokens[:place].tolist())):
                compared[len(expected.token_ids) - 2 :][:1] = False  # it may lie behind the limit
            for name in ("token_ids", "behavior_logprobs"):
                given = getattr(segment, name).numpy()[place : place + turn.num_tokens]
                wanted = getattr(expected, name)[:length]
                assert len(given) == length, f"{rollout.ids.rollout_id}: {len(given)} tokens, alone {length}"
                assert given[compared].tobytes() == wanted[compared].tobytes(), f"{rollout.ids.rollout_id}: {name}"
            place, left = place + turn.num_tokens, left - turn.num_tokens
        assert sum(turn.num_tokens for turn in said) == int(mask.sum()) == rollout.num_tokens

    def _alone(self, task: Task, prompt: np.ndarray, turn: int) -> Completion:
        """Without a limit."""
        self._policy.submit(SampleRequest(
            request_id="alone", token_ids=tuple(prompt.tolist()), sampling=task.sampling, seed=task.seed + turn,
            max_tokens=1_000_000,
        ))  # fmt: skip
        (completion,) = self._policy.step()
        return completion


def _stamps(segment: Segment) -> list[tuple[int, int]]:
    """Epoch and version of each sampled token."""
    return [(span.trainer_epoch, span.version) for span in segment.versions for _ in range(span.count)]
