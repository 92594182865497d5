"""Send back: copies agree with the twin, which makes them one by one; invalid rows are refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.retry_twin import copy_one

import rmq_spark
from rmq_spark.store.backend import SendBackTerms
from rmq_spark.store.client.producer import Producer
from rmq_spark.store.delivery.send_back import SendBacks
from rmq_spark.store.errors import DamageError, NotFoundError, OptionError, StorePathError
from rmq_spark.store.format.consume_queue_entry import Item, encode_items
from rmq_spark.store.format.java import Host
from rmq_spark.store.format.properties import parse
from rmq_spark.store.format.record import COMPRESSED, Record, decode_record, encode_record
from rmq_spark.store.log.store_writer import WriterSettings
from rmq_spark.store.model import QueueKey
from rmq_spark.store.testing.sample_message import SampleMessage
from rmq_spark.store.testing.sample_store import build_store
from rmq_spark.store.testing.strategies import messages
from rmq_spark.store.transaction.sink import RecordBuilderSettings

GROUP = "billing"
PLACE = ["commitLogOffset", "physicalTopic", "queueId", "queueOffset", "reconsumeTimes"]
SEGMENT_BYTES = 1 << 16


def open_store(path: Path) -> Producer:
    """Open a store to send back, as the door does."""
    return Producer(str(path), WriterSettings(), RecordBuilderSettings(), "async")


def rows_of(path: Path, columns: list[str] | None = None) -> pa.Table:
    """Return all messages of a store, by queue and queue offset."""
    tables = []
    with rmq_spark.open_reader(path) as reader:
        reader.refresh()
        for topic in reader.topics():
            for queue in reader.queues(topic):
                there = reader.bounds(queue)
                tables += reader.read(queue, there.min_offset, there.max_offset, columns or PLACE)
    return pa.Table.from_batches(tables)


def records_at(path: Path, places: list[int]) -> list[Record]:
    """Return the records at physical offsets, one by one."""
    found = []
    for place in places:
        begin = place // SEGMENT_BYTES * SEGMENT_BYTES
        data = (path / "commitlog" / f"{begin:020d}").read_bytes()[place - begin :]
        record = decode_record(data[: int.from_bytes(data[:4], "big")])
        assert isinstance(record, Record)
        found.append(record)
    return found


def agree(copy: Record, original: Record, asked_level: int, error: str | None, **terms: Any) -> None:
    """Check that a copy is what the twin makes of its original."""
    retry_queue = int(parse(copy.properties).get("REAL_QID", 0)) if "retry_queues" in terms else 0
    terms.pop("retry_queues", None)
    wanted = copy_one(original, GROUP, asked_level, error, retry_queue=retry_queue, **terms)
    assert (copy.topic.decode(), copy.queue_id) == (wanted.topic, wanted.queue_id)
    assert parse(copy.properties) == wanted.properties
    assert copy.reconsume_times == wanted.reconsume_times
    for name in ("body", "body_crc", "flag", "sys_flag", "born_timestamp", "born_host", "store_host"):
        assert getattr(copy, name) == getattr(original, name), name


LEVELS = st.integers(-1, 20)
ERRORS = st.none() | st.sampled_from(["", "boom", "a\x01b\x02c", "ü" * 2000])
DRAWN = st.lists(st.tuples(messages("orders", 0), LEVELS, ERRORS, st.integers(0, 20)), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(DRAWN)
def test_send_back_copies_agree_with_the_twin(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[SampleMessage, int, str | None, int]]
) -> None:
    path = tmp_path_factory.mktemp("store") / "store"
    build_store(path, [one for one, *_ in drawn], segment_bytes=SEGMENT_BYTES)
    rows = rows_of(path)
    levels = {offset: level for (_, level, *_), offset in zip(drawn, range(len(drawn)), strict=True)}
    errors = [drawn[offset][2] for offset in rows["queueOffset"].to_pylist()]
    asked = [levels[offset] for offset in rows["queueOffset"].to_pylist()]
    given_rows = rows.append_column("delayLevel", pa.array(asked, pa.int32())).append_column("error", pa.array(errors))
    with open_store(path) as store:
        sent = store.send_back(given_rows, GROUP)
    originals = records_at(path, rows["commitLogOffset"].to_pylist())
    copies = records_at(path, sent["commitLogOffset"].to_pylist())
    for copy, original, level, error in zip(copies, originals, asked, errors, strict=True):
        agree(copy, original, level, error)
        assert copy.prepared_transaction_offset == 0
    assert sent["reconsumeTimes"].to_pylist() == [copy.reconsume_times for copy in copies]


@pytest.fixture
def store_of(tmp_path: Path) -> Callable[..., Path]:
    """A function that builds a store of these messages."""

    def build(*given_messages: SampleMessage, **given_settings: Any) -> Path:
        path = tmp_path / "store"
        build_store(path, given_messages, segment_bytes=SEGMENT_BYTES, **given_settings)
        return path

    return build


def write_group(path: Path, **fields: int) -> None:
    """Write the group into a broker's configuration."""
    (path / "config").mkdir(exist_ok=True)
    table = {"subscriptionGroupTable": {GROUP: {"groupName": GROUP, **fields}}}
    (path / "config" / "subscriptionGroup.json").write_text(json.dumps(table))


