"""read_options: names in any case, contradictions between options, and the text of errors."""

import pickle

import pytest
from support.parsed_options import parse_options

from rmq_spark.datasource.options.option_parsers import EARLIEST, LATEST, Positions, Times
from rmq_spark.datasource.options.option_table import OPTIONS
from rmq_spark.datasource.options.read_options import Limits, ReadOptions
from rmq_spark.datasource.options.subscription import Assignment, Pattern, Topics
from rmq_spark.store.errors import OptionError
from rmq_spark.store.local.directory import StoreDirectory
from rmq_spark.store.model import QueueKey

NOW_MS = 1_700_000_000_000
NEEDED = {"path": "/data/store", "subscribe": "orders"}


def parse(**given):
    return parse_options(NEEDED | given, NOW_MS)


def refusal(given):
    with pytest.raises(OptionError) as caught:
        parse_options(given, NOW_MS)
    return str(caught.value)


def test_parse_options_gives_omitted_options_their_defaults() -> None:
    options = parse()
    assert options == ReadOptions(StoreDirectory("/data/store"), subscription=Topics(("orders",)))
    assert options.limits == Limits(max_delay_ms=900_000)
    assert options.fail_on_data_loss
    assert options.max_decompressed_bytes == 64 << 20


def test_parse_options_puts_each_option_into_its_field() -> None:
    options = parse_options(
        {
            "path": "file:///data/store",
            "commitLogPath": "/a,/b",
            "topic": "orders,payments",
            "startingOffsets": "earliest",
            "startingTimestamp": '{"orders": "-10m"}',
            "startingOffsetsByTimestampStrategy": "LATEST",
            "endingOffsets": '{"orders": {"0": 7}}',
            "failOnDataLoss": "false",
            "maxOffsetsPerTrigger": "100",
            "maxBytesPerTrigger": "1m",
            "maxOffsetsPerQueue": "10",
            "minOffsetsPerTrigger": "5",
            "maxTriggerDelay": "1m",
            "minPartitions": "8",
            "maxRecordsPerPartition": "1000",
            "columns": "body,tags",
            "checkCrc": "true",
            "maxDecompressedBytes": "1g",
            "readMode": "pread",
            "keys": "a b",
        },
        NOW_MS,
    )
    assert options == ReadOptions(
        StoreDirectory("/data/store", "/a,/b", "pread"),
        subscription=Topics(("orders", "payments")),
        starting_offsets=Positions(EARLIEST),
        starting_times=Times(None, {"orders": NOW_MS - 600_000}),
        strategy="latest",
        ending_offsets=Positions(None, {QueueKey("orders", 0): 7}),
        fail_on_data_loss=False,
        limits=Limits(100, 1 << 20, 10, 5, 60_000),
        min_partitions=8,
        max_records_per_partition=1000,
        columns=("body", "tags"),
        check_crc=True,
        max_decompressed_bytes=1 << 30,
        keys=("a", "b"),
    )
    assert parse(msgId="A B").message_ids == ("A", "B")
    assert parse(endingTimestamp="-1s").ending_times == Times(NOW_MS - 1000)


def test_read_options_survive_pickling_because_spark_carries_them() -> None:
    options = parse(startingOffsets='{"orders": {"0": 5}}', keys="a")
    assert pickle.loads(pickle.dumps(options)) == options


@pytest.mark.parametrize("change", [str.lower, str.upper, str.title])
def test_parse_options_accepts_names_in_any_case(change) -> None:
    options = parse_options({change("path"): "/x", change("subscribe"): "a", change("maxOffsetsPerTrigger"): "3"}, 0)
    assert options.limits.max_offsets == 3


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("startingoffset", "startingOffsets"),
        ("topics", "topic"),
        ("maxoffsetspertriger", "maxOffsetsPerTrigger"),
        ("subscribepatern", "subscribePattern"),
    ],
)
def test_parse_options_answers_an_unknown_name_with_the_nearest(name, near) -> None:
    message = refusal(NEEDED | {name: "x"})
    assert message == f'unknown option "{name}". Did you mean {near}? docs/OPTIONS.md lists all options.'


def test_parse_options_suggests_nothing_for_a_name_unlike_any() -> None:
    assert "Did you mean" not in refusal(NEEDED | {"zzzzzzzz": "x"})


def test_parse_options_ignores_options_of_spark() -> None:
    assert parse(checkpointLocation="/c", queryName="q", outputMode="append") == parse()


def test_parse_value_shows_the_value_the_expectation_and_an_example() -> None:
    message = refusal(NEEDED | {"startingOffsets": "earlyest"})
    assert message == (
        'startingOffsets="earlyest": expected earliest, latest, group or {"TopicA": {"0": 42}}. '
        'Example: startingOffsets={"orders": {"0": 42}}'
    )


def test_parse_value_cuts_a_long_value_in_the_error() -> None:
    message = refusal(NEEDED | {"startingOffsets": "x" * 10_000})
    assert len(message) < 400


