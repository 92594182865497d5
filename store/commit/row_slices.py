"""Encoded records cut by rows and put together again. The digest of a part is not known: it is 0 in what comes out."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from rmq_spark.store.format.encoding import EncodedRecords
from rmq_spark.store.format.filenames import WAITING_TOPICS
from rmq_spark.store.units import QueueKey


def slice_records(records: EncodedRecords, first: int, last: int) -> EncodedRecords:
    """Return the rows [first, last) over the same memory."""
    if first == 0 and last == len(records):
        return records
    begin = int(records.sizes[:first].sum())
    end = begin + int(records.sizes[first:last].sum())
    first_key, last_key = np.searchsorted(records.key_rows, [first, last]).tolist()
    return EncodedRecords(
        records.data[begin:end],
        records.sizes[first:last],
        records.queues,
        records.queue_numbers[first:last],
        records.tags_codes[first:last],
        records.key_rows[first_key:last_key] - first,
        records.key_hashes[first_key:last_key],
        0,
        records.real_topics,
    )


def split_records(records: EncodedRecords, limit_bytes: int) -> Iterator[EncodedRecords]:
    """Yield the records in parts of at most `limit_bytes`; a longer record goes alone."""
    ends = np.cumsum(records.sizes)
    first, done = 0, 0
    while first < len(records):
        last = max(int(np.searchsorted(ends, done + limit_bytes, side="right")), first + 1)
        yield slice_records(records, first, last)
        first, done = last, int(ends[last - 1])


def merge_records(parts: Sequence[EncodedRecords]) -> EncodedRecords:
    """Return the records of all parts, at least one, one after the other: copied, so that they may be changed."""
    numbers: dict[QueueKey, int] = {}
    renumbered = []
    for part in parts:
        own = np.array([numbers.setdefault(key, len(numbers)) for key in part.queues], np.int32)
        renumbered.append(own[part.queue_numbers])
    firsts = np.cumsum([0, *(len(part) for part in parts[:-1])])
    return EncodedRecords(
        np.concatenate([part.data for part in parts]),
        np.concatenate([part.sizes for part in parts]),
        tuple(numbers),
        np.concatenate(renumbered),
        np.concatenate([part.tags_codes for part in parts]),
        np.concatenate([part.key_rows + first for part, first in zip(parts, firsts, strict=True)]),
        np.concatenate([part.key_hashes for part in parts]),
        0,
        add_topics(part.real_topics for part in parts),
    )


def named_topics(records: EncodedRecords) -> dict[str, int]:
    """Return the topics that must be there for records to be appended: topic -> largest queue id, plus one.

    Those in which messages wait have the queues that they have: they count as one. With them come the topics for which
    they wait, which a broker or a tick will look for.
    """
    queues = [records.queues[number] for number in np.unique(records.queue_numbers).tolist()]
    counts = ({key.topic: 1 if key.topic in WAITING_TOPICS else key.queue_id + 1} for key in queues)
    return add_topics((records.real_topics, *counts))


def add_topics(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the largest count of each topic."""
    found: dict[str, int] = {}
    for some in counts:
        for topic, count in some.items():
            found[topic] = max(found.get(topic, 0), count)
    return found