def test_send_back_keeps_the_trail_up_to_the_dead_letter(tmp_path: Path) -> None:
    path = tmp_path / "store"
    message = SampleMessage(
        "orders", 1, b"x", tags="A", properties={"UNIQ_KEY": "ID", "DELAY": "2", "REAL_TOPIC": "old"}
    )
    build_store(path, [message], segment_bytes=SEGMENT_BYTES)
    first = rows_of(path)
    origin = rows_of(path, ["offsetMsgId"])["offsetMsgId"][0].as_py()
    with open_store(path) as store:
        store.send_back(first, GROUP)
        for failures in range(1, 4):
            (record,) = [
                one
                for one in rows_of(path, [*PLACE, "topic", "properties"]).to_pylist()
                if one["physicalTopic"] == "SCHEDULE_TOPIC_XXXX" and one["reconsumeTimes"] == failures
            ]
            trail = dict(record["properties"])
            assert trail["RETRY_TOPIC"] == "orders"
            assert trail["ORIGIN_MESSAGE_ID"] == origin
            assert trail["DELAY"] == str(2 + failures)
            assert (trail["REAL_TOPIC"], trail["REAL_QID"], trail["WAIT"]) == (f"%RETRY%{GROUP}", "0", "false")
            # As a delivery round does: the same message, in the group's retry topic.
            properties = {**trail}
            build_store(
                tmp_path / f"delivered-{failures}",
                [SampleMessage(f"%RETRY%{GROUP}", 0, b"x", properties=properties, reconsume_times=failures)],
                segment_bytes=SEGMENT_BYTES,
            )
            again = rows_of(tmp_path / f"delivered-{failures}", [*PLACE, "topic"])
            assert again["topic"].to_pylist() == ["orders"], "a consumer sees the topic that it subscribed to"
            with open_store(tmp_path / f"delivered-{failures}") as delivered:
                sent = delivered.send_back(again, GROUP, max_reconsume_times=3)
            copy = records_at(tmp_path / f"delivered-{failures}", sent["commitLogOffset"].to_pylist())[0]
            assert parse(copy.properties)["ORIGIN_MESSAGE_ID"] == origin
            if failures < 3:
                # The next round continues from the copy.
                build_path = tmp_path / f"round-{failures}"
                build_store(
                    build_path,
                    [
                        SampleMessage(
                            copy.topic.decode(), copy.queue_id, b"x", properties=parse(copy.properties),
                            reconsume_times=copy.reconsume_times,
                        )
                    ],
                    segment_bytes=SEGMENT_BYTES,
                )  # fmt: skip
                path = build_path
            else:
                assert sent["topic"].to_pylist() == [f"%DLQ%{GROUP}"]
                assert parse(copy.properties)["DELAY"] == "0"


