"""Writing a worker's transactions one after the other, each of them once. Both loops use this module.

A commit has one of four results, which are also the labels of the metric TRANSACTIONS:

    committed   it is on the log
    refused     it is not on the log: a partition has changed hands, and its work is dropped
    aborted     it is not on the log: it is tried again after a while
    lost        nobody knows (ProducerLost): it may be on the log, or another process may have taken over

After a lost commit the transaction is in doubt, and nothing else may be written. Resolving the doubt takes two steps,
in this order. First a new producer is started: that ends what the lost one had open. Then the loop looks at the log.
What the loop looks for is its own affair, since what it wrote can be recognized by different signs:

    single       reads `control` for a newer claim, then recovers from its own output
    concurrent   reads the committed positions, and the topic on which it saves what is not finished
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
    """Writes the transactions of one worker. A loop makes it together with itself, and calls:

    1. `begin` before the first transaction;
    2. `commit` for each transaction, and again for one that was aborted;
    3. while `is_in_doubt`, nothing but `resolve`;
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
        """`open_producer` makes a producer, which is not started. `when_aborted` and `when_lost` are told of a commit
        that failed for now; the loop decides in them when to go on."""
        self.is_in_doubt = False
        """Whether the last transaction may be on the log, or may not."""
        self._role = role
        self._open_producer = open_producer
        self._when_aborted, self._when_lost = when_aborted, when_lost
        self.producer = open_producer()
        """The producer in use. The loop itself uses it only for the claim of a single role, which is no transaction of
        the step."""
        self._was_started = False
        # Looking a labelled metric up costs more than counting.
        self._seconds = metrics.COMMIT_SECONDS.labels(role)
        self._transactions = functools.cache(lambda result: metrics.TRANSACTIONS.labels(role, result))
        self._records_out = functools.cache(lambda topic: metrics.RECORDS_OUT.labels(role, topic))
        self._bytes_out = functools.cache(lambda topic: metrics.BYTES_OUT.labels(role, topic))

    def begin(self) -> None:
        """Start a producer, in place of the one before. Nothing that the one before has open is committed any more."""
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
        """Write one transaction and return whether it is on the log; arguments as for `Producer.commit`.

        If it is not, `is_in_doubt` tells whether that is certain. Raises what cannot pass by itself."""
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

        `look_up` asks the log, and brings the loop's state in line with what it finds there. If the log does not
        answer, the transaction stays in doubt, and `resolve` is called again."""
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