def needed_by(option) -> dict[str, str]:
    """Return the options without which this one has no effect."""
    if option.name in ("tlsCertFile", "tlsKeyFile"):
        return {"tlsCertFile": "/a.pem", "tlsKeyFile": "/a.key"}
    if option.requires != "consumerGroup":
        return {}
    shared = {"assignment": "shared"}
    others = {"allocateStrategy": shared, "handoverTimeout": shared, "groupFallback": {"startingOffsets": "group"}}
    return {"consumerGroup": "g"} | others.get(option.name, {})


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_parse_options_accepts_each_example_and_refuses_each_empty_text(option) -> None:
    parse_options(needed_by(option) | {option.name: option.example}, NOW_MS)
    shown = "…" if option.is_secret else ""
    assert f'{option.name}="{shown}"' in refusal(needed_by(option) | {option.name: ""})


@pytest.mark.parametrize(
    "name",
    [
        "maxOffsetsPerTrigger",
        "maxBytesPerTrigger",
        "maxOffsetsPerQueue",
        "minOffsetsPerTrigger",
        "maxTriggerDelay",
        "minPartitions",
        "maxRecordsPerPartition",
        "maxDecompressedBytes",
    ],
)
@pytest.mark.parametrize("text", ["0", "-1", "many"])
def test_parse_options_refuses_a_limit_that_is_not_positive(name, text) -> None:
    message = refusal(NEEDED | {name: text})
    assert message.startswith(f'{name}="{text}": expected ')
    assert "≥ 1" in message
    assert f"Example: {name}=" in message


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"subscribe": "a", "assign": '{"a": [0]}'}, ["exactly one", "subscribe and assign"]),
        ({"topic": "a", "subscribePattern": "a.*"}, ["exactly one", "subscribe and subscribePattern"]),
        ({"subscribe": "a", "topic": "a"}, ["subscribe and its alias topic"]),
        (
            {"startingOffsets": '{"orders": {"0": 1}}', "startingTimestamp": "-1m"},
            ["startingOffsets and startingTimestamp", "Give one"],
        ),
        ({"startingOffsets": "latest", "startingTimestamp": "-1m"}, ["startingOffsets and startingTimestamp"]),
        (
            {"startingOffsets": '{"orders": {"0": 1}}', "startingTimestamp": '{"orders": "-1m"}'},
            ["startingOffsets and startingTimestamp"],
        ),
        ({"endingOffsets": "latest", "endingTimestamp": "-1m"}, ["endingOffsets and endingTimestamp"]),
        ({"endingOffsets": "earliest"}, ["endingOffsets: found earliest", "expected latest"]),
        ({"endingOffsets": '{"orders": {"0": -2}}'}, ["endingOffsets: found earliest"]),
        (
            {"startingOffsets": '{"orders": {"0": 9}}', "endingOffsets": '{"orders": {"0": 8}}'},
            ["orders/0", "startingOffsets=9", "endingOffsets=8"],
        ),
        ({"startingTimestamp": "-1m", "endingTimestamp": "-2m"}, ["startingTimestamp", "after endingTimestamp"]),
        (
            {"minOffsetsPerTrigger": "11", "maxOffsetsPerTrigger": "10"},
            ["minOffsetsPerTrigger=11", "maxOffsetsPerTrigger=10"],
        ),
        ({"keys": "a", "msgId": "b"}, ["keys and msgId"]),
        ({"startingOffsets": '{"other": {"0": 1}}'}, ["startingOffsets", "other/0", 'subscribe="orders"']),
        ({"endingOffsets": '{"other": {"0": 1}}'}, ["endingOffsets", "other/0"]),
        ({"startingTimestamp": '{"other": "-1m"}'}, ["startingTimestamp", "topic other"]),
        ({"endingTimestamp": '{"other": {"0": "-1m"}}'}, ["endingTimestamp", "other/0"]),
    ],
)
def test_parse_options_refuses_contradictions_with_both_sides(given, parts) -> None:
    base = {"path": "/x"} if {"subscribe", "topic"} & given.keys() else NEEDED
    message = refusal(base | given)
    for part in parts:
        assert part in message


def test_parse_options_refuses_a_pattern_as_a_name_with_the_option_for_it() -> None:
    message = refusal({"path": "/x", "subscribe": "payments,ord*"})
    assert 'subscribe="payments,ord*"' in message
    assert "found a pattern" in refusal({"path": "/x", "subscribe": r"orders-\d+"})
    assert "For a pattern give subscribePattern instead of subscribe" in message


def test_parse_options_accepts_options_that_only_seem_to_contradict() -> None:
    parse(startingOffsets="earliest", startingTimestamp='{"orders": "-1m"}')
    parse(startingOffsets='{"orders": {"0": 9}}', endingOffsets='{"orders": {"0": 9, "1": -1}}')
    parse(startingOffsets='{"orders": {"0": 9}}', endingOffsets='{"orders": {"0": -1}}')
    parse(minOffsetsPerTrigger="10", maxOffsetsPerTrigger="10")
    parse(startingTimestamp="-1m", endingTimestamp="-1m")