def test_send_back_creates_topics_as_configured(store_of: Callable[..., Path]) -> None:
    path = store_of(*(SampleMessage("orders", 0, b"x") for _ in range(6)))
    write_group(path, retryQueueNums=3, retryMaxTimes=2)
    rows = rows_of(path)
    with open_store(path) as store:
        sent = store.send_back(rows, GROUP)
        store.send_back(rows.slice(0, 1), GROUP, -1)
    topics = json.loads((path / "config" / "topics.json").read_text())["topicConfigTable"]
    assert [topics[f"%RETRY%{GROUP}"][name] for name in ("readQueueNums", "writeQueueNums", "perm")] == [3, 3, 6]
    assert [topics[f"%DLQ%{GROUP}"][name] for name in ("readQueueNums", "writeQueueNums", "perm")] == [1, 1, 6]
    assert topics["SCHEDULE_TOPIC_XXXX"]["writeQueueNums"] == 18
    copies = records_at(path, sent["commitLogOffset"].to_pylist())
    assert sorted(parse(copy.properties)["REAL_QID"] for copy in copies) == ["0", "0", "1", "1", "2", "2"]


def test_send_back_uses_the_groups_limit_by_default(store_of: Callable[..., Path]) -> None:
    path = store_of(SampleMessage("orders", 0, b"x", reconsume_times=2))
    write_group(path, retryMaxTimes=2)
    rows = rows_of(path)
    with open_store(path) as store:
        assert store.send_back(rows, GROUP)["topic"].to_pylist() == [f"%DLQ%{GROUP}"]
        assert store.send_back(rows, GROUP, max_reconsume_times=3)["topic"].to_pylist() == [f"%RETRY%{GROUP}"]
        assert store.send_back(rows, "other")["topic"].to_pylist() == ["%RETRY%other"]


def test_send_back_refuses_a_group_without_retry_queues(store_of: Callable[..., Path]) -> None:
    path = store_of(SampleMessage("orders", 0, b"x"))
    write_group(path, retryQueueNums=0)
    with open_store(path) as store, pytest.raises(OptionError, match=r"retryQueueNums=0.* drop the message"):
        store.send_back(rows_of(path), GROUP)


def test_send_back_reads_group_configuration_from_bak(store_of: Callable[..., Path]) -> None:
    path = store_of(SampleMessage("orders", 0, b"x"))
    write_group(path, retryQueueNums=0)
    file = path / "config" / "subscriptionGroup.json"
    file.rename(file.with_name(file.name + ".bak"))
    file.write_text("{")
    with open_store(path) as store:
        with pytest.raises(OptionError, match="retryQueueNums=0"):
            store.send_back(rows_of(path), GROUP)
        file.with_name(file.name + ".bak").unlink()
        with pytest.raises(DamageError, match="consumer groups"):
            store.send_back(rows_of(path), GROUP)


@pytest.mark.parametrize("name", ["%RETRY%billing", "%DLQ%billing", "a b", "", "DEFAULT_CONSUMER", "CID_RMQ_SYS_TRANS"])
def test_send_back_refuses_invalid_group_names(store_of: Callable[..., Path], name: str) -> None:
    path = store_of(SampleMessage("orders", 0, b"x"))
    with open_store(path) as store, pytest.raises(OptionError):
        store.send_back(rows_of(path), name)


