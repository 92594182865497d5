"""Tests of `dump`: every entry of a file has its position."""

import gzip
import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

import rmq_spark
from rmq_spark import OptionError, StorePathError, dump
from rmq_spark.store.format.record import Record, decode_record

FILES = {
    "basic/commitlog/00000000000000000000": "commitlog",
    "basic/consumequeue/TopicR/0/00000000000000000000": "consumequeue",
    "basic/checkpoint": "checkpoint",
    "basic/lock": "lock",
    "batchcq-cqext/batchconsumequeue/TopicIB/0/00000000000000000000": "batchconsumequeue",
    "batchcq-cqext/consumequeue_ext/TopicE/0/00000000000000000000": "consumequeue_ext",
    "crashed/abort": "abort",
    "demo/config/topics.json": "json",
    "demo/config/consumerOffset.json.bak": "json",
    "timer/timerlog/00000000000000000000": "timerlog",
    "timer/config/timercheck": "timercheck",
}


@pytest.mark.parametrize("name", FILES)
def test_dump_derives_the_kind_and_yields_entries_in_order(name: str, golden: Path) -> None:
    found = dump(golden / name)
    assert found.kind == FILES[name]
    table = found.to_arrow()
    assert table.schema == found.schema
    assert table.column_names[:2] == ["position", "entry"]
    positions = table["position"].to_pylist()
    assert positions == sorted(positions)
    assert len(positions) > 0
    assert positions[-1] < (golden / name).stat().st_size


def test_dump_of_a_segment_has_the_positions_of_records(golden: Path) -> None:
    path = golden / "demo/commitlog/00000000000000262144"
    data = path.read_bytes()
    rows = dump(path).to_arrow().to_pylist()
    assert [row["entry"] for row in rows[-1:]] == ["filler"]
    for row in rows[:-1]:
        record = decode_record(data[row["position"] :])
        assert isinstance(record, Record)
        assert (row["physicalOffset"], row["size"]) == (record.physical_offset, record.total_size)
        assert (row["topic"], row["queueId"], row["queueOffset"]) == (
            record.topic.decode(),
            record.queue_id,
            record.queue_offset,
        )
        assert data[row["bodyPosition"] :][: row["bodySize"]] == record.body
        assert row["crcMatches"]
    assert dump(path, position=rows[5]["position"]).to_arrow().to_pylist() == rows[5:]


def test_dump_begins_at_any_position_and_reports_damage(tmp_store: Callable[[str], Path]) -> None:
    path = tmp_store("basic") / "commitlog/00000000000000000000"
    whole = [row["position"] for row in dump(path).to_arrow().to_pylist()]
    from_within = dump(path, position=whole[3] + 7, limit=3).to_arrow().to_pylist()
    assert [(row["position"], row["entry"]) for row in from_within] == [
        (whole[3] + 7, "damage"),
        (whole[4], "record"),
        (whole[5], "record"),
    ]
    data = bytearray(path.read_bytes())
    data[whole[5] + 4] ^= 0xFF
    path.write_bytes(data)
    rows = dump(path).to_arrow().to_pylist()
    assert [row["position"] for row in rows] == whole
    assert (rows[5]["entry"], rows[5]["size"]) == ("damage", whole[6] - whole[5])
    assert "magic" in rows[5]["found"]


def test_dump_of_entries_has_their_positions(golden: Path, tmp_path: Path) -> None:
    path = golden / "basic/consumequeue/TopicR/0/00000000000000001000"
    data = path.read_bytes()
    for row in dump(path).to_arrow().to_pylist():
        unit = struct.unpack_from(">qiq", data, row["position"])
        assert (row["physicalOffset"], row["recordSize"], row["tagsCode"]) == unit
        assert row["queueOffset"] == 50 + row["position"] // 20
    path = next((golden / "basic/index").iterdir())
    data = path.read_bytes()
    rows = dump(path).to_arrow().to_pylist()
    assert {row["entry"] for row in rows} == {"header", "slot", "unit"}
    for row in rows:
        if row["entry"] == "slot":
            assert struct.unpack_from(">i", data, row["position"])[0] == row["newestUnit"]
        if row["entry"] == "unit":
            assert struct.unpack_from(">iqii", data, row["position"]) == (
                row["keyHash"],
                row["physicalOffset"],
                row["seconds"],
                row["previousUnit"],
            )
    wheel = tmp_path / "timerwheel"
    wheel.write_bytes(gzip.decompress((golden / "timer/timerwheel.gz").read_bytes()))
    for row in dump(wheel).to_arrow().to_pylist():
        assert struct.unpack_from(">q", wheel.read_bytes(), row["position"])[0] == row["second"]
    part = dump(golden / "preblank/consumequeue/TopicR/0/00000000000000000000", position=16 * 20, limit=2).to_arrow()
    assert [(row["position"], row["entry"]) for row in part.to_pylist()] == [(320, "fill"), (340, "unit")]


@pytest.mark.parametrize("name", ["topics.json", "consumerOffset.json", "delayOffset.json", "consumerFilter.json"])
def test_dump_of_json_has_the_positions_of_values(name: str, golden: Path) -> None:
    path = golden / "demo/config" / name
    text = path.read_text()
    for row in dump(path).to_arrow().to_pylist():
        assert text.startswith(json.dumps(json.loads(row["value"]), ensure_ascii=False), row["position"]), row


def test_dump_of_invalid_json_has_the_text(tmp_path: Path) -> None:
    path = tmp_path / "topics.json"
    path.write_text('{"a":')
    (row,) = dump(path).to_arrow().to_pylist()
    assert row["entry"].startswith("no JSON")
    assert row["value"] == '{"a":'


def test_dump_reads_the_files_in_rmq(tmp_path: Path) -> None:
    with rmq_spark.open_store(tmp_path / "s", segment_bytes=4096) as store:
        store.send("a", b"x")
    kinds = {}
    for path in sorted((tmp_path / "s" / "rmq").rglob("*")):
        if path.is_file():
            found = dump(path)
            kinds[path.name] = found.kind
            list(found)
    assert (kinds["watermark"], kinds["settings.json"], kinds["broker.conf"]) == ("watermark", "json", "text")


def test_dump_refuses_unknown_files_and_kinds(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    with pytest.raises(OptionError, match=r"Give its kind, one of: commitlog"):
        dump(tmp_path / "x")
    with pytest.raises(OptionError, match="is none of: commitlog"):
        dump(tmp_path / "x", kind="nothing")
    with pytest.raises(StorePathError, match="does not exist"):
        dump(tmp_path / "y")
    assert dump(tmp_path / "x", kind="consumequeue").to_arrow().num_rows == 0
    assert dump(tmp_path / "x", kind="commitlog").to_arrow()["entry"].to_pylist() == ["end"]
