"""Encoder of one message: its records equal those of the encoder of batches, and it leaves the rest to that one."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rmq_spark.store.errors import NotFoundError, OptionError
from rmq_spark.store.format.body_codec import BodyRules, Compression
from rmq_spark.store.format.java import Host, encode_host
from rmq_spark.store.format.message_encoder import EncodedRecords, MessageEncoder
from rmq_spark.store.format.message_ids import UniqueIds
from rmq_spark.store.format.message_table import message_of
from rmq_spark.store.format.queue_router import QueueRouter
from rmq_spark.store.format.single_message import SingleEncoder, SingleMessage

BORN_HOST, STORE_HOST = Host("10.1.2.3", 0), Host("192.0.2.7", 10911)
BORN_MS = 1_774_000_000_123
SEGMENT_BYTES = 50_000
COMPRESS_OVER = 60
WRITE_QUEUES = {"t": 4, "orders": 1, "%RETRY%" + "g" * 193: 3, "a" * 127: 2, "Abc-_1%|": 65_536, "none": 0}

WRONG_TOPICS = ["absent", "SCHEDULE_TOPIC_XXXX", "a b", "", "\ud800", "%LMQ%x", None, b"t"]

texts = st.one_of(
    st.sampled_from(["", "A", "k1 k2", " ", "a  b ", "polygenelubricants", "标签", "😀", "a\x01b", "word" * 9]),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x02"), max_size=20),
)
names = st.one_of(
    st.sampled_from(["TAGS", "KEYS", "__SHARDINGKEY", "WAIT", "a", "b", "名"]), st.text("abc", min_size=1, max_size=9)
)
usual = st.fixed_dictionaries(
    {
        "topic": st.sampled_from([topic for topic, count in WRITE_QUEUES.items() if count]),
        "body": st.one_of(st.binary(max_size=100), st.text("ab标😀", max_size=40)),
        "tags": st.none() | texts,
        "keys": st.none() | texts | st.lists(texts | st.none(), max_size=3),
        "properties": st.none() | st.dictionaries(names, st.none() | texts, max_size=5),
        "shardingKey": st.none() | texts,
        "queueId": st.sampled_from([None, None, 0]),
        "flag": st.sampled_from([0, 1, -(2**31), 2**31 - 1]),
    }
)
odd_texts = st.sampled_from(["a\x02b", "\ud800", 5, 1.5, True, b"x", (), [], {}])
odd_names = st.sampled_from(["DELAY", "__RMQ.TRANSIENT.x", "", "\x01", "\x7f", "\ud800", 5])
odd = {
    "topic": st.sampled_from(WRONG_TOPICS),
    "body": st.just(b"x" * SEGMENT_BYTES) | odd_texts | st.none(),
    "tags": odd_texts,
    "keys": odd_texts | st.lists(odd_texts, max_size=3),
    "properties": st.one_of(
        st.dictionaries(names | odd_names, texts | odd_texts.filter(lambda one: one.__hash__ is not None), max_size=3),
        st.just({"big": "x" * 32_000}),
        st.just({"larger": "x" * 32_767}),
        odd_texts,
    ),
    "shardingKey": odd_texts,
    "queueId": st.sampled_from([3, -1, 4, 2**40, True, 1.0, "1"]),
    "flag": st.sampled_from([2**31, None, True, 1.0]),
}
odd_fields = st.sampled_from(sorted(odd)).flatmap(lambda name: odd[name].map(lambda value: {name: value}))
messages = st.builds(lambda one, other: {**one, **other}, usual, st.one_of(st.just({}), st.just({}), odd_fields))


def write_queues(topic: str) -> int:
    if topic not in WRITE_QUEUES:
        raise NotFoundError(f"no {topic}")
    return WRITE_QUEUES[topic]


class Both:
    """The two encoders, each with its own ids and round-robin, from the same begin."""

    def __init__(self, rules: BodyRules, start: int) -> None:
        self.single_ids, self.batch_ids = UniqueIds("10.1.2.3", 77, 0xCAFE), UniqueIds("10.1.2.3", 77, 0xCAFE)
        self.single_router, self.batch_router = QueueRouter(write_queues, start), QueueRouter(write_queues, start)
        hosts = encode_host(BORN_HOST), encode_host(STORE_HOST)
        self.single = SingleEncoder(*hosts, self.single_ids, rules, SEGMENT_BYTES)
        batches = {
            "body_rules": rules,
            "segment_bytes": SEGMENT_BYTES,
            "born_host": BORN_HOST,
            "store_host": STORE_HOST,
        }
        self.batch = MessageEncoder(**batches, ids=self.batch_ids)  # type: ignore[arg-type]
        # Encodes what the encoder of one message leaves, as its caller does.
        self.rest = MessageEncoder(**batches, ids=self.single_ids)  # type: ignore[arg-type]

    def by_batch(self, message: dict[str, Any], now_ms: int) -> EncodedRecords | str:
        return outcome(self.batch, self.batch_router, message, now_ms)

    def by_single(self, message: dict[str, Any], now_ms: int) -> EncodedRecords | str:
        renamed = {"shardingKey": "sharding_key", "queueId": "queue_id"}
        given_values = {renamed.get(name, name): value for name, value in message.items()}
        try:
            record = self.single.encode(SingleMessage(**given_values), self.single_router, now_ms)
        except (OptionError, NotFoundError) as error:
            return f"{type(error).__name__}: {error}"
        if record is not None:
            return record.as_batch()
        return outcome(self.rest, self.single_router, message, now_ms)


def outcome(encoder: MessageEncoder, router: QueueRouter, message: dict[str, Any], now_ms: int) -> EncodedRecords | str:
    row = {**message, "delayLevel": None, "deliverTimestamp": None}
    try:
        return encoder.encode(message_of(row), router, now_ms, None)
    except (OptionError, NotFoundError) as error:
        return f"{type(error).__name__}: {error}"


def values_of(records: EncodedRecords) -> list[object]:
    """Return all values of a batch except its digest, which the encoder of one message does not compute."""
    arrays = (
        records.data, records.sizes, records.queue_numbers, records.tags_codes, records.key_rows, records.key_hashes
    )  # fmt: skip
    return [*(one.tolist() for one in arrays), *(one.dtype for one in arrays), records.queues, records.real_topics]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@settings(deadline=None, derandomize=True, max_examples=400, suppress_health_check=list(HealthCheck))
@given(
    st.lists(messages, min_size=1, max_size=4),
    st.sampled_from([None, Compression.ZLIB]),
    st.integers(0, 2**32 - 1),
    st.lists(st.sampled_from([0, 1, 999, 1_000, 86_400_000 * 31, -5_000]), min_size=4, max_size=4),
)
def test_encode_equals_the_encoder_of_batches(
    given_messages: list[dict[str, Any]], compression: Compression | None, start: int, steps_ms: list[int]
) -> None:
    both, now_ms = Both(BodyRules(compression, COMPRESS_OVER, 40_000), start), BORN_MS
    for message, step_ms in zip(given_messages, steps_ms, strict=False):
        now_ms += step_ms
        found, expected = both.by_single(message, now_ms), both.by_batch(message, now_ms)
        if isinstance(found, str) or isinstance(expected, str):
            assert found == expected
        else:
            assert values_of(found) == values_of(expected)


USUAL = {
    "topic": "t", "body": "text 标签", "tags": "A", "keys": ["k1 k2", "", "k3"], "properties": {"a": "b", "TAGS": "B"},
    "shardingKey": "s", "queueId": None, "flag": 7,
}  # fmt: skip


def test_encode_leaves_no_usual_message_to_the_encoder_of_batches() -> None:
    both = Both(BodyRules(), 2)
    message = SingleMessage("t", USUAL["body"], "A", ["k1 k2", "", "k3"], {"a": "b", "TAGS": "B"}, "s", None, 7)
    record = both.single.encode(message, both.single_router, BORN_MS)
    expected = both.by_batch(USUAL, BORN_MS)
    assert record is not None
    assert isinstance(expected, EncodedRecords)
    assert values_of(record.as_batch()) == values_of(expected)
    assert len(record.key_hashes) == 4


def test_encode_that_leaves_a_message_takes_no_id_and_no_turn() -> None:
    both = Both(BodyRules(), 0)
    assert both.single.encode(SingleMessage("t", b"", {"a": 1}), both.single_router, BORN_MS) is None
    record = both.single.encode(SingleMessage("t", b""), both.single_router, BORN_MS)
    assert record is not None
    assert record.message_id == UniqueIds("10.1.2.3", 77, 0xCAFE).take_one(BORN_MS)
    assert record.queue.queue_id == 0


def test_stamp_sets_offsets_and_store_time() -> None:
    both = Both(BodyRules(), 0)
    record = both.single.encode(SingleMessage("t", b"body"), both.single_router, BORN_MS)
    assert record is not None
    before = bytes(record.data)
    record.stamp(5, 1 << 33, BORN_MS + 1)
    changed = (5).to_bytes(8, "big") + (1 << 33).to_bytes(8, "big")
    assert record.data[20:36] == changed
    assert record.data[56:64] == (BORN_MS + 1).to_bytes(8, "big")
    assert record.data[:20] + record.data[36:56] + record.data[64:] == before[:20] + before[36:56] + before[64:]


def test_encode_ignores_an_empty_sharding_key_among_the_properties() -> None:
    both = Both(BodyRules(), 2)
    properties = {"__SHARDINGKEY": "", "TAGS": ""}
    record = both.single.encode(SingleMessage("t", b"", properties=properties), both.single_router, BORN_MS)
    expected = both.by_batch({**USUAL, "body": b"", "tags": None, "keys": None, "properties": properties,
                              "shardingKey": None, "flag": 0}, BORN_MS)  # fmt: skip
    assert record is not None
    assert isinstance(expected, EncodedRecords)
    assert record.queue.queue_id == 2
    assert values_of(record.as_batch()) == values_of(expected)
