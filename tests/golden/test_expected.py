"""The independent decoder says what expected/ says, and that is what was put into the stores.

The facts are written by hand, from what each store was made to hold: they catch a decoder and a
file in expected/ that are wrong in the same way.
"""

import base64
import gzip
import importlib.util
import json
import struct
import sys
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
RETRY = "%RETRY%" + "g" * 193  # 200 bytes: too long for the one-byte topic length of V1


def load_decoder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden_decode_store", HERE / "decode_store.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


decoder = load_decoder()
ALL = (*decoder.STORES, *decoder.STORES_OF_BROKERS, *decoder.DIGESTED)


def expected(store: str) -> dict[str, Any]:
    text = (HERE / "expected" / f"{store}.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def queue(store: str, topic: str, queue_id: int) -> dict[str, Any]:
    return dict(expected(store)["topics"][topic][str(queue_id)])


def records(store: str) -> list[Any]:
    return list(decoder.walk_log(HERE / store).records.values())


def java_hash(text: str) -> int:
    """String#hashCode, as a signed int."""
    units = struct.unpack(f">{len(text.encode('utf-16-be')) // 2}H", text.encode("utf-16-be"))
    value = 0
    for unit in units:
        value = (31 * value + unit) & 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


@pytest.mark.parametrize("store", ALL)
def test_the_committed_rows_are_what_the_decoder_finds(store: str) -> None:
    assert decoder.render(decoder.expected_of(store)) == decoder.render(expected(store))


@pytest.mark.parametrize("store", [s for s in ALL if s not in decoder.DIGESTED])
def test_every_row_has_all_columns_and_offsets_without_gaps(store: str) -> None:
    columns = [
        "topic", "queueId", "queueOffset", "commitLogOffset", "tags", "keys", "body",
        "bornTimestamp", "storeTimestamp", "reconsumeTimes", "properties", "msgId", "offsetMsgId",
        "bornHost", "storeHost", "flag", "sysFlag", "physicalTopic",
    ]  # fmt: skip
    for topic, queues in expected(store)["topics"].items():
        for queue_id, found in queues.items():
            rows = found["rows"]
            assert all(list(row) == columns for row in rows)
            assert all(row["physicalTopic"] == topic for row in rows)
            assert {row["queueId"] for row in rows} <= {int(queue_id)}
            offsets = [row["queueOffset"] for row in rows]
            assert offsets == list(range(found["min"], found["max"]))
            assert len(found["tagsCodes"]) == len(rows)


# --- basic and its kin ----------------------------------------------------------------------------


def test_the_first_record_of_basic_has_169_bytes_and_the_fields_it_was_given() -> None:
    first = records("basic")[0]
    assert first.size == 169
    row = queue("basic", "TopicA", 0)["rows"][0]
    assert base64.b64decode(row["body"]) == b"hello"
    assert (row["tags"], row["keys"], row["properties"]["foo"]) == ("TagA", "k1 k2", "bar")
    assert row["msgId"] == "7F000001ABCD18B4AAC200000000"
    assert row["offsetMsgId"] == "7F00000100002A9F0000000000000000"
    assert (row["bornTimestamp"], row["bornHost"]) == (1700000000123, "10.1.2.3:54321")
    assert (row["storeHost"], row["flag"], row["reconsumeTimes"]) == ("127.0.0.1:10911", 7, 2)


def test_basic_has_an_empty_body_a_chinese_tag_ipv6_hosts_and_a_200_byte_topic() -> None:
    empty, ipv6 = queue("basic", "TopicA", 0)["rows"][1:]
    assert (empty["body"], empty["properties"], empty["tags"]) == ("", {}, None)
    assert (ipv6["bornHost"], ipv6["storeHost"]) == ("[2001:db8::1]:1", "[2001:db8::2]:2")
    assert ipv6["sysFlag"] == 0x30
    assert ipv6["offsetMsgId"] == "20010DB8" + "0" * 23 + "2" + "00000002" + f"{384:016X}"
    (chinese,) = queue("basic", "TopicA", 1)["rows"]
    assert chinese["tags"] == "中文tag"
    assert base64.b64decode(chinese["body"]).decode() == "中文"
    (long,) = queue("basic", RETRY, 0)["rows"]
    assert (long["topic"], long["tags"]) == (RETRY, "v2tag")  # no RETRY_TOPIC property: as it is


def test_tags_codes_are_java_hashes_of_the_tags() -> None:
    assert queue("basic", "TopicA", 0)["tagsCodes"] == [2598919, 0, 215481018]
    assert queue("basic", "TopicA", 1)["tagsCodes"] == [2076969056]
    for store in ("basic", "propcrc", "crashed", "preblank", "truncated-stale", "batchcq-cqext"):
        for topic, queues in expected(store)["topics"].items():
            for found in queues.values():
                if topic in ("SCHEDULE_TOPIC_XXXX", "TopicIB"):  # due time; none for a batch
                    continue
                tags = [row["tags"] for row in found["rows"]]
                assert found["tagsCodes"] == [java_hash(t) if t else 0 for t in tags]


def test_the_tags_code_of_a_scheduled_message_is_its_due_time() -> None:
    found = queue("basic", "SCHEDULE_TOPIC_XXXX", 2)
    (row,) = found["rows"]
    assert row["properties"] == {
        "DELAY": "3", "REAL_TOPIC": "TopicA", "REAL_QID": "0", "TAGS": "T",
    }  # fmt: skip
    assert found["tagsCodes"] == [row["storeTimestamp"] + 10_000]  # level 3: 10 s


def test_of_a_transaction_only_the_committed_message_is_in_a_queue() -> None:
    prepared, rollback, commit = (r for r in records("basic") if r.topic == "TopicT")
    assert [r.sys_flag & 0xC for r in (prepared, rollback, commit)] == [0x4, 0xC, 0x8]
    assert [r.queue_offset for r in (prepared, rollback, commit)] == [0, 0, 0]
    assert [r.prepared_transaction_offset for r in (prepared, rollback, commit)] == [0, 0, 4242]
    (row,) = queue("basic", "TopicT", 0)["rows"]
    assert (row["keys"], base64.b64decode(row["body"])) == ("ck", b"commit")


def test_a_message_batch_is_three_records_with_flags_of_their_own() -> None:
    rows = queue("basic", "TopicB", 3)["rows"]
    assert [(r["keys"], r["flag"], base64.b64decode(r["body"])) for r in rows] == [
        ("kb0", 0, b"b0"), ("kb1", 1, b"b1"), ("kb2", 2, b"b2"),
    ]  # fmt: skip
    assert {(r["bornTimestamp"], r["bornHost"]) for r in rows} == {(1700000000999, "127.0.0.1:1234")}


def test_sixty_records_of_growing_bodies_lie_in_four_segments() -> None:
    rows = queue("basic", "TopicR", 0)["rows"]
    assert [len(base64.b64decode(r["body"])) for r in rows] == list(range(700, 760))
    assert [(r["tags"], r["keys"]) for r in rows] == [(f"r{i % 3}", f"rk{i}") for i in range(60)]
    assert {r["commitLogOffset"] // 16384 for r in rows} == {0, 1, 2, 3}


def test_every_full_segment_ends_with_a_blank() -> None:
    for base in (0, 16384, 32768):
        segment = (HERE / "basic" / "commitlog" / f"{base:020d}").read_bytes()
        last = max((r for r in records("basic") if r.physical_offset < base + 16384),
                   key=lambda r: r.physical_offset)  # fmt: skip
        at = last.physical_offset + last.size - base
        assert struct.unpack_from(">iI", segment, at) == (16384 - at, 0xCBD43194)


def test_the_key_index_of_basic_leads_from_a_key_to_its_record() -> None:
    (file,) = (HERE / "basic" / "index").iterdir()
    run = file.read_bytes()
    assert len(run) == 40 + 4 * 100 + 20 * 400
    key_hash = abs(java_hash("TopicA#k2"))
    assert key_hash % 100 == 48
    (unit,) = struct.unpack_from(">i", run, 40 + 4 * 48)
    found = []
    while unit:
        hash_, physical, _seconds, unit = struct.unpack_from(">iqii", run, 440 + 20 * unit)
        found += [physical] if hash_ == key_hash else []
    assert found == [0]


def test_every_record_of_propcrc_ends_with_its_own_reversed_crc() -> None:
    for base in (0, 16384, 32768, 49152):
        segment = (HERE / "propcrc" / "commitlog" / f"{base:020d}").read_bytes()
        for record in records("propcrc"):
            if record.physical_offset // 16384 * 16384 == base:
                at = record.physical_offset - base
                whole = segment[at : at + record.size]
                value = zlib.crc32(whole[:-20]) & 0x7FFFFFFF
                digits = str(value)[::-1].ljust(10, "0")
                assert whole[-20:] == b"__CRC32#\x01" + digits.encode() + b"\x02"
    rows = queue("propcrc", "TopicR", 0)["rows"]
    assert all(len(row["properties"]["__CRC32#"]) == 10 for row in rows)


def test_propcrc_and_crashed_hold_the_messages_of_basic() -> None:
    def told(store: str) -> list[Any]:
        rows = [
            row for queues in expected(store)["topics"].values() for q in queues.values()
            for row in q["rows"]
        ]  # fmt: skip
        names = (
            "physicalTopic",
            "queueId",
            "queueOffset",
            "tags",
            "keys",
            "body",
            "flag",
            "sysFlag",
        )
        return [[row[name] for name in names] for row in rows]

    assert len(told("basic")) == 70
    assert told("basic") == told("propcrc") == told("crashed")


def test_crashed_has_an_abort_file_and_a_next_segment_of_zeros() -> None:
    assert (HERE / "crashed" / "abort").read_bytes() == b"5433"
    assert not any((HERE / "crashed" / "commitlog" / f"{65536:020d}").read_bytes())
    assert not (HERE / "basic" / "abort").exists()
    assert expected("crashed")["log"]["end"] == expected("basic")["log"]["end"] == 53512


def test_preblank_starts_at_offset_17_behind_17_units_of_fill() -> None:
    found = queue("preblank", "TopicR", 0)
    assert (found["min"], found["max"]) == (17, 61)
    assert found["units"] == {"fill": 17, "expired": 0, "believed": 44, "stale": 0}
    assert found["rows"][0]["keys"] == "rk17"
    assert found["rows"][0]["commitLogOffset"] == expected("preblank")["log"]["begin"] == 16384
    assert base64.b64decode(found["rows"][-1]["body"]) == b"after"
    assert list(expected("preblank")["topics"]) == ["TopicR"]


def test_behind_the_end_of_truncated_stale_lie_whole_records_and_units_that_are_none() -> None:
    found = queue("truncated-stale", "TopicR", 0)
    assert (found["max"], found["units"]["stale"]) == (58, 2)
    last = found["rows"][-1]
    assert (last["commitLogOffset"], last["tags"]) == (50893, "after")
    assert expected("truncated-stale")["log"]["end"] == 50893 + 113
    segment = (HERE / "truncated-stale" / "commitlog" / f"{49152:020d}").read_bytes()
    for stale in (
        51765,
        52638,
    ):  # whole, offset and CRC right, but never reached
        assert decoder.parse_record(segment, stale - 49152, 49152).topic == "TopicR"
    same = queue("basic", "TopicR", 0)["rows"]
    assert found["rows"][:57] == same[:57]


# --- batch consume queue, timer -------------------------------------------------------------------


def test_inner_batches_of_two_three_and_four_come_out_as_nine_rows() -> None:
    found = queue("batchcq-cqext", "TopicIB", 0)
    assert (found["tree"], found["min"], found["max"]) == ("batchconsumequeue", 0, 9)
    assert found["units"]["believed"] == 3
    rows = found["rows"]
    assert [r["commitLogOffset"] for r in rows] == [0] * 2 + [247] * 3 + [545] * 4
    assert [r["keys"] for r in rows] == [f"kb{i}" for n in (2, 3, 4) for i in range(n)]
    assert {r["sysFlag"] for r in rows} == {0xC0}  # of the outer record, as the client leaves it
    # The item's properties, not those of the outer record (UNIQ_KEY=U0, INNER_NUM ...).
    assert rows[0]["properties"] == {"KEYS": "kb0", "TAGS": "tb", "WAIT": "true"}
    assert rows[0]["msgId"] == rows[0]["offsetMsgId"] == "7F00000100002A9F0000000000000000"


def test_the_extension_of_a_consume_queue_holds_the_tags_codes() -> None:
    folder = HERE / "batchcq-cqext" / "consumequeue" / "TopicE" / "0"
    addresses = [unit.tags_code for unit in decoder.plain_units(folder)]
    assert addresses == [-(1 << 63) + 20 * i for i in range(3)]
    found = queue("batchcq-cqext", "TopicE", 0)
    assert found["tagsCodes"] == [java_hash(f"t{i}") for i in range(3)]


def test_timer_delivered_two_of_its_twelve_messages() -> None:
    waiting = queue("timer", "rmq_sys_wheel_timer", 0)["rows"]
    assert [r["msgId"] for r in waiting] == ["UA", "UB", "UC", "UD"] + [f"UE{i}" for i in range(8)]
    delivered = queue("timer", "TopicA", 3)["rows"]
    assert [r["msgId"] for r in delivered] == ["UA", "UB"]
    for row in delivered:
        assert row["properties"]["REAL_TOPIC"] == "TopicA"
        assert {"TIMER_ENQUEUE_MS", "TIMER_DEQUEUE_MS", "TIMER_OUT_MS"} <= set(row["properties"])
    assert len(gzip.decompress((HERE / "timer" / "timerwheel.gz").read_bytes())) == 604800 * 2 * 32


# --- stores of whole brokers ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo() -> dict[str, Any]:
    """Topic -> queue id -> queue of the demo store; expected/demo.json has only digests."""
    return dict(decoder.decode_store(HERE / "demo")["topics"])


def test_demo_has_the_messages_that_its_maker_sent(demo: dict[str, Any]) -> None:
    counts = {t: sum(len(q["rows"]) for q in queues.values()) for t, queues in demo.items()}
    assert counts == {
        "orders": 1170, "payments": 299, "invoices": 8, "clicks": 16,
        "%RETRY%billing": 4, "%RETRY%audit": 2, "%DLQ%audit": 2,
        "SCHEDULE_TOPIC_XXXX": 10, "RMQ_SYS_TRANS_HALF_TOPIC": 3, "RMQ_SYS_TRANS_OP_HALF_TOPIC": 1,
    }  # fmt: skip
    assert [len(demo["orders"][q]["rows"]) for q in "0123"] == [289, 292, 293, 296]
    assert [demo["clicks"][q]["units"]["believed"] for q in "01"] == [3, 3]
    assert len(list((HERE / "demo" / "consumequeue" / "orders" / "0").iterdir())) == 2


def test_each_order_of_demo_stays_in_one_queue_and_in_its_order(demo: dict[str, Any]) -> None:
    seen: dict[str, list[str]] = {}
    for queue_id in "0123":
        here: dict[str, list[str]] = {}
        for row in demo["orders"][queue_id]["rows"]:
            body = json.loads(base64.b64decode(row["body"]))
            assert (body["orderId"], body["status"]) == (row["keys"], row["tags"])
            assert body["customer"] == row["properties"]["customer"]
            here.setdefault(row["keys"], []).append(row["tags"])
        assert not here.keys() & seen.keys()
        seen |= here
    assert set(seen) == {f"O-{n}" for n in range(1000, 1410)}
    assert {tuple(states) for states in seen.values()} == {
        ("created", "paid", "shipped"), ("created", "cancelled"), ("created", "paid", "cancelled"),
    }  # fmt: skip


def test_compressed_bodies_of_demo_come_out_as_they_went_in(demo: dict[str, Any]) -> None:
    rows = demo["invoices"]["0"]["rows"]
    assert [r["sysFlag"] for r in rows] == [0x301, 0x101, 0x201, 0x301, 0x101, 0x201, 0, 0]
    stored = [r for r in records("demo") if r.topic == "invoices"]
    assert [r.sys_flag & 1 for r in stored] == [1, 1, 1, 1, 1, 1, 0, 0]
    lines = []
    for row, record in zip(rows, stored, strict=True):
        body = base64.b64decode(row["body"])
        assert (len(body) > 2 * len(record.body)) is bool(record.sys_flag & 1)
        lines.append(len(json.loads(body)["items"]))
    assert lines == [75, 82, 89, 96, 103, 110, 3, 70]


def test_retried_messages_of_demo_show_their_first_topic(demo: dict[str, Any]) -> None:
    for topic, times in (("%RETRY%billing", 1), ("%RETRY%audit", 1), ("%DLQ%audit", 2)):
        for row in demo[topic]["0"]["rows"]:
            assert row["physicalTopic"] == topic
            assert row["topic"] == ("payments" if topic.startswith("%RETRY%") else topic)
            assert row["reconsumeTimes"] == times
            assert row["properties"]["RETRY_TOPIC"] == "payments"


def test_a_committed_message_of_demo_points_to_its_half(demo: dict[str, Any]) -> None:
    halves = {r["commitLogOffset"]: r for r in demo["RMQ_SYS_TRANS_HALF_TOPIC"]["0"]["rows"]}
    assert {r["sysFlag"] for r in halves.values()} == {0}
    committed = [r for r in records("demo") if r.sys_flag & 0xC]
    assert [r.sys_flag for r in committed] == [8, 8]
    for record in committed:
        half = halves[record.prepared_transaction_offset]
        assert base64.b64decode(half["body"]) == record.body
    (operation,) = demo["RMQ_SYS_TRANS_OP_HALF_TOPIC"]["0"]["rows"]
    assert base64.b64decode(operation["body"]) == b"0,1,2,"


def test_three_reminders_of_demo_were_delivered_and_one_waits(demo: dict[str, Any]) -> None:
    waited = demo["SCHEDULE_TOPIC_XXXX"]
    assert {q: len(found["rows"]) for q, found in waited.items()} == {"0": 2, "1": 1, "2": 6, "17": 1}
    for queue_id, delay_ms in (("0", 1000), ("1", 5000), ("2", 10_000), ("17", 7_200_000)):
        stamps = [row["storeTimestamp"] + delay_ms for row in waited[queue_id]["rows"]]
        assert waited[queue_id]["tagsCodes"] == stamps
    payments = [row for found in demo["payments"].values() for row in found["rows"]]
    delivered = {row["keys"].split()[0] for row in payments if row["tags"] == "reminder"}
    assert delivered == {"P-5500", "P-5501", "P-5502"}


def test_the_messages_of_one_batch_share_a_unique_key_in_5_3_3_and_not_in_4_9_7(
    demo: dict[str, Any],
) -> None:
    rows = [r for q in demo["payments"].values() for r in q["rows"] if r["tags"] == "batch"]
    assert (len(rows), len({row["msgId"] for row in rows})) == (18, 3)
    old = [row for row in queue("broker497", "orders", 1)["rows"] if row["tags"] == "b"]
    assert (len(old), len({row["msgId"] for row in old})) == (6, 6)


def test_properties_end_with_a_separator_in_5_3_3_and_without_in_4_9_7() -> None:
    assert all(r.properties.endswith(b"\x02") for r in records("demo"))
    assert not any(r.properties.endswith(b"\x02") for r in records("broker497"))


def test_broker497_has_forty_messages_in_two_segments() -> None:
    found = expected("broker497")
    assert found["log"] == {"begin": 0, "end": 70249, "records": 40, "stopped": "zeros"}
    assert [found["topics"]["orders"][q]["max"] for q in "01"] == [18, 22]
    last = queue("broker497", "orders", 0)["rows"][-1]
    assert (base64.b64decode(last["body"]), last["sysFlag"]) == (b"compressed " * 600, 0x301)


def test_livekill533_has_42_messages_in_its_log_that_no_queue_has_yet() -> None:
    found = expected("livekill533")
    assert (HERE / "livekill533" / "abort").read_bytes() == b"20559"
    assert found["log"]["records"] == 300
    assert [found["topics"]["orders"][q]["max"] for q in "012"] == [120, 78, 60]
    without = records("livekill533")[258:]  # the last of the log, and all of one queue
    assert [(r.queue_id, r.queue_offset) for r in without] == [(1, n) for n in range(78, 120)]
    assert not any((HERE / "livekill533" / "commitlog" / f"{3 * 65536:020d}").read_bytes())
