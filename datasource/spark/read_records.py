"""The records by which a restarted query recognises the stores of brokers.

While a query is stopped, a broker may be restored from a copy, or another one may take its name. Its queues can then be
as long as before and have other messages. So the offset of each batch has one record for each topic and broker: the
physical offset and the store time of a message before a position of the query. The first plan of a run hands these
records to the place, which compares them. A directory has an identity instead, and its offsets have no records.

Spark stores the offset of a batch before it plans the batch's tasks. So the record is that of an earlier batch, from
the positions that its tasks were planned with, and costs no request. Only if a topic on a broker has no record yet,
one message is looked up. The records change only together with a position, because Spark begins a batch whenever the
text of the offset differs.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from pyspark.sql.datasource import InputPartition

from rmq_spark.datasource.plan.offsets import StreamOffset
from rmq_spark.datasource.spark.partition import RmqPartition
from rmq_spark.datasource.spark.source_view import SourceView
from rmq_spark.store.model import QueueKey, RecordProof

_Pair = tuple[str, str]  # a topic and a broker
_Place = tuple[QueueKey, int]


class ReadRecords:
    """The records of one run of a stream. They have no effect in a place without broker names."""

    def __init__(self, view: SourceView) -> None:
        self._view = view
        self.has_begun = not view.has_brokers
        self._new: dict[_Pair, tuple[_Place, RecordProof]] = {}  # those that no offset has yet

    def recall(self, offset: StreamOffset) -> bool:
        """Before the run's first plan, let the place compare the records of an offset when it is looked at next.

        Return whether there is anything to compare.
        """
        if self.has_begun or not offset.records:
            return False
        self._view.backend.note_read(offset.records)
        return True

    def begin(self, positions: Mapping[QueueKey, int]) -> None:
        """Let the place remember the record before each position of a query that begins again.

        The place recognises by it that a broker was replaced, also in a queue that the run has not read yet. Only the
        first call has an effect. It ends the time for `recall`.
        """
        if self.has_begun:
            return
        bounds = self._view.bounds
        held = (queue for queue in positions.keys() & bounds.keys() if positions[queue] <= bounds[queue].max_offset)
        self._note(
            self._view.backend.positions([(queue, positions[queue] - 1) for queue in sorted(held) if positions[queue]])
        )
        self.has_begun = True

    def note_planned(self, partitions: Iterable[InputPartition]) -> None:
        """Remember the records that the tasks of a batch end with."""
        if not self._view.has_brokers:
            return
        for partition in partitions:
            assert isinstance(partition, RmqPartition)
            pieces = partition.pieces
            self._note({(one.queue, one.end - 1): one.last for one in pieces if one.last is not None})

    def add_to(self, before: StreamOffset, after: StreamOffset) -> StreamOffset:
        """Return `after`, the end of a batch that begins at `before`, with its records.

        The record of a queue that was dropped, or that went back, is forgotten.
        """
        if not self._view.has_brokers:
            return after
        known = {_pair(place): (place, proof) for place, proof in before.records.items()} | self._new
        self._new = {}
        kept = {
            pair: (place, proof)
            for pair, (place, proof) in known.items()
            if place[1] < after.positions.get(place[0], 0)
        }
        wanted: dict[_Pair, _Place] = {}
        for queue, available in self._view.bounds.items():
            place = queue, after.positions.get(queue, 0) - 1
            if place[1] >= available.min_offset and _pair(place) not in kept:
                wanted.setdefault(_pair(place), place)
        found = self._view.backend.positions(wanted.values()) if wanted else {}
        return replace(after, records={**dict(kept.values()), **found})

    def _note(self, records: Mapping[_Place, RecordProof]) -> None:
        """Remember the youngest record of each topic on each broker: it expires last."""
        for place, proof in records.items():
            known = self._new.get(_pair(place))
            if known is None or _stored(known[1]) <= _stored(proof):
                self._new[_pair(place)] = place, proof


def _pair(place: _Place) -> _Pair:
    return place[0].topic, place[0].broker


def _stored(proof: RecordProof) -> tuple[int, int]:
    return proof.store_time_ms, proof.physical_offset