def test_parse_options_refuses_offsets_that_assign_or_a_pattern_does_not_cover() -> None:
    assigned = {"path": "/x", "assign": '{"orders": [0, 1]}'}
    parse_options(assigned | {"startingOffsets": '{"orders": {"1": 5}}'}, 0)
    parse_options(assigned | {"startingTimestamp": '{"orders": 1600000000005}'}, 0)
    assert "orders/2" in refusal(assigned | {"startingOffsets": '{"orders": {"2": 5}}'})
    assert "topic others" in refusal(assigned | {"startingTimestamp": '{"others": 1600000000005}'})
    pattern = {"path": "/x", "subscribePattern": "orders-.*"}
    parse_options(pattern | {"endingOffsets": '{"orders-eu": {"1": 5}}'}, 0)
    assert "payments/1" in refusal(pattern | {"endingOffsets": '{"payments": {"1": 5}}'})


def test_check_complete_requires_path_and_subscription() -> None:
    options = parse_options({}, 0)
    with pytest.raises(OptionError, match="path or nameServer is required"):
        options.check_complete()
    with pytest.raises(OptionError, match="exactly one of subscribe, subscribePattern and assign"):
        parse_options({"path": "/x"}, 0).check_complete()
    assert parse().check_complete() == (StoreDirectory("/data/store"), Topics(("orders",)))


def test_parse_options_makes_a_subscription_of_each_kind() -> None:
    assert parse_options({"subscribePattern": "a|b"}, 0).subscription == Pattern("a|b")
    assert parse_options({"assign": '{"a": [1]}'}, 0).subscription == Assignment((QueueKey("a", 1),))


@pytest.mark.parametrize("text", ["latest", '{"orders": {"0": -1}}'])
def test_check_batch_refuses_a_start_at_latest(text) -> None:
    options = parse(startingOffsets=text)
    options.check_stream()
    with pytest.raises(OptionError, match="startingOffsets: found latest"):
        options.check_batch()


def test_check_batch_ignores_the_limits_of_a_stream_as_kafka_does() -> None:
    parse(maxOffsetsPerTrigger="5", minOffsetsPerTrigger="5", maxTriggerDelay="1m").check_batch()


@pytest.mark.parametrize("name", ["keys", "msgId"])
def test_check_stream_refuses_keys_and_msgId(name) -> None:
    options = parse(**{name: "x"})
    options.check_batch()
    with pytest.raises(OptionError, match=f"{name} works in batch queries only"):
        options.check_stream()


def test_parse_options_accepts_one_path_in_a_list_and_refuses_two() -> None:
    assert parse_options({"paths": '["/data/store"]'}, 0).location == StoreDirectory("/data/store")
    assert "2 paths" in refusal({"paths": '["/a", "/b"]'})


def test_parse_options_refuses_a_table_in_the_catalog() -> None:
    message = refusal(NEEDED | {"provider": "rmq", "owner": "me", "option.subscribe": "orders"})
    assert "TEMPORARY VIEW" in message


def test_LATEST_and_EARLIEST_are_kafkas_numbers() -> None:
    assert (LATEST, EARLIEST) == (-1, -2)


@pytest.mark.parametrize("name", ["startingTimestamp", "endingTimestamp"])
@pytest.mark.parametrize(
    "text",
    [
        *("1", "1700000000", "978307200000", '{"orders": 1700000000}', '{"orders": {"0": "1"}}'),
        *("253402300800000", "1795240231000000", '{"orders": 1795240231000000000}'),
    ],
)
def test_timestamps_in_another_unit_are_refused_and_the_unit_is_named(name: str, text: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse(**{name: text})
    message = str(caught.value)
    assert message.startswith(name)
    assert "the unit is milliseconds" in message


@pytest.mark.parametrize(
    ("text", "time_ms"),
    [
        ("0", 0),
        ("978307200001", 978_307_200_001),
        ("1700000000000", 1_700_000_000_000),
        ("1999-01-01T00:00:00Z", 915_148_800_000),
    ],
)
def test_startingTimestamp_accepts_ms_and_iso_times(text: str, time_ms: int) -> None:
    assert parse(startingTimestamp=text).starting_times == Times(time_ms)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("startingOffsets", '{"orders": {"broker-a:0": 5}}'),
        ("startingTimestamp", '{"orders": {"broker-a:0": 1600000000005}}'),
        ("endingOffsets", '{"orders": {"broker-a:0": 5}}'),
    ],
)
def test_parse_options_refuses_broker_names_for_a_directory(name: str, text: str) -> None:
    assert f"the queue orders/broker-a:0 in {name} is not possible here" in refusal(NEEDED | {name: text})
    assert "cannot tell queues apart by the names of brokers" in refusal(
        {"path": "/x", "assign": '{"orders": ["broker-a:0"]}'}
    )
