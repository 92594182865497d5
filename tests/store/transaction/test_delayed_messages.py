"""Messages with a level or a time, from the call or the task to the units: where they wait, and until when."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.arrow_rows import arrow_rows

from rmq_spark import OptionError, StoreChangedError, open_reader, open_store
from rmq_spark.store import CommitKey, CommitOptions, RecordBuilderSettings, SinkSettings, TaskStage, commit_sink
from rmq_spark.store.disk.clock import wall_clock_ms
from rmq_spark.store.errors import NotFoundError
from rmq_spark.store.format.consume_queue_entry import QUEUE_UNIT
from rmq_spark.store.format.delay_levels import DEFAULT_DELAY_LEVELS, DelayLevels
from rmq_spark.store.format.property_encoder import ENGINE_OWNED
from rmq_spark.store.log.write_session import WriteSession
from rmq_spark.store.names import SCHEDULE_TOPIC, TIMER_TOPIC

TABLES = ["1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h", "7s 1d 3s"]
COLUMNS = ("topic", "queueId", "queueOffset", "tags", "body", "properties", "storeTimestamp", "bornTimestamp")
Row = dict[str, Any]


def rows_of(root: Path, topic: str) -> list[Row]:
    """Return a topic's messages queue by queue; times are ms, and a unit's tags code stands beside them."""
    found: list[Row] = []
    with open_reader(str(root)) as reader:
        reader.refresh()
        for queue in reader.queues(topic) if topic in reader.topics() else []:
            held = reader.bounds(queue)
            batches = list(reader.read(queue, held.min_offset, held.max_offset, COLUMNS, check_crc=True))
            codes = tags_codes(root, topic, queue.queue_id)
            for row in arrow_rows(batches):
                row["storeTimestamp"] //= 1000
                found.append(row | {"tagsCode": codes[row["queueOffset"]]})
    return found


def tags_codes(root: Path, topic: str, queue_id: int) -> list[int]:
    codes: list[int] = []
    for path in sorted((root / "consumequeue" / topic / str(queue_id)).glob("*")):
        units = np.frombuffer(path.read_bytes(), QUEUE_UNIT)
        codes += units["tags_code"][units["record_size"] > 0].tolist()
    return codes


def topic_counts(root: Path) -> dict[str, int]:
    table = json.loads((root / "config" / "topics.json").read_text())["topicConfigTable"]
    return {name: topic["writeQueueNums"] for name, topic in table.items()}


def settings_of(root: Path) -> dict[str, Any]:
    return dict(json.loads((root / "rmq" / "settings.json").read_text()))


@pytest.mark.parametrize("table", TABLES)
def test_a_message_with_a_level_waits_in_its_queue_until_the_table_says(tmp_path: Path, table: str) -> None:
    levels = DelayLevels.parse(table)
    asked = [1, 3, 2, 19, 18, None, 0, -1, 1, 2**31 - 1]
    with open_store(tmp_path, message_delay_level=table) as store:
        for number, level in enumerate(asked):
            place = store.send("T", b"%d" % number, tags="A", queue_id=number % 3, delay_level=level)
            assert place.topic == ("T" if (level or 0) < 1 else SCHEDULE_TOPIC)
    plain, waiting = rows_of(tmp_path, "T"), rows_of(tmp_path, SCHEDULE_TOPIC)
    assert sorted(row["body"] for row in plain) == [b"5", b"6", b"7"]
    assert all(row["properties"].keys() == {"TAGS", "UNIQ_KEY"} for row in plain)
    expected = sorted((min(level, len(levels)), number) for number, level in enumerate(asked) if (level or 0) > 0)
    assert [(row["queueId"] + 1, int(row["body"])) for row in waiting] == expected
    for row, (level, number) in zip(waiting, expected, strict=True):
        del row["properties"]["UNIQ_KEY"]
        real = {"REAL_TOPIC": "T", "REAL_QID": str(number % 3)}
        assert row["properties"] == {"TAGS": "A", "DELAY": str(level), **real}
        assert row["tagsCode"] == row["storeTimestamp"] + levels.delays_ms[level - 1]
    assert topic_counts(tmp_path) == {"T": 4, SCHEDULE_TOPIC: len(levels)}


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("flush", ["sync", "async"])
def test_recovery_makes_the_units_that_the_append_made(tmp_path: Path, table: str, flush: str) -> None:
    """Another program, which does not know the table of levels, rebuilds the entries."""
    levels = [number % 22 - 1 for number in range(300)]
    rows = [{"body": b"%d" % number, "tags": "A", "delayLevel": level} for number, level in enumerate(levels)]
    store = open_store(tmp_path, message_delay_level=table, flush=flush)
    store.send_many(pa.Table.from_pylist(rows), topic="T")
    appended = {topic: rows_of(tmp_path, topic) for topic in ("T", SCHEDULE_TOPIC)}
    assert sum(map(len, appended.values())) == 300
    shutil.rmtree(tmp_path / "consumequeue")
    (tmp_path / "consumequeue").mkdir()
    (tmp_path / "rmq" / "watermark").unlink()
    (tmp_path / "abort").touch()
    with open_store(tmp_path):
        pass
    assert {topic: rows_of(tmp_path, topic) for topic in ("T", SCHEDULE_TOPIC)} == appended


@pytest.mark.parametrize("table", TABLES)
def test_who_dies_between_log_and_units_leaves_the_rest_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    levels = DelayLevels.parse(table)
    store = open_store(tmp_path, message_delay_level=table)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(WriteSession, "_dispatch", die)
        with pytest.raises(KeyboardInterrupt):
            store.send("T", b"1", tags="A", delay_level=2)
    with open_store(tmp_path):
        pass
    (row,) = rows_of(tmp_path, SCHEDULE_TOPIC)
    assert (row["queueId"], row["tagsCode"]) == (1, row["storeTimestamp"] + levels.delays_ms[1])


def test_a_message_for_a_time_waits_for_the_timer(tmp_path: Path) -> None:
    now_ms = wall_clock_ms()
    second = now_ms // 1000 * 1000 + 60_000
    times = [second, second + 1, second - 1, now_ms - 5, 0]
    with open_store(tmp_path) as store:
        for number, time_ms in enumerate(times):
            place = store.send("T", b"%d" % number, tags="A", sharding_key="k", deliver_at_ms=time_ms)
            assert (place.topic, place.queue_id == 0) == ((TIMER_TOPIC, True) if number < 3 else ("T", False))
    queue_id = str(rows_of(tmp_path, "T")[0]["queueId"])
    found = {
        int(row["body"]): (row["properties"], row["tagsCode"])
        for topic in ("T", TIMER_TOPIC)
        for row in rows_of(tmp_path, topic)
    }
    outs = [second - 1000, second, second - 1000]
    for number, time_ms in enumerate(times):
        properties, tags_code = found[number]
        del properties["UNIQ_KEY"]
        wanted = {"TAGS": "A", "__SHARDINGKEY": "k", "TIMER_DELIVER_MS": str(time_ms)}
        if number < 3:
            wanted |= {"TIMER_OUT_MS": str(outs[number]), "REAL_TOPIC": "T", "REAL_QID": queue_id}
        assert properties == wanted
        assert tags_code == ord("A")
    assert topic_counts(tmp_path) == {"T": 4, TIMER_TOPIC: 1}


def test_a_level_wins_over_a_time_whatever_that_is(tmp_path: Path) -> None:
    far_ms = wall_clock_ms() + 400 * 86_400_000
    with open_store(tmp_path, broker_version="4.9") as store:
        assert store.send("T", b"a", delay_level=4, deliver_at_ms=far_ms).queue_id == 3
    (row,) = rows_of(tmp_path, SCHEDULE_TOPIC)
    assert row["properties"].keys() == {"DELAY", "REAL_TOPIC", "REAL_QID", "UNIQ_KEY"}


def test_a_time_beyond_what_the_store_takes_is_refused_with_the_row(tmp_path: Path) -> None:
    now_ms = wall_clock_ms()
    with open_store(tmp_path, timer_max_delay_sec=3600) as store:
        with pytest.raises(OptionError, match=r"topic 'T': deliverTimestamp \d+ .* expected at most 3600 s"):
            store.send("T", b"a", deliver_at_ms=now_ms + 3_700_000)
        rows = pa.table({"body": [b"a", b"b"], "deliverTimestamp": [now_ms + 3_500_000, now_ms + 3_700_000]})
        with pytest.raises(OptionError, match=r"row 1, topic 'T': deliverTimestamp"):
            store.send_many(rows, topic="T")
        assert len(store.send_many(rows.slice(0, 1), topic="T")) == 1
    with open_store(tmp_path) as store, pytest.raises(OptionError, match="expected at most 3600 s"):
        store.send("T", b"a", deliver_at_ms=now_ms + 3_700_000)
    with open_store(tmp_path, timer_max_delay_sec=4000) as store:
        store.send("T", b"a", deliver_at_ms=now_ms + 3_700_000)
    assert settings_of(tmp_path)["timerMaxDelaySec"] == 4000


def sends_for_a_time(root: Path, **opening: Any) -> None:
    with open_store(root, **opening) as store:
        assert store.send("T", b"x", deliver_at_ms=wall_clock_ms() + 60_000).topic == TIMER_TOPIC


def is_refused_a_time(root: Path, **opening: Any) -> None:
    with open_store(root, **opening) as store:
        store.send("T", b"levels are for all", delay_level=1)
        store.send("T", b"and so is the past", deliver_at_ms=wall_clock_ms() - 60_000)
        with pytest.raises(OptionError, match=r"for 4\.9, whose brokers have no timer") as caught:
            store.send("T", b"x", deliver_at_ms=wall_clock_ms() + 60_000)
    assert "use delayLevel" in str(caught.value)
    assert 'broker_version="5"' in str(caught.value)


def test_a_store_for_4_9_refuses_times_and_says_what_to_do(tmp_path: Path, tmp_store: Callable[[str], Path]) -> None:
    ours, theirs = tmp_path / "ours", tmp_store("broker497")
    is_refused_a_time(ours, broker_version="4.9")
    for root in (ours, theirs):
        is_refused_a_time(root)
        is_refused_a_time(root)  # its topics.json is written by us now, as 5.x does
        sends_for_a_time(root, broker_version="5")
        sends_for_a_time(root)
    sends_for_a_time(tmp_store("demo"))
    sends_for_a_time(tmp_path / "new")


@pytest.mark.parametrize(
    ("opening", "said"),
    [
        ({"message_delay_level": "1s 5x"}, "'5x' is not a delay"),
        ({"message_delay_level": ""}, "is not a table of delay levels"),
        ({"message_delay_level": 5}, "is not a table of delay levels"),
        ({"timer_max_delay_sec": -1}, "timer_max_delay_sec=-1 must be an integer"),
        ({"timer_max_delay_sec": "3d"}, "timer_max_delay_sec='3d' must be an integer"),
        ({"broker_version": "5.3"}, "broker_version='5.3' is none of: 4.9, 5"),
        ({"broker_version": 5}, "broker_version=5 is none of: 4.9, 5"),
    ],
)
def test_bad_terms_are_refused_before_anything_is_made(tmp_path: Path, opening: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        open_store(tmp_path / "s", **opening)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "soon", 1 << 53])
def test_a_time_that_is_none_is_refused(tmp_path: Path, wrong: Any) -> None:
    with open_store(tmp_path) as store:
        with pytest.raises(OptionError, match=r"deliver_at_ms=.* must be an integer from 0 to"):
            store.send("T", b"a", deliver_at_ms=wrong)
        with pytest.raises(OptionError, match="invalid message: delayLevel: "):
            store.send("T", b"a", delay_level="3s")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "column"), [("delay_level", "delayLevel"), ("queue_id", "queueId"), ("flag", "flag")]
)
@pytest.mark.parametrize("wrong", [1.5, float("inf"), float("nan")])
def test_a_number_with_a_fraction_is_refused_and_not_cut(tmp_path: Path, field: str, column: str, wrong: float) -> None:
    with (
        open_store(tmp_path) as store,
        pytest.raises(OptionError, match=rf"^invalid message: .*{column}: .*[^.]\. Types are"),
    ):
        store.send("T", b"a", **{field: wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns", None])
@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo"])
def test_times_of_any_unit_and_zone_mean_the_same(tmp_path: Path, unit: str | None, zone: str) -> None:
    second_ms = wall_clock_ms() // 1000 * 1000 + 60_000
    times = pa.array([second_ms, None], pa.int64())
    if unit is not None:
        times = times.cast(pa.timestamp("ms", zone)).cast(pa.timestamp(unit, zone))
    with open_store(tmp_path) as store:
        places = store.send_many(pa.table({"body": [b"a", b"b"], "deliverTimestamp": times}), topic="T").to_pylist()
    assert [place["topic"] for place in places] == [TIMER_TOPIC, "T"]
    (row,) = rows_of(tmp_path, TIMER_TOPIC)
    assert row["properties"]["TIMER_DELIVER_MS"] == str(second_ms)


@pytest.mark.parametrize("seconds", [1, 1_790_000_000, 978_307_200_000])
def test_a_time_in_seconds_is_refused_and_the_unit_is_named(tmp_path: Path, seconds: int) -> None:
    with open_store(tmp_path) as store:
        with pytest.raises(OptionError, match=rf"deliver_at_ms={seconds} .*the unit is milliseconds"):
            store.send("T", b"a", deliver_at_ms=seconds)
        rows = pa.table({"body": [b"a", b"b", b"c"], "deliverTimestamp": pa.array([None, 0, seconds], pa.int64())})
        with pytest.raises(OptionError, match=rf"column deliverTimestamp: {seconds} .*the unit is milliseconds"):
            store.send_many(rows, topic="T")
        assert store.send("T", b"0 is at once", deliver_at_ms=0).queue_offset == 0
        times = rows.column("deliverTimestamp").cast(pa.timestamp("ms", "UTC"))
        assert len(store.send_many(rows.set_column(1, "deliverTimestamp", times), topic="T")) == 3, "a date is a date"


def stage(root: Path, rows: pa.RecordBatch, batch_id: int = 0, **given: Any) -> tuple[SinkSettings, CommitKey, Any]:
    outbox, options = RecordBuilderSettings(**given), CommitOptions(create_topics=given.get("creates_topics", True))
    settings, key = SinkSettings(str(root), outbox, options), CommitKey("query", batch_id)
    task = TaskStage(settings, key, "00000")
    task.write(rows)
    return settings, key, task.finish()


def many(levels: list[int | None], topics: list[str]) -> pa.RecordBatch:
    rows = [
        {"topic": topic, "body": b"%d" % number, "tags": "A", "queueId": number % 4, "delayLevel": level}
        for number, (level, topic) in enumerate(zip(levels, topics, strict=True))
    ]
    return pa.RecordBatch.from_pylist(rows).cast(
        pa.schema([("topic", pa.string()), ("body", pa.binary()), ("tags", pa.string())]
                  + [(name, pa.int32()) for name in ("queueId", "delayLevel")])
    )  # fmt: skip


def test_a_batch_makes_the_topics_that_its_messages_are_for_and_those_where_they_wait(tmp_path: Path) -> None:
    levels: list[int | None] = [1, None, 3, 18, 30, 0] * 50
    settings, key, staged = stage(tmp_path, many(levels, ["T", "U", "V", "T", "W", "U"] * 50))
    assert staged.topics == {"T": 4, "U": 4, "V": 3, "W": 3, SCHEDULE_TOPIC: 1}
    assert commit_sink(settings, key, [staged]).rows == 300
    assert topic_counts(tmp_path) == {"T": 4, "U": 4, "V": 4, "W": 4, SCHEDULE_TOPIC: 18}
    waiting = rows_of(tmp_path, SCHEDULE_TOPIC)
    assert len(waiting) == 200
    for row in waiting:
        number, level = int(row["body"]), row["queueId"] + 1
        assert level == min(levels[number] or 0, 18)
        real = (row["properties"]["DELAY"], row["properties"]["REAL_TOPIC"], row["properties"]["REAL_QID"])
        assert real == (str(level), ["T", "U", "V", "T", "W", "U"][number % 6], str(number % 4))
        assert row["tagsCode"] == row["storeTimestamp"] + DEFAULT_DELAY_LEVELS.delays_ms[level - 1]
    assert [row["body"] for row in rows_of(tmp_path, "T") + rows_of(tmp_path, "V")] == []
    assert len(rows_of(tmp_path, "U")) == 100


def test_with_create_topic_false_only_the_messages_own_topics_must_be_there(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.create_topic("T")
    with pytest.raises(NotFoundError, match='topic "U" is not in the store'):
        stage(tmp_path, many([1], ["U"]), creates_topics=False)
    settings, key, staged = stage(tmp_path, many([1], ["T"]), creates_topics=False)
    assert commit_sink(settings, key, [staged]).rows == 1
    with open_store(tmp_path, create_topic=False) as store:
        store.send("T", b"a", delay_level=2)
        store.send("T", b"a", deliver_at_ms=wall_clock_ms() + 60_000)
    assert topic_counts(tmp_path) == {"T": 4, SCHEDULE_TOPIC: 18, TIMER_TOPIC: 1}


def test_a_topic_that_lost_queues_meanwhile_is_noticed_by_the_messages_that_wait_for_it(tmp_path: Path) -> None:
    settings, key, staged = stage(tmp_path, many([1, 1, 1, 1], ["T"] * 4))
    with open_store(tmp_path) as store:
        store.create_topic("T", 2)
    with pytest.raises(StoreChangedError, match='topic "T" has 2 write queues, and messages were prepared for queue 3'):
        commit_sink(settings, key, [staged])
    assert rows_of(tmp_path, SCHEDULE_TOPIC) == []


def test_a_batch_that_was_staged_before_the_table_shrank_is_committed(tmp_path: Path) -> None:
    """Its levels are not in the new table: the entries are those of a recovery, and of a broker with that table."""
    settings, key, staged = stage(tmp_path, many([18, 2], ["T", "T"]))
    with open_store(tmp_path, message_delay_level="7s 9s 1m") as store:
        store.create_topic("other")
    commit_sink(settings, key, [staged])
    delays = {row["queueId"]: row["tagsCode"] - row["storeTimestamp"] for row in rows_of(tmp_path, SCHEDULE_TOPIC)}
    assert delays == {17: 60_000, 1: 9000}


def test_who_changes_the_table_changes_it_for_a_program_that_is_at_work(tmp_path: Path) -> None:
    with open_store(tmp_path, message_delay_level="1s 2s 3s") as first:
        assert first.send("T", b"a", delay_level=9).queue_id == 2
        with open_store(tmp_path, message_delay_level="1h 2h") as second:
            assert first.send("T", b"b", delay_level=9).queue_id == 2, "it has not written yet"
            assert second.send("T", b"c", delay_level=9).queue_id == 1
            assert first.send("T", b"d", delay_level=9).queue_id == 1
    assert settings_of(tmp_path)["messageDelayLevel"] == "1h 2h"
    waiting = {row["body"]: row["tagsCode"] - row["storeTimestamp"] for row in rows_of(tmp_path, SCHEDULE_TOPIC)}
    assert waiting == {b"a": 3000, b"b": 3000, b"c": 7_200_000, b"d": 7_200_000}


def test_a_messages_properties_are_those_that_a_broker_gave_it(tmp_path: Path, golden: Path) -> None:
    """Send what waits in a broker's store as its producers did."""
    theirs = rows_of(golden / "demo", SCHEDULE_TOPIC) + rows_of(golden / "basic", SCHEDULE_TOPIC)
    sent = [row for row in theirs if "RETRY_TOPIC" not in row["properties"]]
    assert len(sent) == 5
    with open_store(tmp_path) as store:
        for row in sent:
            properties = row["properties"]
            store.send(
                properties["REAL_TOPIC"],
                row["body"],
                tags=properties["TAGS"],
                keys=properties.get("KEYS"),
                properties={name: value for name, value in properties.items() if name not in ENGINE_OWNED},
                queue_id=int(properties["REAL_QID"]),
                delay_level=int(properties["DELAY"]),
            )
    ours = {row["body"]: row for row in rows_of(tmp_path, SCHEDULE_TOPIC)}
    for row in sent:
        mine = ours[row["body"]]
        mine["properties"].pop("UNIQ_KEY")
        row["properties"].pop("UNIQ_KEY", None)
        assert mine["properties"] == row["properties"]
        assert mine["queueId"] == row["queueId"]
        assert mine["tagsCode"] - mine["storeTimestamp"] == row["tagsCode"] - row["storeTimestamp"]


def test_a_message_for_a_time_has_the_properties_that_a_broker_gave_it(tmp_path: Path, golden: Path) -> None:
    (theirs, *_) = rows_of(golden / "timer", TIMER_TOPIC)
    with open_store(tmp_path) as store:
        store.send("TopicA", b"a", tags="t", queue_id=3, deliver_at_ms=wall_clock_ms() + 60_000)
    (ours,) = rows_of(tmp_path, TIMER_TOPIC)
    assert ours["properties"].keys() == theirs["properties"].keys()
    for name in ("TAGS", "REAL_TOPIC", "REAL_QID"):
        assert ours["properties"][name] == theirs["properties"][name]
    assert (ours["queueId"], ours["tagsCode"]) == (theirs["queueId"], theirs["tagsCode"])
