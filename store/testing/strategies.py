"""Hypothesis strategies for messages that a producer, an old broker or another client may have written.

Most of the messages are unusual. They have property texts that RocketMQ would not write, property names with the same
first eight bytes, bytes that are not UTF-8, IPv4 and IPv6 hosts, bodies with every kind of compression, and batches in
one record.
"""

from typing import Any

from hypothesis import strategies as st

from rmq_spark.store.format.body_codec import Compression, compress_body
from rmq_spark.store.format.consume_queue_entry import Item, encode_items
from rmq_spark.store.format.java import Host
from rmq_spark.store.format.record import TRANSACTION_COMMIT
from rmq_spark.store.testing.sample_message import SampleMessage

LARGE_BODY_BYTES = 20_000
SAFE_MS = 2**63 // 1000 - 1  # a later time does not fit into a column of microseconds

# Names that the engine searches, similar names, and names that differ only after eight or sixteen bytes.
_NAMES = [
    b"TAGS", b"KEYS", b"UNIQ_KEY", b"RETRY_TOPIC", b"WAIT", b"TAG", b"TAGSS", b"KEY", b"UNIQ_KEY2", b"UNIQ_KE",
    b"RETRY_TOPICS", b"RETRY_TO", b"a", b"abcdefgh", b"abcdefghi", b"abcdefghj", b"abcdefghijklmnop",
    b"abcdefghijklmnopq", b"abcdefghijklmnopr", b"\xe6\xa0\x87\xe7\xad\xbe", b"", b"\xff", b"\xfe", "�".encode(),
    b"abcdefgh\xff", b"abcdefgh\xfe",
]  # fmt: skip
_VALUES = [b"", b"x", b"TagA", b"k1 k2", b"\x01", b"a\x01b", b"\xff\xfe", b"\xe6\xa0", "😀".encode(), b"\x00", b" "]


def property_texts() -> st.SearchStrategy[bytes]:
    """Return a strategy for property texts. They are valid, invalid or random, and have a few hundred bytes at most."""
    pair = st.tuples(
        st.one_of(st.sampled_from(_NAMES), st.binary(max_size=20)),
        st.one_of(st.sampled_from(_VALUES), st.binary(max_size=40)),
    ).map(b"\x01".join)
    part = st.one_of(pair, pair, pair, st.sampled_from([b"", b"TAGS", b"\x01", b"\x01\x01", b"TAGS\x01"]))
    joined = st.lists(part, max_size=8).map(b"\x02".join)
    ended = st.tuples(joined, st.sampled_from([b"", b"\x02"])).map(b"".join)
    many = st.integers(0, 40).map(lambda n: b"".join(b"n%d\x01v\x02" % (number % 30) for number in range(n)))
    return st.one_of(ended, ended, ended, many, st.binary(max_size=60))


def hosts() -> st.SearchStrategy[Host]:
    """Return a strategy for IPv4 and IPv6 addresses with ports. A few are frequent, so that messages share them."""
    usual = st.sampled_from([Host("10.1.2.3", 54321), Host("2001:db8::1", 10911), Host("0.0.0.0", 0), Host("::", -1)])
    odd = st.builds(Host, st.ip_addresses().map(str), st.integers(-(2**31), 2**31 - 1))
    return st.one_of(usual, usual, odd)


def bodies() -> st.SearchStrategy[tuple[bytes, int]]:
    """Return a strategy for pairs: a body as it is stored, and the compression bits of its sysFlag."""
    raw = st.one_of(
        st.just(b""),
        st.binary(max_size=50),
        st.builds(lambda size, byte: bytes([byte]) * size, st.integers(0, LARGE_BODY_BYTES), st.integers(0, 255)),
    )
    packed = st.builds(lambda body, kind: (compress_body(body, kind), kind.sys_flag), raw, st.sampled_from(Compression))
    # Clients before 4.9.4 set only the compression bit for zlib, and no bits for the kind of compression.
    old = raw.map(lambda body: (compress_body(body, Compression.ZLIB), 1))
    # An empty body is not decompressed, whatever its sysFlag.
    none = st.sampled_from([(b"", kind.sys_flag) for kind in Compression])
    return st.one_of(raw.map(lambda body: (body, 0)), raw.map(lambda body: (body, 0)), packed, old, none)


def _fields(topic: str, queue_id: int) -> dict[str, Any]:
    return {
        "topic": st.just(topic),
        "queue_id": st.just(queue_id),
        "flag": st.integers(-(2**31), 2**31 - 1),
        "born_timestamp": st.one_of(st.integers(0, 2_000_000_000_000), st.integers(-SAFE_MS, SAFE_MS)),
        "born_host": hosts(),
        "store_host": hosts(),
        "reconsume_times": st.integers(-(2**31), 2**31 - 1),
        "prepared_transaction_offset": st.integers(0, 2**63 - 1),
        "version2": st.none() if len(topic.encode()) > 127 else st.sampled_from([None, True]),
    }


@st.composite
def messages(draw: st.DrawFn, topic: str, queue_id: int) -> SampleMessage:
    """Return a strategy for messages of one queue of a normal topic. Each message gets a consume-queue entry."""
    body, sys_flag = draw(bodies())
    sys_flag |= draw(st.sampled_from([0, 0, 0x2, TRANSACTION_COMMIT]))
    given = {name: draw(strategy) for name, strategy in _fields(topic, queue_id).items()}
    return SampleMessage(body=body, sys_flag=sys_flag, properties=draw(property_texts()), **given)


@st.composite
def inner_batches(draw: st.DrawFn, topic: str, queue_id: int) -> SampleMessage:
    """Return a strategy for inner batches of one to six messages, for a topic with batch consume queues."""
    item = st.builds(Item, st.integers(-(2**31), 2**31 - 1), st.binary(max_size=30), property_texts())
    items = draw(st.lists(item, min_size=1, max_size=6))
    waits = draw(st.sampled_from([b"", b"WAIT\x01false\x02", b"WAIT\x01TRUE\x02", b"WAIT\x01no\x02"]))
    given = {name: draw(strategy) for name, strategy in _fields(topic, queue_id).items()}
    text = waits + b"INNER_NUM\x01%d\x02" % len(items)
    return SampleMessage(body=encode_items(items), properties=text, message_count=len(items), **given)
