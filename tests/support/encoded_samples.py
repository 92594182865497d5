"""Sample messages as encoded records for a writer, built record by record in the obvious way."""

from collections.abc import Sequence

import numpy as np

from rmq_spark.store.format.java import index_key_hash
from rmq_spark.store.format.message_encoder import EncodedRecords
from rmq_spark.store.format.properties import KEYS, UNIQ_KEY, parse
from rmq_spark.store.format.record import encode_record
from rmq_spark.store.testing.sample_message import SampleMessage


def encode_samples(messages: Sequence[SampleMessage]) -> EncodedRecords:
    """Return the records of these messages; fields that the store assigns are zero."""
    queues = tuple(dict.fromkeys(message.queue for message in messages))
    data = [encode_record(message.as_record(0, 0, 0)) for message in messages]
    rows, hashes = [], []
    for row, message in enumerate(messages):
        properties = parse(message.properties_text)
        keys = [properties[UNIQ_KEY]] if UNIQ_KEY in properties else []
        keys += [key for key in properties.get(KEYS, "").split(" ") if key]
        rows += [row] * len(keys)
        hashes += [index_key_hash(f"{message.topic}#{key}") for key in keys]
    return EncodedRecords(
        np.frombuffer(b"".join(data), np.uint8).copy(),
        np.array([len(one) for one in data], np.int64),
        queues,
        np.array([queues.index(message.queue) for message in messages], np.int32),
        np.array([message.tags_code for message in messages], np.int64),
        np.array(rows, np.int64),
        np.array(hashes, np.int32),
        0,
    )
