"""Where messages that wait are to be delivered: REAL_TOPIC and REAL_QID of their properties, by columns."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmq_spark.store.errors import OptionError
from rmq_spark.store.format.filenames import MAX_DERIVED_TOPIC_CHARS, WAITING_TOPICS, check_topic_name
from rmq_spark.store.format.message_columns import Topics
from rmq_spark.store.format.properties import PropertyPairs
from rmq_spark.store.format.shaped_properties import ShapedPairs
from rmq_spark.store.format.whole_records import WholeRecords

REAL_TOPIC = "REAL_TOPIC"
REAL_QUEUE_ID = "REAL_QID"
HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"

_MAX_QUEUE_ID = 2**31 - 1
_GROWTH_BYTES = MAX_DERIVED_TOPIC_CHARS + 1  # by which a record may be longer with another topic
_NO_QUEUE = -1


@dataclass(frozen=True, slots=True)
class RealQueues:
    """Of the rows asked about: those that can be delivered (`rows`, ascending), and where each of them goes.

    `refused` has the others by why not.
    """

    rows: NDArray[np.int64]
    topics: Topics  # of `rows`
    queue_ids: NDArray[np.int64]  # of `rows`
    refused: Mapping[str, NDArray[np.int64]]


def find_real_queues(
    pairs: ShapedPairs | PropertyPairs, most_bytes: int, records: WholeRecords | None = None
) -> RealQueues:
    """Return where messages with these properties go. A record may take `most_bytes`; `records` are what they are now.

    Refused is what a broker could not put either, or would put back to where it waits: a missing or odd name or number,
    a record that fits into no segment under its own topic's name.
    """
    names = pairs.column(REAL_TOPIC).dictionary_encode()
    texts = pairs.column(REAL_QUEUE_ID).dictionary_encode()
    topic_numbers = pc.fill_null(names.indices, _NO_QUEUE).to_numpy().astype(np.int64)
    distinct = names.dictionary.to_pylist()
    whys = np.array([*(_why_not(name) for name in distinct), f"it has no property {REAL_TOPIC}"], object)
    ids = np.array([*(_queue_id(text) for text in texts.dictionary.to_pylist()), _NO_QUEUE], np.int64)
    queue_ids = ids[pc.fill_null(texts.indices, _NO_QUEUE).to_numpy()]
    why = whys[topic_numbers]
    why[(why == "") & (queue_ids == _NO_QUEUE)] = f"its property {REAL_QUEUE_ID} is missing, or no queue id"
    if records is not None:
        sizes = records.ends - records.positions
        for row in np.flatnonzero((why == "") & (sizes + _GROWTH_BYTES > most_bytes)).tolist():
            before = int(records.topic_ends[row] - records.topic_begins[row])
            if int(sizes[row]) - before + len(distinct[topic_numbers[row]].encode()) + 1 > most_bytes:
                why[row] = "with the name of its own topic it is longer than a segment"
    rows = np.flatnonzero(why == "")
    used, numbers = np.unique(topic_numbers[rows], return_inverse=True)
    kept = tuple(distinct[number] for number in used.tolist())
    topics = Topics(kept or ("",), numbers.astype(np.int64) if len(kept) != 1 else None)
    refused = {str(text): np.flatnonzero(why == text) for text in dict.fromkeys(why.tolist()) if text}
    return RealQueues(rows, topics, queue_ids[rows], refused)


def _why_not(topic: str) -> str:
    """Return why nothing is delivered to a topic, "" where it can be."""
    if topic == HALF_TOPIC:
        return f"its own topic is {HALF_TOPIC}, which is discarded as a broker does"
    if topic in WAITING_TOPICS:
        return f"its own topic is {topic}, where it would wait for ever"
    try:
        check_topic_name(topic)
    except OptionError as error:
        return f"its property {REAL_TOPIC} is no topic: {error}"
    return ""


def _queue_id(text: str) -> int:
    """Return the queue id that a text names (Integer#parseInt), -1 for none."""
    digits = text.removeprefix("+")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 20) or int(digits) > _MAX_QUEUE_ID:
        return _NO_QUEUE
    return int(digits)
