"""Write the transactions of a worker one after the other, each exactly once. Both loops use this module.

A commit has one of four results, which are also the labels of the metric TRANSACTIONS:

    committed   the transaction is on the log
    refused     it is not on the log: a partition has changed hands, and the work of that partition is dropped
    aborted     it is not on the log: the loop tries it again after a pause
    lost        nobody knows (ProducerLost): it may be on the log, or another process may have taken over

After a lost commit the transaction is in doubt, and nothing else may be written. The doubt is resolved in two steps, in
this order. First a new producer is started, which ends the lost producer's open transaction. Then the loop looks at the
log for traces of the transaction. Each loop looks in its own way:

    single       reads `control` for a newer claim, then recovers from its own output
    concurrent   reads the committed positions, and the topic on which it saves unfinished work
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from rftstream import metrics
from rftstream.contracts.records import NewRecord, TopicPartition
from rftstream.errors import AssignmentLost, ProducerLost, TransportError
from rftstream.transport.base import Position, Producer, Snapshot

log = logging.getLogger(__name__)


class TransactionWriter:
    """Writes the transactions of one worker. A loop makes it when it is made itself, and calls:

    1. `begin` before the first transaction;
    2. `commit` for each transaction, and again for one that was aborted;
    3. nothing but `resolve` while `is_in_doubt` is true;
    4. `close`, last.
    """

    def __init__(
        self,
        role: str,
        open_producer: Callable[[], Producer],
        *,
        when_aborted: Callable[[Exception], object],
        when_lost: Callable[[Exception], object],
    ) -> None:
        """`open_producer` makes a producer without starting it. `when_aborted` and `when_lost` are called after a
        commit that failed for now. In these callbacks the loop decides when to try again."""
        self.is_in_doubt = False
        """Whether nobody knows if the last transaction is on the log."""
        self._role = role
        self._open_producer = open_producer
        self._when_aborted, self._when_lost = when_aborted, when_lost
        self.producer = open_producer()
        """The current producer. The loop uses it directly only to write the claim of a single role, which belongs to no
        transaction of the step."""
        self._was_started = False
        # Looking up a labelled metric costs more than counting.
        self._seconds = metrics.COMMIT_SECONDS.labels(role)
        self._transactions = functools.cache(lambda result: metrics.TRANSACTIONS.labels(role, result))
        self._records_out = functools.cache(lambda topic: metrics.RECORDS_OUT.labels(role, topic))
        self._bytes_out = functools.cache(lambda topic: metrics.BYTES_OUT.labels(role, topic))

    def begin(self) -> None:
        """Start a new producer in place of the current one. An open transaction of the old producer can no longer be
        committed."""
        if self._was_started:
            self.producer.close()
            self.producer = self._open_producer()
        self._was_started = True
        self.producer.start()

    def commit(
        self,
        records: Sequence[NewRecord],
        *,
        positions: Mapping[TopicPartition, Position],
        group: str | None = None,
        snapshot: Snapshot | None = None,
    ) -> bool:
        """Write one transaction and return whether it is on the log. The arguments are those of `Producer.commit`.

        After False, `is_in_doubt` tells whether the transaction may still be on the log. Errors that cannot pass by
        themselves are raised."""
        try:
            with self._seconds.time():
                self.producer.commit(records, positions=positions, group=group, snapshot=snapshot)
        except AssignmentLost as error:
            self._count("refused")
            log.info("%s; its work is dropped", error)
            return False
        except ProducerLost as error:
            self._count("lost")
            self.is_in_doubt = True
            self._when_lost(error)
            return False
        except TransportError as error:
            if not error.retriable:
                raise
            self._count("aborted")
            self._when_aborted(error)
            return False
        self._count("committed")
        self._count_records(records)
        return True

    def resolve(self, look_up: Callable[[], object]) -> None:
        """Find out what became of a transaction in doubt: start a new producer, then call `look_up`.

        `look_up` reads the log and brings the loop's state in line with it. If the log does not answer, the transaction
        stays in doubt, and `resolve` is called again."""
        self.begin()
        look_up()
        self.is_in_doubt = False

    def close(self) -> None:
        """Close the producer."""
        self.producer.close()

    def _count(self, result: str) -> None:
        self._transactions(result).inc()

    def _count_records(self, records: Sequence[NewRecord]) -> None:
        counts: Counter[str] = Counter()
        num_bytes: Counter[str] = Counter()
        for record in records:
            counts[record.topic] += 1
            num_bytes[record.topic] += record.num_bytes
        for topic, count in counts.items():
            self._records_out(topic).inc(count)
            self._bytes_out(topic).inc(num_bytes[topic])
