"""write_options: names in any case, contradictions between options, and the text of errors."""

import pickle

import pytest
from support.parsed_options import parse_sink_options

from rmq_spark.datasource.options.option_parsers import QUEUES_MAX
from rmq_spark.datasource.options.option_table import SINK_OPTIONS
from rmq_spark.datasource.options.write_options import SinkOptions, looks_like_reading
from rmq_spark.store.backend import Capability, CommitTerms, SendBackTerms, SinkTerms
from rmq_spark.store.errors import OptionError
from rmq_spark.store.local.directory import StoreDirectory
from rmq_spark.store.local.sink import LocalSendBackSink, LocalSink


def refusal(**given):
    with pytest.raises(OptionError) as caught:
        parse_sink_options(given)
    return str(caught.value)


def test_parse_sink_options_gives_omitted_options_their_defaults() -> None:
    options = parse_sink_options({"path": "/data/store"})
    assert options == SinkOptions(StoreDirectory("/data/store"))
    assert (options.queue_count, options.create_topic, options.flush) == (4, True, "sync")
    assert (options.compression, options.compress_over_bytes) == ("none", 4096)
    assert (options.lock_timeout_ms, options.staging_retention_ms) == (60_000, 86_400_000)
    assert not options.allow_network_store


EVERY_OPTION = {
    "path": "file:///data/store",
    "commitLogPath": "/a,/b",
    "topic": "orders",
    "queues": "8",
    "createTopic": "false",
    "flush": "async",
    "compression": "ZSTD",
    "compressOver": "16k",
    "delivery": "EXACTLYONCE",
    "onBatchConflict": "skip",
    "onBatchGap": "continue",
    "stagingRetention": "6h",
    "lockTimeout": "10m",
    "txnAppId": "billing",
    "txnVersion": "0",
    "allowNetworkStore": "true",
}
OF_SEND = ("topic", "queues", "createTopic", "compression", "compressOver")
SEND_BACK = {
    "mode": "SENDBACK",
    "consumerGroup": "billing",
    "maxReconsumeTimes": "0",
    "expiredOriginal": "resend",
}


def test_parse_sink_options_puts_each_option_into_its_field() -> None:
    of_clusters = {option.name for option in SINK_OPTIONS if option.needs is Capability.NAME_SERVERS}
    assert {*EVERY_OPTION, *SEND_BACK, *of_clusters} == {option.name for option in SINK_OPTIONS}
    options = parse_sink_options(EVERY_OPTION)
    assert options == SinkOptions(
        StoreDirectory("/data/store", "/a,/b"),
        topic="orders",
        queue_count=8,
        create_topic=False,
        flush="async",
        compression="zstd",
        compress_over_bytes=16 << 10,
        on_batch_conflict="skip",
        on_batch_gap="continue",
        staging_retention_ms=6 * 3_600_000,
        lock_timeout_ms=600_000,
        txn_app_id="billing",
        txn_version=0,
        allow_network_store=True,
    )
    assert pickle.loads(pickle.dumps(options)) == options


def test_sink_has_every_option_of_send() -> None:
    commit = CommitTerms("skip", "continue", True, "async", 6 * 3_600_000, 600_000, True)
    sink = parse_sink_options(EVERY_OPTION).sink()
    assert sink == LocalSink(
        StoreDirectory("/data/store", "/a,/b"), SinkTerms("orders", 8, False, "zstd", 16 << 10), commit
    )
    assert pickle.loads(pickle.dumps(sink)) == sink


def test_sink_has_every_option_of_sendBack() -> None:
    others = {name: text for name, text in EVERY_OPTION.items() if name not in OF_SEND}
    options = parse_sink_options(others | SEND_BACK)
    commit = CommitTerms("skip", "continue", True, "async", 6 * 3_600_000, 600_000, True)
    assert options.sink() == LocalSendBackSink(
        StoreDirectory("/data/store", "/a,/b"), SendBackTerms("billing", 0, "resend"), commit
    )
    assert pickle.loads(pickle.dumps(options)) == options
    assert parse_sink_options({"mode": "sendBack", "consumerGroup": "billing"}).max_reconsume_times is None


