"""Recomputes which groups batches use again, and compares it with the content of the batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from rftstream.config.sections import RunConfig
from rftstream.config.stages import Stages
from rftstream.contracts.batches import Experience
from rftstream.contracts.control import Trimmed
from rftstream.contracts.messages import Message
from rftstream.contracts.outcomes import BatchReuse, GroupOutcome
from rftstream.data.operators.pipeline import ExperiencePipeline
from rftstream.data.operators.reuse import makes_demonstrations
from rftstream.models.rendering import open_renderer
from rftstream.models.spec import ModelSpec
from rftstream.queries.decisions.recomputation import Recomputation
from rftstream.roles.buffer.reuse import ChosenUse, ReusedBodies, ReusePool, takes_demonstrations, uses_of
from rftstream.service.role import Log


class ReuseAgain:
    """Chooses again which groups batches use again. `recompute` makes it, calls `choose`, and then `check_body` for
    each experience of `batches` that is not in its group's own batch."""

    def __init__(
        self, log: Log, config: RunConfig, pipeline: ExperiencePipeline, spec: ModelSpec, found: Recomputation
    ) -> None:
        self._stages = Stages.of(config)
        self._pool = ReusePool(pipeline.reusing, pipeline.run_seed, config.feeder.on_stale == "wait")
        renderer = open_renderer(spec) if makes_demonstrations(pipeline.reusing.values()) else None
        self._bodies = ReusedBodies(log.transport, renderer)
        self._found = found
        self._chosen: dict[tuple[int, str], ChosenUse] = {}
        """Batch and rollout -> the use by which the rollout is in the batch."""

    def choose(self, messages: Sequence[Message]) -> None:
        """Compare each record of a use with the recomputed choice. `messages`: those of `outcomes`, in order."""
        sequences: dict[int, list[int]] = defaultdict(list)
        for message in messages:
            if isinstance(message, GroupOutcome) and message.batch_sequence is not None and not message.late:
                sequences[message.batch_sequence].append(message.sequence)
        told: set[int] = set()
        seen = 0
        for message in messages:
            match message:
                case GroupOutcome():
                    seen += 1
                    self._pool.learn(message)
                case BatchReuse():
                    told.add(message.batch_sequence)
                    self._compare(message, sequences[message.batch_sequence], seen)
                    self._pool.learn_uses(message)
        for batch in sorted(sequences.keys() - told) if self._pool else ():
            self._found.differs(f"outcomes: batch {batch}: no record of what it has once more, expected one")

    def _compare(self, said: BatchReuse, sequences: Sequence[int], seen: int) -> None:
        batch, where = said.batch_sequence, f"outcomes: reuse/{said.batch_sequence}"
        beside = takes_demonstrations(self._stages, self._stages.at(batch))
        chosen = self._pool.choose(batch, sequences, takes_demonstrations=beside)
        self._found.num_choices += 1
        self._found.expect(where, "seen", said.seen, seen)
        self._found.expect(where, "uses", said.uses, uses_of(chosen))
        for one in chosen:
            self._chosen |= {(batch, rollout_id): one for rollout_id in one.use.rollouts}

    def check_body(self, experience: Experience, said: Trimmed) -> bool:
        """Return whether a batch holds the result of the use, recomputed from `verified`. True for groups whose
        rollouts may be gone."""
        one = self._chosen.get((experience.batch_sequence, experience.ids.rollout_id))
        if one is None:
            return False
        if one.use.sequence < said.sequence:
            return True
        bodies = self._bodies.read([one])
        made = self._bodies.experiences(one, bodies, experience.batch_sequence, experience.share, 0)
        names = dict(zip(one.use.rollouts, made, strict=True))
        expected = names[experience.ids.rollout_id]
        fields = ("segments", "reward", "roles", "terms", "weight", "use")
        return all(getattr(expected, name) == getattr(experience, name) for name in fields)
