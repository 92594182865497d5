"""Frames and answers of sends: a fast frame equals the usual one, and any answer of a stored message can be read."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sent_messages import address_of
from support.staged_runs import make_item

from rmq_spark.store.cluster.client import ClusterClient
from rmq_spark.store.cluster.frame import Command, encode_command
from rmq_spark.store.cluster.send_requests import SendBatchRequest, SendRequest, SendResponse
from rmq_spark.store.errors import NotFoundError, OptionError
from rmq_spark.store.format.consume_queue_entry import encode_items
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.brokers import RunningCluster

QUEUE = QueueKey("orders", 1, "broker-a")
odd_texts = st.one_of(
    st.sampled_from(['"g":"0"', '"i":""', '"opaque":0', '\\"', "\x01\x02\x7f", "标签😀", "</script>", "\u2028", ""]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
)
integers = st.integers(-(2**31), 2**31 - 1)


@given(
    st.builds(QueueKey, odd_texts, st.integers(0, 99), odd_texts),
    st.binary(max_size=50),
    odd_texts,
    st.integers(0, 2**53),
    integers,
    st.sampled_from([0, 0x301]),
    integers,
)
def test_frame_equals_the_frame_of_the_command(  # the arguments are those of a request
    queue: QueueKey, body: bytes, properties: str, born_ms: int, flag: int, sys_flag: int, opaque: int
) -> None:
    request = SendRequest(queue, body, properties, born_ms, flag, sys_flag)
    assert request.frame(opaque) == encode_command(request.command(opaque))


def test_frame_of_a_message_that_was_retried() -> None:
    for times, most in ((1, None), (0, 3), (2, 0)):
        request = SendRequest(QUEUE, b"x", "p\x01q\x02", 7, 0, 0, times, most)
        assert request.frame(5) == encode_command(request.command(5))
        assert request.fields()["j"] == str(times)
        assert request.fields().get("l") == (None if most is None else str(most))


def test_frame_refuses_more_than_a_broker_accepts() -> None:
    with pytest.raises(OptionError, match="cannot be sent: its frame has"):
        SendRequest(QUEUE, bytes(17 << 20), "", 7).frame(1)


def test_batches_take_bytes_without_a_copy() -> None:
    request = SendBatchRequest(QUEUE, memoryview(b"items"), 2, 7)
    assert bytes(request.body) == b"items"
    assert request.frame(1) == encode_command(SendBatchRequest(QUEUE, b"items", 2, 7).command(1))
    assert request.fields()["m"] == "true"


@pytest.mark.parametrize(
    ("offset", "expected"),
    [("0", 0), ("9" * 18, 10**18 - 1), ("9" * 19, None), ("-1", None), ("", None), ("1.5", None), ("\u0661", None)],
)
def test_of_reads_any_answer(offset: str, expected: int | None) -> None:
    command = Command(0, 1, {"queueOffset": offset, "msgId": "id"}, b"")
    found = SendResponse.of(command, SendRequest(QUEUE, b"x", "", 7))
    assert (found.queue_offset, found.ids, found.status) == (expected, "id", 0)
    empty = SendResponse.of(Command(10, 1, {}, b""), SendRequest(QUEUE, b"x", "", 7))
    assert (empty.queue_offset, empty.ids, empty.status) == (None, "", 10)


@pytest.mark.parametrize("release", ["4.9", "5.3"])
def test_no_send_creates_its_topic(run_cluster: Callable[..., RunningCluster], release: str) -> None:
    """A broker that has taken over an address would get a topic of its own."""
    cluster = run_cluster(release=release)
    cluster.broker.settings.creates_topics = True
    client = ClusterClient(address_of(cluster, request_timeout_ms=10_000))
    try:
        for request in (
            SendRequest(QUEUE, b"x", "", 7),
            SendRequest(QUEUE, b"x", "", 7, reconsume_times=1),
            SendBatchRequest(QUEUE, encode_items([make_item(0, b"x")]), 1, 7),
        ):
            with pytest.raises(NotFoundError):
                client.call(cluster.broker.address, request)
    finally:
        client.close()
    assert QUEUE.topic not in cluster.broker.topics