@pytest.mark.parametrize("name", OF_SEND)
def test_sendBack_refuses_options_of_send(name: str) -> None:
    message = refusal(**(SEND_BACK | {name: EVERY_OPTION[name]}))
    assert message == (
        f"{name} has no effect with mode=sendBack: failed messages go unchanged to the retry topic of their group. "
        f"Leave {name} out."
    )


@pytest.mark.parametrize("name", ["consumerGroup", "maxReconsumeTimes", "expiredOriginal"])
def test_send_refuses_options_of_sendBack(name: str) -> None:
    assert f"{name} requires mode=sendBack" in refusal(**{name: SEND_BACK[name]})


def test_sendBack_requires_consumerGroup() -> None:
    assert "mode=sendBack requires consumerGroup" in refusal(mode="sendBack")
    assert "is the name of a topic of the group 'billing'" in refusal(mode="sendBack", consumerGroup="%DLQ%billing")


def test_sink_has_the_defaults_of_the_contract() -> None:
    assert parse_sink_options({"path": "/x"}).sink() == LocalSink(StoreDirectory("/x"), SinkTerms(), CommitTerms())
    with pytest.raises(OptionError, match="path or nameServer is required"):
        parse_sink_options({}).sink()


def test_parse_sink_options_accepts_any_case_and_ignores_options_of_spark() -> None:
    given = {"PATH": "/x", "createtopic": "FALSE", "checkpointLocation": "/c", "queryName": "q", "outputMode": "append"}
    assert parse_sink_options(given) == SinkOptions(StoreDirectory("/x"), create_topic=False)


def test_parse_sink_options_refuses_asynchronous_progress_tracking() -> None:
    for given in ({}, {"mode": "sendBack", "consumerGroup": "billing"}):
        message = refusal(path="/x", **given, asyncprogresstrackingenabled="TRUE")
        assert message.startswith("asyncProgressTrackingEnabled=true would lose or repeat messages: ")
        assert message.endswith("Leave asyncProgressTrackingEnabled out.")


def test_parse_sink_options_ignores_asynchronous_progress_tracking_that_is_off() -> None:
    given = {"path": "/x", "asyncProgressTrackingEnabled": "false", "asyncProgressTrackingCheckpointIntervalMs": "9"}
    assert parse_sink_options(given) == SinkOptions(StoreDirectory("/x"))


def test_parse_sink_options_answers_an_unknown_name_with_the_nearest() -> None:
    message = refusal(path="/x", compresion="zlib")
    assert message == 'unknown option "compresion". Did you mean compression? docs/OPTIONS.md lists all options.'


@pytest.mark.parametrize("name", ["delayLevel", "deliverTimestamp"])
def test_parse_sink_options_refuses_names_of_columns(name) -> None:
    assert f'unknown option "{name}"' in refusal(path="/x", **{name: "1"})


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("subscribe", "Give the topic to write to as the option topic"),
        ("startingOffsets", "It is for reading. Leave it out."),
        ("maxOffsetsPerTrigger", "It is for reading. Leave it out."),
        ("columns", "Choose columns with select()"),
    ],
)
def test_parse_sink_options_recognises_an_option_of_the_source(name, remedy) -> None:
    message = refusal(path="/x", **{name: "x"})
    assert f'unknown option "{name}". ' in message
    assert remedy in message
    assert "Did you mean" not in message


# Options without which another one is refused.
PARTNERS = {
    "txnAppId": {"txnVersion": "1"},
    "txnVersion": {"txnAppId": "a"},
    "tlsCertFile": {"tlsKeyFile": "/key"},
    "tlsKeyFile": {"tlsCertFile": "/certificate"},
}


