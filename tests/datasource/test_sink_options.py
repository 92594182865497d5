"""Options of the sink: names in any case, what contradicts, and what an error says."""

import pickle

import pytest

from rmq_spark.datasource.sink_option_table import SINK_OPTIONS
from rmq_spark.datasource.sink_options import SinkOptions, looks_like_reading, parse_sink_options
from rmq_spark.datasource.sink_values import QUEUES_MAX
from rmq_spark.store import CommitOptions, OutboxSettings, SendBackSettings, SendBackTerms, SinkSettings
from rmq_spark.store.errors import OptionError


def refusal(**given):
    with pytest.raises(OptionError) as caught:
        parse_sink_options(given)
    return str(caught.value)


def test_without_options_everything_has_its_default() -> None:
    options = parse_sink_options({"path": "/data/store"})
    assert options == SinkOptions(path="/data/store")
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


def test_every_option_reaches_its_field() -> None:
    assert {*EVERY_OPTION, *SEND_BACK} == {option.name for option in SINK_OPTIONS}
    options = parse_sink_options(EVERY_OPTION)
    assert options == SinkOptions(
        path="/data/store",
        commit_log_path=("/a", "/b"),
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


def test_every_option_reaches_the_engine() -> None:
    settings = parse_sink_options(EVERY_OPTION).sink_settings()
    assert settings == SinkSettings(
        path="/data/store",
        outbox=OutboxSettings(
            commit_log_path="/a,/b", queue_count=8, creates_topics=False, compression="zstd", compress_over=16 << 10
        ),
        commit=CommitOptions(
            on_conflict="skip",
            on_gap="continue",
            is_transaction=True,
            create_topics=False,
            queue_count=8,
            flush="async",
            staging_retention_ms=6 * 3_600_000,
        ),
        lock_timeout_ms=600_000,
        allow_network_store=True,
    )


def test_every_option_of_send_back_reaches_the_engine() -> None:
    others = {name: text for name, text in EVERY_OPTION.items() if name not in OF_SEND}
    options = parse_sink_options(others | SEND_BACK)
    assert options.is_sending_back
    assert options.send_back_settings() == SendBackSettings(
        path="/data/store",
        terms=SendBackTerms("billing", 0, "resend"),
        commit_log_path="/a,/b",
        commit=CommitOptions(
            on_conflict="skip",
            on_gap="continue",
            is_transaction=True,
            flush="async",
            staging_retention_ms=6 * 3_600_000,
        ),
        lock_timeout_ms=600_000,
        allow_network_store=True,
    )
    assert pickle.loads(pickle.dumps(options)) == options
    assert parse_sink_options({"mode": "sendBack", "consumerGroup": "billing"}).max_reconsume_times is None


@pytest.mark.parametrize("name", OF_SEND)
def test_failed_messages_go_where_they_go_and_as_they_are(name: str) -> None:
    message = refusal(**(SEND_BACK | {name: EVERY_OPTION[name]}))
    assert message == (
        f"{name} means nothing with mode=sendBack: failed messages go where their group's retries go, and as they are. "
        f"Leave {name} out."
    )


@pytest.mark.parametrize("name", ["consumerGroup", "maxReconsumeTimes", "expiredOriginal"])
def test_new_messages_have_no_group_that_failed(name: str) -> None:
    assert f"{name} is about messages that go back to the group" in refusal(**{name: SEND_BACK[name]})


def test_who_sends_back_says_which_group_failed() -> None:
    assert "mode=sendBack needs consumerGroup" in refusal(mode="sendBack")
    assert "is the name of a topic of the group 'billing'" in refusal(mode="sendBack", consumerGroup="%DLQ%billing")


def test_the_sinks_defaults_are_the_engines_but_that_it_waits_for_the_disk() -> None:
    settings = parse_sink_options({"path": "/data/store"}).sink_settings()
    assert settings == SinkSettings("/data/store")
    assert settings.commit.flush == "sync"
    with pytest.raises(OptionError, match="path is required"):
        parse_sink_options({}).sink_settings()


def test_names_do_not_depend_on_case_and_sparks_own_are_passed_over() -> None:
    given = {"PATH": "/x", "createtopic": "FALSE", "checkpointLocation": "/c", "queryName": "q", "outputMode": "append"}
    assert parse_sink_options(given) == SinkOptions(path="/x", create_topic=False)


def test_an_unknown_option_is_answered_with_the_nearest_and_all() -> None:
    message = refusal(path="/x", compresion="zlib")
    assert 'unknown option "compresion". Did you mean compression?' in message
    assert all(option.name in message for option in SINK_OPTIONS)


@pytest.mark.parametrize("name", ["delayLevel", "deliverTimestamp"])
def test_what_does_not_exist_yet_is_unknown(name) -> None:
    assert f'unknown option "{name}"' in refusal(path="/x", **{name: "1"})


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("subscribe", "where to write says topic"),
        ("startingOffsets", "It is for reading; leave it out."),
        ("maxOffsetsPerTrigger", "It is for reading; leave it out."),
        ("columns", "choose columns with select()"),
    ],
)
def test_an_option_of_the_source_is_named_as_such(name, remedy) -> None:
    message = refusal(path="/x", **{name: "x"})
    assert f'unknown option "{name}". ' in message
    assert remedy in message
    assert "Did you mean" not in message


