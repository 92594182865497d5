"""The answer to an option that the source or the sink does not have.

People bring options from Kafka's source, from RocketMQ's own clients and from other connectors. `describe_unknown` says
whose option it is, and which of ours does the same, or why none is needed. For a misspelt name it returns similar ones,
and for one of our names after `kafka.` the name itself.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

_CLEARLY_NEAR = 0.8  # the similarity from which only the nearest name is proposed, as difflib measures it
_OPTIONS_PAGE = "docs/OPTIONS.md lists all options."

_KAFKA_PREFIX = "kafka"  # of names that Spark's Kafka source passes to Kafka's clients
_KAFKA = "Kafka's clients and of Spark's Kafka source"
_CLIENTS = "RocketMQ's own clients"
_FLINK = "RocketMQ's Flink connector"
_SPARK = "the connector rocketmq-spark"


@dataclass(frozen=True, slots=True)
class _Answer:
    """What to use in place of a foreign option, in a read and in a write; None if it has no meaning there."""

    reading: str | None
    writing: str | None = None


def _both(text: str) -> _Answer:
    return _Answer(text, text)


_PLACE = _both(
    "Give path, the folder of a store, or nameServer, the name servers of a cluster (not its brokers), as in "
    "nameServer=ns1:9876."
)
_TOPIC = _Answer("Give subscribe, as in subscribe=orders.", "Give topic, as in topic=orders, or a column topic.")
_GROUP = _Answer(
    "Give consumerGroup to begin at a group's offsets and to commit to it. Without it the checkpoint has the offsets. "
    "pullGroup is the group for rights in a cluster.",
    "A write has no group. Leave it out.",
)
_PRODUCER_GROUP = _Answer(None, "A write has no producer group: its checkpoint identifies it. Leave it out.")
_DESERIALIZER = _Answer(
    "None is needed: the column body is binary and keys are text. Convert it with CAST(body AS STRING) or "
    "rmq_spark.parse."
)
_SERIALIZER = _Answer(None, "None is needed: write the column body as STRING or BINARY, and keys as STRING.")
_HEADERS = _Answer(
    "The column properties has them: add it, as in columns=topic,body,properties.",
    "Write them in a column properties, MAP<STRING, STRING>.",
)
_START = _Answer('Give startingOffsets: earliest, latest, group or JSON such as {"orders": {"0": 42}}.')
_START_TIME = _Answer("Give startingTimestamp: a time, or JSON by topic and queue.")
_END_TIME = _Answer("Give endingTimestamp: a time, or JSON by topic and queue.")
_COMMITS = _Answer(
    "The checkpoint has the offsets; with consumerGroup they are committed too (commitOffsets=off: not)."
)
_SPEED = _Answer("Give maxOffsetsPerTrigger or maxBytesPerTrigger, which limit a micro-batch.")
_SPEED_OF_QUEUE = _Answer("Give maxOffsetsPerQueue, which limits each queue in a micro-batch.")
_TIMEOUT = _both("Give requestTimeout, the time for one request to a cluster. A store needs none.")
_AWAY = _both("Give brokerDownTimeout, the time to wait for a broker of a cluster. A store needs none.")
_TLS = _both("Give tls=true, and tlsCaFile, tlsCertFile and tlsKeyFile, which are PEM files.")
_ACCOUNT = _both("Give accessKey and secretKey, or credentialsFile.")
_TAGS = _Answer("Give tags, as in tags=A || B. It filters messages before they are read.", "Write a column tags.")
_SQL = _Answer("Give sql92, as in sql92=amount > 5.")
_DURABILITY = _Answer(None, "Give delivery (exactlyOnce or atLeastOnce), and flush for a store.")
_COMPRESSION = _Answer("None is needed: bodies are decompressed.", "Give compression, as in compression=zstd.")
_RETRIES = _Answer(
    "A stream with consumerGroup reads its retry topic. The writing side is mode=sendBack.", "Spark retries tasks."
)
_NONE = _both("No option of ours is needed for it. Leave it out.")

# The answer to each foreign option, by owner. Names are compared without regard to case.
_FOREIGN: Mapping[str, Mapping[str, _Answer]] = {
    _KAFKA: {
        "bootstrap.servers": _PLACE,
        "group.id": _GROUP,
        "groupIdPrefix": _GROUP,
        "key.deserializer": _DESERIALIZER,
        "value.deserializer": _DESERIALIZER,
        "key.serializer": _SERIALIZER,
        "value.serializer": _SERIALIZER,
        "includeHeaders": _HEADERS,
        "auto.offset.reset": _START,
        "startingOffsetsByTimestamp": _START_TIME,
        "endingOffsetsByTimestamp": _END_TIME,
        "enable.auto.commit": _COMMITS,
        "max.poll.records": _SPEED,
        "kafkaConsumer.pollTimeoutMs": _Answer(
            "Give longPollingMs for idle triggers, or requestTimeout for a cluster."
        ),
        "request.timeout.ms": _TIMEOUT,
        "fetchOffset.numRetries": _AWAY,
        "fetchOffset.retryIntervalMs": _AWAY,
        "isolation.level": _Answer("None is needed: rows are committed messages, half messages are not read."),
        "interceptor.classes": _NONE,
        "compression.type": _COMPRESSION,
        "acks": _DURABILITY,
        "enable.idempotence": _DURABILITY,
        "transactional.id": _DURABILITY,
        "security.protocol": _TLS,
    },
    _CLIENTS: {
        "namesrvAddr": _PLACE,
        "NAMESRV_ADDR": _PLACE,
        "rocketmq.namesrv.addr": _PLACE,
        "rocketmq.name-server": _PLACE,
        "endpoints": _PLACE,
        "nameServers": _PLACE,
        "group": _GROUP,
        "groupName": _GROUP,
        "rocketmq.consumer.group": _GROUP,
        "producerGroup": _PRODUCER_GROUP,
        "rocketmq.producer.group": _PRODUCER_GROUP,
        "consumeFromWhere": _START,
        "consumeTimestamp": _START_TIME,
        "pullBatchSize": _SPEED,
        "pullThresholdForQueue": _SPEED_OF_QUEUE,
        "consumeMessageBatchMaxSize": _SPEED,
        "consumeThreadMin": _Answer("The threads of rmq_spark.consume are its argument; a query has tasks of Spark."),
        "consumeThreadMax": _Answer("The threads of rmq_spark.consume are its argument; a query has tasks of Spark."),
        "sendMsgTimeout": _TIMEOUT,
        "compressMsgBodyOverHowmuch": _Answer(None, "Give compressOver, with compression."),
        "instanceName": _NONE,
        "vipChannelEnabled": _NONE,
        "retryTimesWhenSendFailed": _RETRIES,
        "sql": _SQL,
        "tag": _TAGS,
    },
    _FLINK: {
        "nameserver.address": _PLACE,
        "nameServerAddress": _PLACE,
        "startMessageOffset": _START,
        "startConsumeOffset": _START,
        "scanStartupMode": _START,
        "consumer.offset.reset.to": _START,
        "startTime": _START_TIME,
        "startTimeMs": _START_TIME,
        "consumer.offset.from.timestamp": _START_TIME,
        "endTime": _END_TIME,
        "access.key": _ACCOUNT,
        "secret.key": _ACCOUNT,
        "partitionDiscoveryIntervalMs": _Answer("None is needed: a stream looks for new queues at each trigger."),
        "consumer.batch.size": _SPEED,
        "producer.group": _PRODUCER_GROUP,
        "producer.topic": _TOPIC,
        "isDynamicTag": _Answer(None, "None is needed: each row has its own tag in the column tags."),
        "dynamicTagColumn": _Answer(None, "None is needed: each row has its own tag in the column tags."),
        "keyColumns": _Answer(None, "Write the keys in a column keys, separated by blanks."),
    },
    _SPARK: {
        "nameserver.addr": _PLACE,
        "rocket.mq.name.server": _PLACE,
        "consumer.group": _GROUP,
        "consumer.topic": _TOPIC,
        "consumer.tag": _TAGS,
        "consumer.offset": _START,
        "consumer.timestamp": _START_TIME,
        "pull.max.speed.per.partition": _SPEED_OF_QUEUE,
        "pull.max.batch.size": _SPEED,
        "pull.timeout.ms": _TIMEOUT,
        "spout.messages.max.retry": _RETRIES,
    },
}
# The beginnings of names that stand for many options.
_PREFIXES: Mapping[str, _Answer] = {"ssl.": _TLS, "sasl.": _ACCOUNT}
_BY_NAME = {name.lower(): (owner, answer) for owner, names in _FOREIGN.items() for name, answer in names.items()}


def describe_unknown(name: str, known: Mapping[str, str], *, is_write: bool, hint: str | None = None) -> str:
    """Return the text of the error about an option that is not in `known` (spellings, by name in lower case).

    `hint` is a sentence about this name, if there is one. Spark gives a source the names of a load() in lower case, so
    the error cannot show them as they were written.
    """
    beginning = f'unknown option "{name}".'
    if hint is not None:
        return f"{beginning} {hint}"
    prefix, _, rest = name.lower().partition(".")
    if prefix == _KAFKA_PREFIX and rest in known:
        return f"{beginning} Give {known[rest]}, without {_KAFKA_PREFIX}."
    foreign = _describe_foreign(name.lower(), is_write=is_write)
    if foreign is not None:
        return f"{beginning} {foreign}"
    near = _find_near(name.lower(), known)
    meant = f" Did you mean {' or '.join(near)}?" if near else ""
    return f"{beginning}{meant} {_OPTIONS_PAGE}"


def _describe_foreign(name: str, *, is_write: bool) -> str | None:
    """Return whose option the name is, and what to use here; None if it is nobody's. `name` is in lower case."""
    rest = name.removeprefix(f"{_KAFKA_PREFIX}.")
    owner, answer = _BY_NAME.get(rest) or _BY_NAME.get(name) or (None, None)
    if owner is None or answer is None:
        by_prefix = next((one for prefix, one in _PREFIXES.items() if rest.startswith(prefix)), None)
        if by_prefix is None and rest == name:
            return None
        owner, answer = _KAFKA, by_prefix or _NONE
    text = answer.writing if is_write else answer.reading
    if text is None:
        text = f"It is for {'reading' if is_write else 'writing'}. Leave it out."
    return f"It is an option of {owner}. {text}"


def _find_near(name: str, known: Mapping[str, str]) -> list[str]:
    """Return the spelling of the most similar name; of the three most similar ones, if that is not very similar."""
    found = difflib.get_close_matches(name, known, 3)
    is_clear = bool(difflib.get_close_matches(name, found[:1], 1, _CLEARLY_NEAR))
    return list(dict.fromkeys(known[match] for match in (found[:1] if is_clear else found)))