@pytest.mark.parametrize("option", SINK_OPTIONS, ids=lambda option: option.name)
def test_parse_sink_options_accepts_each_example_and_refuses_each_empty_text(option) -> None:
    partner = PARTNERS.get(option.name, {})
    if option.name in SEND_BACK:
        partner = {"mode": "sendBack", "consumerGroup": "billing"}
        partner.pop(option.name, None)
    parse_sink_options(partner | {option.name: option.example})
    shown = "…" if option.is_secret else ""
    assert f'{option.name}="{shown}"' in refusal(**{option.name: ""})


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("queues", "0", f"expected an integer from 1 to {QUEUES_MAX}."),
        ("queues", str(QUEUES_MAX + 1), f"expected an integer from 1 to {QUEUES_MAX}."),
        ("topic", "a/b", "found the topic name"),
        ("topic", "orders,payments", "found the topic name"),
        ("flush", "fsync", "expected one of: sync, async."),
        ("compression", "gzip", "expected one of: none, zlib, lz4, zstd."),
        ("compressOver", "0", "expected a size ≥ 1 byte"),
        ("onBatchConflict", "overwrite", "expected one of: fail, skip."),
        ("onBatchGap", "skip", "expected one of: fail, continue."),
        ("lockTimeout", "0s", "expected a duration ≥ 1ms"),
        ("stagingRetention", "day", "expected a duration ≥ 1ms"),
        ("delivery", "atMostOnce", "expected one of: exactlyOnce, atLeastOnce."),
        ("txnVersion", "-1", "expected an integer from 0 to 9223372036854775806."),
        ("txnVersion", "9223372036854775807", "expected an integer from 0 to 9223372036854775806."),
        ("createTopic", "yes", "expected one of: true, false."),
        ("path", "s3://bucket/store", "found the scheme s3:"),
        ("path", "localhost:9876", "found the address of a name server; expected a path."),
        ("path", "ns1:9876;ns2:9876", "found the address of a name server; expected a path."),
    ],
)
def test_parse_sink_options_shows_the_value_the_expectation_and_an_example(name, text, part) -> None:
    message = refusal(**{name: text})
    assert message.startswith(f'{name}="{text}": ')
    assert part in message
    assert f"Example: {name}=" in message


@pytest.mark.parametrize(("given", "missing"), [("txnAppId", "txnVersion"), ("txnVersion", "txnAppId")])
def test_txnAppId_and_txnVersion_require_each_other(given, missing) -> None:
    message = refusal(path="/x", **{given: "1"})
    assert f"{given} is given without {missing}" in message
    assert '.option("txnVersion", batch_id)' in message


def test_check_stream_refuses_txnAppId() -> None:
    options = parse_sink_options({"path": "/x", "txnAppId": "a", "txnVersion": "1"})
    with pytest.raises(OptionError, match="txnAppId and txnVersion work in batch writes only"):
        options.check_stream()
    parse_sink_options({"path": "/x"}).check_stream()


def test_check_complete_requires_a_place() -> None:
    with pytest.raises(OptionError, match="path or nameServer is required"):
        parse_sink_options({}).check_complete()
    assert parse_sink_options({"path": "/x"}).check_complete() == StoreDirectory("/x")


def test_parse_sink_options_refuses_a_catalog_table_and_several_paths() -> None:
    assert "a table in Spark's catalog" in refusal(provider="rmq", path="/x")
    assert "found 2 paths" in refusal(paths='["/a", "/b"]')
    assert parse_sink_options({"paths": '["/a"]'}).location == StoreDirectory("/a")


@pytest.mark.parametrize(
    ("given", "reads"),
    [
        ({"path": "/x", "subscribe": "a"}, True),
        ({"subscribePattern": "a"}, True),
        ({"ASSIGN": "{}", "startingoffsets": "latest"}, True),
        ({"path": "/x"}, False),
        ({"path": "/x", "topic": "a"}, False),
        ({"path": "/x", "startingOffsets": "latest"}, False),
        ({"path": "/x", "subscribe": "a", "queues": "8"}, False),
        ({"path": "/x", "subscribe": "a", "topic": "a"}, False),
    ],
)
def test_looks_like_reading_needs_a_subscription_and_no_option_of_a_write(given, reads) -> None:
    assert looks_like_reading(given) is reads