@pytest.mark.parametrize("option", SINK_OPTIONS, ids=lambda option: option.name)
def test_every_example_is_accepted_and_every_empty_text_is_not(option) -> None:
    partner = {"txnAppId": {"txnVersion": "1"}, "txnVersion": {"txnAppId": "a"}}.get(option.name, {})
    if option.name in SEND_BACK:
        partner = {"mode": "sendBack", "consumerGroup": "billing"}
        partner.pop(option.name, None)
    parse_sink_options(partner | {option.name: option.example})
    assert f'{option.name}=""' in refusal(**{option.name: ""})


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("queues", "0", "is no whole number from 1 on."),
        ("queues", str(QUEUES_MAX + 1), f"Accepted: 1 to {QUEUES_MAX}."),
        ("topic", "a/b", "which no topic can be called"),
        ("topic", "orders,payments", "which no topic can be called"),
        ("flush", "fsync", "is none of: sync, async."),
        ("compression", "gzip", "is none of: none, zlib, lz4, zstd."),
        ("compressOver", "0", "is no size from 1 byte on."),
        ("onBatchConflict", "overwrite", "is none of: fail, skip."),
        ("onBatchGap", "skip", "is none of: fail, continue."),
        ("lockTimeout", "0s", "is no duration from 1 ms on."),
        ("stagingRetention", "day", "is no duration from 1 ms on."),
        ("txnVersion", "-1", "is no whole number from 0 on."),
        ("txnVersion", "9223372036854775808", "is no whole number from 0 on."),
        ("createTopic", "yes", "is none of: true, false."),
        ("path", "s3://bucket/store", "has the scheme s3:"),
    ],
)
def test_a_bad_value_is_shown_with_what_is_accepted_and_an_example(name, text, part) -> None:
    message = refusal(**{name: text})
    assert message.startswith(f'{name}="{text}" ')
    assert part in message
    assert f"Example: {name}=" in message


@pytest.mark.parametrize(("given", "missing"), [("txnAppId", "txnVersion"), ("txnVersion", "txnAppId")])
def test_half_a_transaction_is_refused(given, missing) -> None:
    message = refusal(path="/x", **{given: "1"})
    assert f"{given} is given without {missing}" in message
    assert '.option("txnVersion", batch_id)' in message


def test_a_stream_has_no_transaction_of_the_users() -> None:
    options = parse_sink_options({"path": "/x", "txnAppId": "a", "txnVersion": "1"})
    with pytest.raises(OptionError, match="txnAppId and txnVersion work in batch writes only"):
        options.check_stream()
    parse_sink_options({"path": "/x"}).check_stream()


def test_a_write_needs_a_path() -> None:
    with pytest.raises(OptionError, match="path is required"):
        parse_sink_options({}).check_complete()
    assert parse_sink_options({"path": "/x"}).check_complete() == "/x"


def test_a_table_in_the_catalog_and_several_paths_are_refused() -> None:
    assert "a table in Spark's catalog" in refusal(provider="rmq", path="/x")
    assert "2 paths were given" in refusal(paths='["/a", "/b"]')
    assert parse_sink_options({"paths": '["/a"]'}).path == "/a"


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
def test_options_look_like_reading_if_they_subscribe_and_nothing_is_only_for_writing(given, reads) -> None:
    assert looks_like_reading(given) is reads