def change(rows: pa.Table, name: str, value: object) -> pa.Table:
    """Return one row with another value."""
    column = pa.array([value], rows.schema.field(name).type)
    return rows.slice(0, 1).set_column(rows.schema.get_field_index(name), name, column)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("queueId", 1, "has another queueId"),
        ("queueOffset", 1, "has another queueOffset"),
        ("reconsumeTimes", 1, "has another reconsumeTimes"),
        ("physicalTopic", "payments", "has another topic"),
        ("commitLogOffset", 1, "no message begins at its physical offset"),
        ("commitLogOffset", 10**12, "no message begins at its physical offset"),
        ("commitLogOffset", SEGMENT_BYTES - 1, "no message begins at its physical offset"),
        ("commitLogOffset", -1, "its commitLogOffset is -1"),
        ("commitLogOffset", None, "its commitLogOffset is null"),
        ("physicalTopic", None, "its physicalTopic is null"),
    ],
)
def test_send_back_refuses_rows_that_were_never_in_the_store(
    store_of: Callable[..., Path], name: str, value: object, why: str
) -> None:
    path = store_of(SampleMessage("orders", 0, b"x"), SampleMessage("orders", 0, b"y"))
    rows = rows_of(path)
    with open_store(path) as store:
        with pytest.raises(OptionError, match=f"row 0: .*{why}"):
            store.send_back(change(rows, name, value), GROUP)
        other = rows["commitLogOffset"][1].as_py()
        with pytest.raises(OptionError, match="never in this store"):
            store.send_back(change(rows, "commitLogOffset", other), GROUP)
    assert rows_of(path)["physicalTopic"].unique().to_pylist() == ["orders"], "nothing was sent back"


def test_send_back_refuses_a_stale_record_beyond_the_logs_end(store_of: Callable[..., Path]) -> None:
    path = store_of(SampleMessage("orders", 0, b"x"), SampleMessage("orders", 0, b"y"))
    rows = rows_of(path)
    (record,) = records_at(path, [rows["commitLogOffset"][1].as_py()])
    log = path / "commitlog" / f"{0:020d}"
    data, place = bytearray(log.read_bytes()), 20_000
    stale = encode_record(replace(record, physical_offset=place, queue_offset=2))
    data[place : place + len(stale)] = stale
    log.write_bytes(data)
    rows = change(change(rows, "commitLogOffset", place), "queueOffset", 2)
    with SendBacks(str(path), SendBackTerms(GROUP)) as sending, pytest.raises(OptionError, match="never in this store"):
        list(sending.prepare(rows.combine_chunks().to_batches()[0]))


def test_send_back_reports_missing_columns(store_of: Callable[..., Path]) -> None:
    path = store_of(SampleMessage("orders", 0, b"x"))
    with open_store(path) as store:
        with pytest.raises(OptionError, match=r"without commitLogOffset, queueOffset, physicalTopic \(or topic\)"):
            store.send_back(rows_of(path, ["queueId", "reconsumeTimes"]), GROUP)
        with pytest.raises(OptionError, match="no such column: note"):
            store.send_back(rows_of(path).append_column("note", pa.array(["x"])), GROUP)
        with pytest.raises(OptionError, match="not str"):
            store.send_back("rows", GROUP)
        with pytest.raises(OptionError, match="delay_level='3'"):
            store.send_back(rows_of(path), GROUP, "3")
        with pytest.raises(OptionError, match="max_reconsume_times=-1"):
            store.send_back(rows_of(path), GROUP, max_reconsume_times=-1)
        assert len(store.send_back([], GROUP)) == 0


def test_send_back_accepts_dicts_with_the_consumers_topic(store_of: Callable[..., Path]) -> None:
    retried = SampleMessage(f"%RETRY%{GROUP}", 0, b"y", properties={"RETRY_TOPIC": "orders"}, reconsume_times=1)
    path = store_of(SampleMessage("orders", 0, b"x"), retried)
    names = ["commitLogOffset", "topic", "queueId", "queueOffset", "reconsumeTimes"]
    rows = rows_of(path, names).to_pylist()
    with open_store(path) as store:
        assert sorted(store.send_back(rows, GROUP)["delayLevel"].to_pylist()) == [3, 4]
        rows[0]["topic"] = "payments"
        with pytest.raises(OptionError, match="has another topic"):
            store.send_back(rows[:1], GROUP)


