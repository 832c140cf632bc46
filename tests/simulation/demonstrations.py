"""The laws of demonstrations: numbers are dense, each pass takes each once and none that is held out, batches have as
many as they should."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

from rftstream.contracts.batches import BatchManifest, Experience
from rftstream.contracts.demonstrations import Demonstration
from rftstream.contracts.ids import split_group_id
from rftstream.contracts.records import Record
from rftstream.data.demonstrations.split import held_out_numbers, trained_numbers
from rftstream.data.demonstrations.tokens import kind_of

if TYPE_CHECKING:
    from tests.simulation.laws import Laws


class Demonstrations:
    def __init__(self, laws: Laws) -> None:
        self._laws = laws
        self.settings = laws.config.experts
        self.loads: list[str] = []
        """Ids, by number."""
        self.passes: dict[tuple[str, int], list[int]] = defaultdict(list)
        """Of which loss kind, where each has passes of its own, and pass -> numbers, in the order of the log: over the
        shares of a batch any."""
        self._kinds: dict[int, str] = {}
        """By number."""
        self._sequences: list[int] = []
        self._total: dict[int, int] = {}
        """By batch."""

    def loaded(self, record: Record, one: Demonstration) -> None:
        assert one.demonstration_id not in self.loads, "each is loaded once"
        assert record.partition == one.number % self._laws.config.transport.partitions
        self.loads.append(one.demonstration_id)
        self._kinds[one.number] = str(kind_of(one))

    def taken(self, experience: Experience) -> None:
        assert self.settings is not None
        ids = split_group_id(experience.ids.group_id)
        assert ids is not None
        taken, number = ids[1], ids[2]
        assert experience.reward is None
        assert number < len(self.loads)
        assert number not in held_out_numbers(number + 1, self.settings.held_out), "it is held out"
        kind = ""
        if self._laws.made:
            made = self._laws.made[experience.batch_sequence]
            assert made.kind is experience.loss_kind, "another stage takes it"
            kind = str(made.kind)
        if experience.pair == "rejected":
            assert self.passes[kind, taken][-1] == number, "beside the one that was chosen"
            return
        assert number not in self.passes[kind, taken], f"{experience.ids.group_id}: a second time in this pass"
        self.passes[kind, taken].append(number)
        self._sequences.append(experience.ids.sequence)

    def manifest(self, manifest: BatchManifest) -> None:
        known = self._total.setdefault(manifest.batch_sequence, manifest.total_experts)
        assert known == manifest.total_experts, "shares agree"
        config = self._laws.config
        if config.demonstrations_alone or self.settings is None:
            return
        # The last groups do not wait for demonstrations, of which there may be none yet.
        awaited = manifest.total_experts or (self._laws.made and not manifest.last)
        if self.settings.passes is None and awaited:
            wanted = math.ceil(self.settings.ratio * manifest.num_groups * config.feeder.group_size)
            if self._laws.made:
                made = self._laws.made[manifest.batch_sequence]
                wanted = made.num_demonstrations(manifest.num_groups, config.feeder.group_size)
            assert manifest.total_experts - self._total.get(manifest.batch_sequence - 1, 0) == wanted

    def check_end(self) -> None:
        assert sorted(self._sequences) == list(range(len(self._sequences))), "uses are counted without a gap"
        assert max(self._total.values(), default=0) == len(self._sequences)
        finished = self._laws.finished
        whole = self._laws.config.demonstrations_alone and finished is not None and finished.reason == "experts"
        for (kind, taken), numbers in self.passes.items():
            if (whole or (kind, taken + 1) in self.passes) and self.settings is not None:
                size = len(self.loads) if whole else max(numbers) + 1
                trained = trained_numbers(size, self.settings.held_out).tolist()
                assert sorted(numbers) == [one for one in trained if kind in ("", self._kinds[one])]
        if self.settings is not None and self.settings.passes is not None:
            assert len(self.passes) <= self.settings.passes
            assert not whole or len(self.passes) == self.settings.passes
        if self.loads:
            report = self._laws.simulation.audit()
            assert report.demonstrations is not None
            assert report.demonstrations.trained == self._total.get(self._laws.version - 1, 0)
            assert report.demonstrations.admitted == len(self._sequences)
