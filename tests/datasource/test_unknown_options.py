"""unknown_options: whose option it is, which of ours does the same, and which names are similar."""

import re

import pytest
from support.parsed_options import parse_options

from rmq_spark.datasource.options.option_table import OPTIONS, SINK_OPTIONS, index_options
from rmq_spark.datasource.options.unknown_options import _BY_NAME, describe_unknown
from rmq_spark.datasource.options.write_options import parse_sink_options
from rmq_spark.store.errors import OptionError
from rmq_spark.store.places import locate

KNOWN = {"subscribe": "subscribe", "startingoffsets": "startingOffsets", "startingtimestamp": "startingTimestamp"}
KAFKA = "It is an option of Kafka's clients and of Spark's Kafka source. "


def reading(name: str) -> str:
    with pytest.raises(OptionError) as caught:
        parse_options({"path": "/x", "subscribe": "a", name: "x"}, 0)
    return str(caught.value)


def writing(name: str) -> str:
    with pytest.raises(OptionError) as caught:
        parse_sink_options({"path": "/x", "topic": "a", name: "x"}, locate)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "owner", "answer"),
    [
        ("kafka.bootstrap.servers", KAFKA, "Give path, the folder of a store, or nameServer"),
        ("bootstrap.servers", KAFKA, "Give path, the folder of a store, or nameServer"),
        ("kafka.group.id", KAFKA, "Give consumerGroup"),
        ("group.id", KAFKA, "Give consumerGroup"),
        ("includeheaders", KAFKA, "columns=topic,body,properties"),
        ("key.deserializer", KAFKA, "the column body is binary and keys are text"),
        ("kafka.value.deserializer", KAFKA, "CAST(body AS STRING)"),
        ("kafka.ssl.truststore.location", KAFKA, "Give tls=true"),
        ("kafka.fetch.min.bytes", KAFKA, "No option of ours is needed for it. Leave it out."),
        ("kafka.acks", KAFKA, "It is for writing. Leave it out."),
        ("namesrvAddr", "It is an option of RocketMQ's own clients. ", "nameServer=ns1:9876"),
        ("nameserver.address", "It is an option of RocketMQ's Flink connector. ", "nameServer=ns1:9876"),
        (
            "pull.max.speed.per.partition",
            "It is an option of the connector rocketmq-spark. ",
            "Give maxOffsetsPerQueue",
        ),
    ],
)
def test_a_foreign_option_of_a_load_is_answered_with_ours(name: str, owner: str, answer: str) -> None:
    message = reading(name)
    assert message.startswith(f'unknown option "{name}". {owner}')
    assert answer in message
    assert "Did you mean" not in message


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("kafka.bootstrap.servers", "nameServer"),
        ("value.serializer", "write the column body as STRING or BINARY"),
        ("includeHeaders", "Write them in a column properties"),
        ("acks", "Give delivery"),
        ("group.id", "A write has no group"),
        ("auto.offset.reset", "It is for reading. Leave it out."),
        ("producerGroup", "its checkpoint identifies it"),
    ],
)
def test_a_foreign_option_of_a_write_is_answered_with_ours(name: str, answer: str) -> None:
    message = writing(name)
    assert message.startswith(f'unknown option "{name}". It is an option of ')
    assert answer in message


@pytest.mark.parametrize("name", ["queues", "createTopic", "flush"])
def test_an_option_of_the_sink_is_recognised_in_a_load(name: str) -> None:
    assert reading(name) == f'unknown option "{name}". It is for writing. Leave it out.'


@pytest.mark.parametrize(
    ("name", "ours"),
    [("kafka.subscribe", "subscribe"), ("Kafka.StartingOffsets", "startingOffsets"), ("kafka.topic", "topic")],
)
def test_one_of_our_names_after_kafka_is_answered_with_the_name(name: str, ours: str) -> None:
    assert reading(name) == f'unknown option "{name}". Give {ours}, without kafka.'


def test_one_of_our_names_after_kafka_is_answered_in_a_write() -> None:
    assert writing("kafka.topic") == 'unknown option "kafka.topic". Give topic, without kafka.'


def test_no_foreign_name_is_one_of_ours() -> None:
    ours = index_options(OPTIONS).keys() | index_options(SINK_OPTIONS).keys()
    assert not ours & _BY_NAME.keys()


def test_answers_name_options_that_exist() -> None:
    ours = {name for table in (OPTIONS, SINK_OPTIONS) for option in table for name in (option.name, option.alias)}
    for _, answer in _BY_NAME.values():
        for text in filter(None, (answer.reading, answer.writing)):
            for name in re.findall(r"\b(?:Give|Add) (\w+)", text):
                assert name in ours, text


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("subscrib", "Did you mean subscribe? "),
        ("startingtop", "Did you mean startingTimestamp or startingOffsets? "),
        ("zzzz", ""),
    ],
)
def test_similar_names_are_proposed(name: str, near: str) -> None:
    text = describe_unknown(name, KNOWN, is_write=False)
    assert text == f'unknown option "{name}". {near}docs/OPTIONS.md lists all options.'