def test_send_back_expired_original(tmp_path: Path) -> None:
    path = tmp_path / "store"
    sent_first = SampleMessage(
        "orders", 0, b"first", tags="A", keys="k", flag=7,
        properties={"UNIQ_KEY": "0" * 32, "x": "y", "__SHARDINGKEY": "s"}, born_timestamp=1_600_000_000_000,
    )  # fmt: skip
    filler = [SampleMessage("orders", 0, bytes(30_000)) for _ in range(5)]
    build_store(path, [sent_first, *filler], segment_bytes=SEGMENT_BYTES)
    rows = rows_of(
        path, [*PLACE, "body", "tags", "keys", "properties", "flag", "bornTimestamp", "msgId", "offsetMsgId"]
    )
    first = rows.slice(0, 1)
    (path / "commitlog" / f"{0:020d}").unlink()
    with open_store(path) as store:
        with pytest.raises(
            NotFoundError, match=r"row 0: orders/0 at queue offset 0.* has expired.*expiredOriginal=resend"
        ):
            store.send_back(first, GROUP)
        with pytest.raises(OptionError, match="no body"):
            store.send_back(first.select(PLACE), GROUP, expired_original="resend")
        mixed = pa.concat_tables([first, rows.slice(4, 2)])
        sent = store.send_back(mixed, GROUP, expired_original="resend")
    copy, *_ = records_at(path, sent["commitLogOffset"].to_pylist())
    assert (copy.body, copy.flag, copy.reconsume_times) == (b"first", 7, 1)
    assert copy.born_timestamp == 1_600_000_000_000
    assert (copy.topic, copy.queue_id) == (b"SCHEDULE_TOPIC_XXXX", 2)
    assert parse(copy.properties) == {
        "UNIQ_KEY": "0" * 32,
        "TAGS": "A",
        "KEYS": "k",
        "__SHARDINGKEY": "s",
        "x": "y",
        "RETRY_TOPIC": "orders",
        "ORIGIN_MESSAGE_ID": "0" * 32,
        "RECONSUME_TIME": "1",
        "MAX_RECONSUME_TIMES": "16",
        "WAIT": "false",
        "DELAY": "3",
        "REAL_TOPIC": f"%RETRY%{GROUP}",
        "REAL_QID": "0",
    }
    assert sent["delayLevel"].to_pylist() == [3, 3, 3]


def test_send_back_resends_one_message_of_an_inner_batch(store_of: Callable[..., Path]) -> None:
    items = encode_items([Item(0, b"one", b"UNIQ_KEY\x01a\x02"), Item(0, b"two", b"UNIQ_KEY\x01b\x02")])
    properties = {"INNER_NUM": "2", "INNER_BASE": "0"}
    path = store_of(SampleMessage("orders", 0, items, message_count=2, properties=properties), batch_topics={"orders"})
    rows = rows_of(path, [*PLACE, "topic", "body", "msgId"])
    assert rows["body"].to_pylist() == [b"one", b"two"]
    with open_store(path) as store:
        with pytest.raises(OptionError, match=r"row 0: .*inner batch"):
            store.send_back(rows.select(PLACE), GROUP)
        sent = store.send_back(rows.slice(1, 1), GROUP, expired_original="resend")
    (copy,) = records_at(path, sent["commitLogOffset"].to_pylist())
    assert copy.body == b"two"
    assert parse(copy.properties)["UNIQ_KEY"] == "b"
    assert not copy.sys_flag


def test_send_back_keeps_ipv6_hosts_and_compressed_bodies(store_of: Callable[..., Path]) -> None:
    v6 = Host("2001:db8::7", 10911)
    path = store_of(
        SampleMessage("orders", 0, b"no zlib", sys_flag=COMPRESSED, store_host=v6),
        SampleMessage("orders", 0, b"x", born_host=v6),
        SampleMessage("orders", 0, b"y", born_host=v6, store_host=v6),
    )
    rows = rows_of(path)
    ids = rows_of(path, ["offsetMsgId"])["offsetMsgId"].to_pylist()
    with open_store(path) as store:
        sent = store.send_back(rows, GROUP)
    originals = records_at(path, rows["commitLogOffset"].to_pylist())
    for copy, original, message_id in zip(
        records_at(path, sent["commitLogOffset"].to_pylist()), originals, ids, strict=True
    ):
        agree(copy, original, 0, None)
        assert parse(copy.properties)["ORIGIN_MESSAGE_ID"] == message_id


