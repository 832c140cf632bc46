"""Estimates the rollouts that each role holds in main memory at most: how many its settings let it have, each as long
as the longest prompt and completion. They are the same for every engine.

The factors count how often a rollout is held at once: as it was read, decoded, and as the record that is made of it.
They were measured in runs of 64 groups of 8 rollouts of 32,000 tokens on both logs, with a kill of each role.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rftstream.config.parts.part_names import compares_siblings
from rftstream.config.role_sections import AUTO
from rftstream.config.sections import RunConfig
from rftstream.preflight.estimate import CHARACTERS_PER_TOKEN
from rftstream.rewards.process import MAX_CHUNK_BYTES
from rftstream.roles.explorer.saved.partials import MAX_HELD_BYTES

TOKEN_BYTES = 9
"""Bytes of a token in arrays: id, logprob and mask."""
ROW_BYTES = 3 * 4
"""Bytes of a token that a row for the backend adds: its mask, its advantage, and one array that is computed."""
RECORD_BYTES = 4096
"""Bytes of a record beside its tokens and texts."""
LOG_BYTES = {"embedded": 64 << 20}
"""Bytes of what a role has read and not yet taken, of a transaction, and of SQLite's pages."""
CLIENT_BYTES = 160 << 20
"""The same for another log, whose client fetches and sends in the background."""


@dataclass(frozen=True, slots=True)
class RolloutsHeld:
    """The rollouts that the roles of a run have in hand. `estimate_memory` makes it."""

    config: RunConfig
    longest: int
    """Tokens of the longest prompt and completion."""
    tasks: Mapping[str, int]
    """Number of tasks of each evaluation, as far as it is known."""
    beside: int = 0
    """Bytes that a sampler records beside a token."""

    @property
    def record(self) -> int:
        """Return the bytes of a rollout with its texts."""
        return self.longest * (TOKEN_BYTES + self.beside + CHARACTERS_PER_TOKEN) + RECORD_BYTES

    @property
    def of_batch(self) -> int:
        """Return the number of rollouts of a batch."""
        return self.config.feeder.groups_per_batch * self.config.feeder.group_size

    @property
    def open(self) -> int:
        """Return the number of rollouts that may be on their way at once."""
        return self.of_batch * (self.config.feeder.max_staleness + 1)

    @property
    def log(self) -> dict[str, int]:
        """Return the bytes of what the log's client holds."""
        return {"log": LOG_BYTES.get(self.config.transport.kind, CLIENT_BYTES)}

    def explorer(self) -> dict[str, int]:
        """Return the bytes of rollouts that are sampled, and of pieces that a predecessor saved."""
        section = self.config.explorer
        most = section.first_concurrent if section.max_concurrent != AUTO else self.open
        num = min(most * (2 if section.yield_after_tokens else 1), self.open)
        saved = min(MAX_HELD_BYTES, num * self.record) if section.partial_every_s else 0
        return {"rollouts": 3 * num * self.record, "saved pieces": saved, **self.log}

    def evaluator(self) -> dict[str, int]:
        """Return the bytes of the samples of one evaluation. All are held until it ends."""
        num = max(
            (section.num_tasks or self.tasks.get(name, 0)) * section.n
            for name, section in self.config.evaluations.items()
        )
        return {"samples": 2 * num * self.record, **self.log}

    def verifier(self) -> dict[str, int]:
        """Return the bytes of rollouts that are being scored, and of those that wait for siblings."""
        num = min(self.config.verifier.max_concurrent, self.open)
        waiting = 2 * min(self.open * self.record, self.config.verifier.max_waiting_bytes)
        siblings = {"siblings": waiting} if compares_siblings(self.config) else {}
        return {"rollouts": 4 * num * self.record, **siblings, **self.log}

    def scorer(self) -> dict[str, int]:
        """Return the bytes of rollouts that one scoring process has been given."""
        num = min(self.config.verifier.max_concurrent, self.open)
        return {"rollouts": 2 * min(num * self.record, MAX_CHUNK_BYTES + self.record)}

    def buffer(self) -> dict[str, int]:
        """Return the bytes of the bodies of open groups, and of a batch that is made. Bodies for which there is no room
        are read again for it. Clients of other logs than the embedded one hold the whole batch in three forms: as it
        was made, as it is sent, and compressed."""
        of_open, room = self.open * self.record, self.config.buffer.max_body_bytes
        again = min(of_open - room, self.of_batch * self.record) if of_open > room else 0
        made = self.of_batch * (self.longest * (TOKEN_BYTES + self.beside) + RECORD_BYTES)
        copies = 1 if self.config.transport.kind in LOG_BYTES else 3
        return {"bodies": min(of_open, room), "batch": copies * made + again, **self.log}

    def trainer(self) -> dict[str, int]:
        """Return the bytes of the batch that is trained, with its rows, and of the next one, with its records."""
        each = self.longest * (TOKEN_BYTES + self.beside) + RECORD_BYTES
        rows = self.of_batch * self.longest * ROW_BYTES
        return {"batches": 3 * self.of_batch * each, "rows": rows, **self.log}
