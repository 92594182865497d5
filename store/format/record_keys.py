"""What the key index gets of records whose properties are text already, by columns."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rmq_spark.store.format.java import string_hash
from rmq_spark.store.format.message_columns import Texts
from rmq_spark.store.format.properties import KEYS, UNIQ_KEY, PropertyPairs
from rmq_spark.store.format.shaped_properties import ShapedPairs


def key_entries(
    pairs: ShapedPairs | PropertyPairs, topics: Sequence[str], topic_numbers: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return row and hash of each index entry, in the order in which a broker puts them: UNIQ_KEY, then KEYS in order.

    Row `i` has the properties `pairs` has there, and the topic `topics[topic_numbers[i]]`. Source:
    IndexService#buildIndex, IndexFile#indexKeyHashMethod (4.9, 5.3).
    """
    of_topic = np.array([string_hash(f"{topic}#") & 0xFFFFFFFF for topic in topics], np.uint32)[topic_numbers]
    ids, keys = Texts.of(pairs.column(UNIQ_KEY)), Texts.of(pairs.column(KEYS))
    hashes, rows = ids.hashes.java(before=of_topic), np.arange(len(topic_numbers))
    if ids.given is not None:
        rows, hashes = rows[ids.given], hashes[ids.given]
    key_rows, words = keys.words()
    if len(key_rows):
        rows = np.concatenate([rows, key_rows])
        # UNIQ_KEY first: a stable order by row of all of the one kind, then all of the other.
        order = np.argsort(rows, kind="stable")
        rows, hashes = rows[order], np.concatenate([hashes, words.java(before=of_topic[key_rows])])[order]
    # |-2^31| stays negative in numpy as in Java; the index takes 0 for it.
    return rows, np.maximum(np.abs(hashes.view(np.int32)), 0)