def test_send_back_truncates_errors_to_the_room_in_properties(store_of: Callable[..., Path]) -> None:
    path = store_of(
        SampleMessage("orders", 0, b"x", properties={"big": "x" * 32_000}),
        SampleMessage("orders", 0, b"x", properties={"big": "x" * 32_700}),
    )
    rows = rows_of(path).append_column("error", pa.array(["ü" * 1024, "boom"]))
    with open_store(path) as store:
        sent = store.send_back(rows.slice(0, 1), GROUP)
        (copy,) = records_at(path, sent["commitLogOffset"].to_pylist())
        assert 32_766 <= len(copy.properties) <= 32_767
        assert parse(copy.properties)["CONSUME_ERROR"].strip("ü") == ""
        with pytest.raises(OptionError, match=r"row 0: properties take .* expected at most 32767"):
            store.send_back(rows.slice(1, 1), GROUP)


def test_send_back_reads_originals_in_pieces(store_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rmq_spark.store.delivery.send_back.PIECE_BYTES", 2000)
    path = store_of(*(SampleMessage("orders", number % 3, bytes(number * 100)) for number in range(12)))
    rows = rows_of(path)
    with SendBacks(str(path), SendBackTerms(GROUP)) as sending:
        pieces = [one.rows.tolist() for one in sending.prepare(rows.combine_chunks().to_batches()[0])]
    assert [row for rows_of_piece in pieces for row in rows_of_piece] == list(range(12))
    assert len(pieces) > 3


def test_send_back_refuses_a_path_without_a_store(tmp_path: Path) -> None:
    with pytest.raises(StorePathError):
        SendBacks(str(tmp_path / "nothing"), SendBackTerms(GROUP))


def test_send_back_refuses_rocketmqs_own_topics(store_of: Callable[..., Path]) -> None:
    path = store_of(SampleMessage("SCHEDULE_TOPIC_XXXX", 2, b"x", properties={"DELAY": "3"}))
    with open_store(path) as store, pytest.raises(OptionError, match="RocketMQ's own"):
        store.send_back(rows_of(path), GROUP)


def test_send_back_keeps_keys_and_tags(store_of: Callable[..., Path]) -> None:
    path = store_of(SampleMessage("orders", 0, b"x", tags="A", keys="k1 k2"))
    with open_store(path) as store:
        store.send_back(rows_of(path), GROUP, -1)
    with rmq_spark.open_reader(path) as reader:
        reader.refresh()
        assert reader.find_key(f"%DLQ%{GROUP}", "k2") == [(QueueKey(f"%DLQ%{GROUP}", 0), 0)]


def test_send_back_drops_timer_properties_and_checksum(
    store_of: Callable[..., Path],
) -> None:
    wishes = {"TIMER_DELIVER_MS": "1", "TIMER_DELAY_SEC": "2", "TIMER_DELAY_MS": "3", "TIMER_OUT_MS": "4"}
    path = store_of(*(SampleMessage("orders", 0, b"x", properties=wishes | {"__CRC32#": "0123456789"}),) * 2)
    rows = rows_of(path).append_column("delayLevel", pa.array([0, -1], pa.int32()))
    with open_store(path) as store:
        sent = store.send_back(rows, GROUP)
    waiting, dead = (parse(one.properties) for one in records_at(path, sent["commitLogOffset"].to_pylist()))
    assert {name for name in waiting if name.startswith("TIMER_")} == {"TIMER_OUT_MS"}
    assert {name: dead[name] for name in wishes} == wishes
    assert "__CRC32#" not in waiting | dead
