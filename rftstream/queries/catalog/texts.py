"""The texts in a catalog: what rollouts and samples of evaluations said, and what they were asked.

Texts are read after all other rows, from the bodies of rollouts and from the objects of evaluations, so that a new
catalog shows its counts without waiting for them. Long texts are cut: pages of one rollout read the log.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any

from rftstream.contracts import codec
from rftstream.contracts.ids import split_group_id
from rftstream.contracts.records import Record, TopicPartition
from rftstream.contracts.rollouts import Rollout, Turn
from rftstream.contracts.versions import EvalResult
from rftstream.errors import ContractError, RftError
from rftstream.queries.audits.rows import Mark, NewRecords
from rftstream.queries.catalog.database import CatalogDatabase, Connection
from rftstream.queries.records.problem_list import text_of
from rftstream.rewards.answers.boxes import find_answers
from rftstream.rewards.answers.clean import bare_words
from rftstream.runs.folder import OpenRun, open_store
from rftstream.weights.stores.store import ObjectStore

log = logging.getLogger(__name__)

TOPIC = "rollouts"
POLLED = 100
"""Records of one poll: a body may be large."""
POLLS = 20
"""Polls of one call, after which others have their turn unless it has more time."""
RESULTS = 8
"""Results of evaluations whose samples one call reads."""
HEAD, TAIL = 5_000, 3_000
"""Characters that are kept of the beginning and of the end of a text."""
END = 600
"""Characters at the end of what was said in which its answer is looked for."""
SIBLING_BITS = 20
"""Bits of a text's id that hold the sibling's number."""
Ends = Mapping[TopicPartition, int]
STORE_PATIENCE_S = 5.0
"""Seconds to wait for a store that does not answer."""


def cut_text(text: str) -> str:
    """Return a text, without its middle if it is long."""
    return text if len(text) <= HEAD + TAIL else f"{text[:HEAD]} [...] {text[-TAIL:]}"


def said_in(rollout: Rollout) -> str:
    """Return what the policy said in a rollout, as a catalog keeps it."""
    return cut_text("\n".join(turn.content for turn in rollout.turns if turn.role == "assistant"))


def asked_in(rollout: Rollout) -> str:
    """Return what a rollout was asked, as a catalog keeps it."""
    return "" if rollout.problem is None else cut_text(text_of(rollout.problem))


def answer_in(turns: Iterable[Turn]) -> str | None:
    """Return the answer at the end of a rollout, in the form in which answers are compared; None if it has none, or
    was cut off. It is looked for as the rewards do, in the last characters alone."""
    said = [turn for turn in turns if turn.role == "assistant"]
    if not said or said[-1].finish_reason == "length":
        return None
    end = said[-1].content[-END:]
    _, mark, marked = end.rstrip().rpartition("####")
    is_answer = mark and "\n" not in marked  # as in GSM8K; else it is a heading
    found = find_answers(marked if is_answer else end)
    return bare_words(found[0].text) or None if found else None


class TextReader:
    """Reads the texts of one run into its catalog. The catalog's updater makes it and calls `read`."""

    def __init__(self, run: OpenRun) -> None:
        self._run = run
        self._records = NewRecords(run.transport, bodies=True)
        self._store: ObjectStore | None = None
        self._failed: set[str] = set()
        """Objects that cannot be read. They are not tried again."""
        self.done = self.total = 0
        """Offsets whose texts were read, and offsets in all, after the last call."""

    def read(
        self, database: CatalogDatabase, results: Iterable[EvalResult], has_time: Callable[[], bool] = lambda: False
    ) -> bool:
        """Read some of the new texts, and go on while the caller `has_time`. Return whether there may be more."""
        self._read_rollouts(database, has_time)
        return self._read_results(database, results) or self.num_left > 0

    def rest(self) -> None:
        """Close the reader. The next call opens another one."""
        self._records.rest()

    # ------------------------------------------------------------------------------------------ rollouts

    def measure(self, rows: Iterable[Any]) -> tuple[Ends, dict[TopicPartition, Mark]]:
        """Note how many texts a catalog with these marks lacks. Return the topic's ends, and the marks."""
        ends = self._run.transport.admin.end_offsets(TOPIC)
        marks = {
            TopicPartition(TOPIC, partition): Mark(end, last, int(fingerprint))
            for partition, end, last, fingerprint in rows
        }
        self._note(ends, marks)
        return ends, marks

    def _note(self, ends: Ends, marks: Mapping[TopicPartition, Mark]) -> None:
        self.total = sum(ends.values())
        self.done = sum(min(end, marks.get(place, Mark(0)).end) for place, end in ends.items())

    @property
    def num_left(self) -> int:
        """Return how many rollouts' texts are still to be read, after the last call."""
        return self.total - self.done

    def _read_rollouts(self, database: CatalogDatabase, has_time: Callable[[], bool]) -> None:
        ends, marks = self.measure(database.rows("SELECT * FROM text_marks"))
        if not self.num_left:
            self.rest()
            return
        with closing(self._records.read(TOPIC, marks, ends, max_polled=POLLED)) as polls, database.transaction() as db:
            for number, records in enumerate(polls, 1):
                _write(db, records)
                if number >= POLLS and not has_time():
                    break
            rows = [(place.partition, mark.end, mark.last, str(mark.fingerprint)) for place, mark in marks.items()]
            db.executemany("INSERT OR REPLACE INTO text_marks VALUES (?, ?, ?, ?)", rows)
        self._note(ends, marks)

    # ------------------------------------------------------------------------------------------ evaluations

    def _read_results(self, database: CatalogDatabase, results: Iterable[EvalResult]) -> bool:
        """Read the samples of results that are not read yet. Return whether there may be more."""
        known = {None, *(name for (name,) in database.rows("SELECT object FROM results")), *self._failed}
        fresh = [(result.generations, result) for result in results if result.generations not in known]
        for name, result in fresh[:RESULTS]:
            assert name is not None, "a result without samples is known"
            try:
                if self._store is None:
                    self._store = open_store(self._run.config, self._run.folder, patience_s=STORE_PATIENCE_S)
                lines = [json.loads(line) for line in self._store.get(name).splitlines()]
                with database.transaction() as db:
                    _write_samples(db, result, name, lines)
            except (RftError, ValueError, LookupError, TypeError, AttributeError) as error:
                log.info("%s: its samples cannot be shown: %s", name, error)
                self._failed.add(name)
        return len(fresh) > RESULTS


def _write(db: Connection, records: list[Record]) -> None:
    texts, prompts = [], []
    tools: set[str] = set()
    for record in records:
        try:
            rollout = codec.from_record(record)
        except ContractError:
            continue
        if not isinstance(rollout, Rollout) or rollout.ids.sibling >> SIBLING_BITS or rollout.ids.sequence >> 40:
            continue
        names = dict.fromkeys(call.name for turn in rollout.turns for call in turn.tool_calls if call.name)
        tools.update(names)
        versions = [segment.versions[0].version for segment in rollout.segments if segment.versions]
        number = rollout.ids.sequence << SIBLING_BITS | rollout.ids.sibling
        in_spaces = f" {' '.join(names)} " if names else ""
        version = versions[0] if versions else None
        texts.append((number, version, answer_in(rollout.turns), in_spaces, said_in(rollout)))
        ids = split_group_id(rollout.ids.group_id)
        if ids is not None and rollout.problem is not None:
            reference = rollout.problem.answer
            shown = None if reference is None else cut_text(reference)
            prompts.append((ids[0], min(ids[2], 1 << 62), asked_in(rollout), shown))
    db.executemany("INSERT OR IGNORE INTO texts VALUES (?, ?, ?, ?, ?)", texts)
    db.executemany("INSERT OR IGNORE INTO prompts VALUES (?, ?, ?, ?)", dict.fromkeys(prompts))
    db.executemany("INSERT OR IGNORE INTO tools VALUES (?)", [(name,) for name in tools])


def _write_samples(db: Connection, result: EvalResult, name: str, lines: list[Mapping[str, Any]]) -> None:
    which = (result.evaluation, result.name.version)
    db.execute("DELETE FROM samples WHERE evaluation = ? AND version = ?", which)
    db.executemany("INSERT OR IGNORE INTO samples VALUES (?, ?, ?, ?, ?, ?, ?, ?)", _samples(which, lines))
    db.executemany("INSERT OR IGNORE INTO questions VALUES (?, ?, ?, ?)", _questions(result.evaluation, lines))
    db.execute("INSERT INTO results VALUES (?, ?, ?)", (name, *which))


def _samples(which: tuple[str, int], lines: list[Mapping[str, Any]]) -> Iterator[tuple[Any, ...]]:
    for line in lines:
        task, number = map(int, line["sample"].split("#"))
        said = "\n".join(turn["content"] for turn in line["completion"] if turn["role"] == "assistant")
        reward, reason = line["reward"], line["reason"] or line.get("detail")
        yield *which, task, number, reward, int(line["num_tokens"]), str(reason or ""), cut_text(said)


def _questions(evaluation: str, lines: list[Mapping[str, Any]]) -> Iterator[tuple[Any, ...]]:
    for line in lines:
        asked = [message["content"] for message in line["prompt"] if message["role"] == "user"]
        yield evaluation, int(line["sample"].split("#")[0]), cut_text(asked[-1] if asked else ""), line["answer"]
