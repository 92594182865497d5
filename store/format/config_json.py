"""The files in `config/` with a broker's topics, consumer groups and offsets.

| file | class of the file | class of each element |
| --- | --- | --- |
| topics.json | TopicsFile | TopicConfig |
| subscriptionGroup.json | GroupsFile | GroupConfig |
| consumerOffset.json | ConsumerOffsets | |
| delayOffset.json | DelayOffsets | |

Decoders keep the fields that they do not know in `unknown`, and encoders write these fields again. Decoders raise
ValueError if the content is invalid, for example if the file was only partly written. The error contains the path of
the wrong field inside the JSON, and the caller adds the name of the file.
Source: TopicConfigSerializeWrapper, SubscriptionGroupWrapper, ConsumerOffsetManager, DelayOffsetSerializeWrapper,
DataVersion, PermName (4.9, 5.3).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rmq_spark.store.format import fastjson

PERM_PRIORITY = 0x8
PERM_READ = 0x4
PERM_WRITE = 0x2
PERM_INHERIT = 0x1  # the topic is a template for topics that a broker creates when a message is sent to them

QUEUE_TYPE = "queue.type"
BATCH_QUEUE_TYPE = "BatchCQ"


@dataclass(frozen=True, slots=True)
class DataVersion:
    """The version of a file's content. Brokers compare versions field by field, in this order. `timestamp` is in ms."""

    state_version: int = 0
    counter: int = 0
    timestamp: int = 0


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """One topic. Its queue ids are from 0 to the greater one of the two queue counts, minus 1.

    `perm` is a sum of the constants PERM_*.
    """

    name: str
    read_queue_count: int = 16
    write_queue_count: int = 16
    perm: int = PERM_READ | PERM_WRITE
    order: bool = False
    topic_filter_type: str = "SINGLE_TAG"
    topic_sys_flag: int = 0
    attributes: Mapping[str, str] = field(default_factory=dict)
    unknown: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_batch_queue(self) -> bool:
        """Return whether the topic's queues are batch consume queues (QueueTypeUtils#getCQType, 5.3)."""
        return self.attributes.get(QUEUE_TYPE, "").lower() == BATCH_QUEUE_TYPE.lower()


@dataclass(frozen=True, slots=True)
class TopicsFile:
    """The content of topics.json. `topics` maps names of topics to their settings."""

    topics: Mapping[str, TopicConfig] = field(default_factory=dict)
    data_version: DataVersion | None = None
    unknown: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """The settings of one consumer group."""

    name: str
    consume_enable: bool = True
    consume_from_min_enable: bool = True
    consume_broadcast_enable: bool = True
    consume_message_orderly: bool = False
    retry_queue_count: int = 1
    retry_max_times: int = 16
    broker_id: int = 0
    which_broker_when_consume_slowly: int = 1
    notify_consumer_ids_changed_enable: bool = True
    unknown: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GroupsFile:
    """The content of subscriptionGroup.json. `groups` maps names of consumer groups to their settings."""

    groups: Mapping[str, GroupConfig] = field(default_factory=dict)
    data_version: DataVersion | None = None
    unknown: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ConsumerOffsets:
    """The content of consumerOffset.json.

    `offsets` maps `topic@group` to a table, which maps each queue id to the next queue offset to consume.
    """

    offsets: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    data_version: DataVersion | None = None
    unknown: Mapping[str, Any] = field(default_factory=dict)

    def of(self, topic: str, group: str) -> Mapping[int, int]:
        """Return the next queue offset that the group will consume in each queue of the topic, by queue id.

        Returns {} if the file has no offsets of this group in this topic.
        """
        return self.offsets.get(offset_key(topic, group), {})


@dataclass(frozen=True, slots=True)
class DelayOffsets:
    """The content of delayOffset.json.

    `offsets` maps each delay level (queue id + 1) to the next queue offset to deliver.
    """

    offsets: Mapping[int, int] = field(default_factory=dict)
    data_version: DataVersion | None = None
    unknown: Mapping[str, Any] = field(default_factory=dict)


def offset_key(topic: str, group: str) -> str:
    """Return the key in `ConsumerOffsets.offsets` for a group's offsets in a topic.

    Source: ConsumerOffsetManager#commitOffset.
    """
    return f"{topic}@{group}"


# Name in JSON -> our name, for fields that are copied unchanged. A value must have the type of our default value.
_TOPIC_FIELDS = {
    "readQueueNums": "read_queue_count",
    "writeQueueNums": "write_queue_count",
    "perm": "perm",
    "order": "order",
    "topicFilterType": "topic_filter_type",
    "topicSysFlag": "topic_sys_flag",
}
_GROUP_FIELDS = {
    "consumeEnable": "consume_enable",
    "consumeFromMinEnable": "consume_from_min_enable",
    "consumeBroadcastEnable": "consume_broadcast_enable",
    "consumeMessageOrderly": "consume_message_orderly",
    "retryQueueNums": "retry_queue_count",
    "retryMaxTimes": "retry_max_times",
    "brokerId": "broker_id",
    "whichBrokerWhenConsumeSlowly": "which_broker_when_consume_slowly",
    "notifyConsumerIdsChangedEnable": "notify_consumer_ids_changed_enable",
}
_VERSION_FIELDS = {"stateVersion": "state_version", "counter": "counter", "timestamp": "timestamp"}


def decode_topics_file(data: bytes) -> TopicsFile:
    """Decode the content of topics.json. Raises ValueError if it is invalid."""
    table, version, unknown = _read_file(data, "topicConfigTable")
    topics = {}
    for name, value in table.items():
        where = f"topicConfigTable.{name}"
        config = _as_object(value, where)
        known = _known_fields(config, _TOPIC_FIELDS, TopicConfig(""), where)
        attributes = _as_object(config.get("attributes"), f"{where}.attributes")
        rest = _rest(config, {*_TOPIC_FIELDS, "attributes", "topicName"})
        texts = {key: str(text) for key, text in attributes.items() if text is not None}
        topics[name] = TopicConfig(name, attributes=texts, unknown=rest, **known)
    return TopicsFile(topics, version, unknown)


def encode_topics_file(file: TopicsFile) -> bytes:
    """Return the content of topics.json in the format of 5.x. Brokers of 4.9 can read it, and ignore the attributes."""
    table = {
        name: {
            **config.unknown,
            **{theirs: getattr(config, ours) for theirs, ours in _TOPIC_FIELDS.items()},
            "topicName": config.name,
            "attributes": config.attributes,
        }
        for name, config in file.topics.items()
    }
    return _write_file("topicConfigTable", table, file.data_version, file.unknown)


def decode_groups_file(data: bytes) -> GroupsFile:
    """Decode the content of subscriptionGroup.json. Raises ValueError if it is invalid."""
    table, version, unknown = _read_file(data, "subscriptionGroupTable")
    groups = {}
    for name, value in table.items():
        where = f"subscriptionGroupTable.{name}"
        config = _as_object(value, where)
        known = _known_fields(config, _GROUP_FIELDS, GroupConfig(""), where)
        groups[name] = GroupConfig(name, unknown=_rest(config, {*_GROUP_FIELDS, "groupName"}), **known)
    return GroupsFile(groups, version, unknown)


def encode_groups_file(file: GroupsFile) -> bytes:
    """Return the content of subscriptionGroup.json."""
    table = {
        name: {
            **config.unknown,
            **{theirs: getattr(config, ours) for theirs, ours in _GROUP_FIELDS.items()},
            "groupName": config.name,
        }
        for name, config in file.groups.items()
    }
    return _write_file("subscriptionGroupTable", table, file.data_version, file.unknown)


def decode_consumer_offsets(data: bytes) -> ConsumerOffsets:
    """Decode the content of consumerOffset.json. Raises ValueError if it is invalid."""
    table, version, unknown = _read_file(data, "offsetTable")
    offsets = {key: _as_numbers(value, f"offsetTable.{key}") for key, value in table.items()}
    return ConsumerOffsets(offsets, version, _rest(unknown, {"groupTopicMap"}))


def encode_consumer_offsets(file: ConsumerOffsets, *, bare_numbers: bool = False) -> bytes:
    """Return the content of consumerOffset.json.

    If `bare_numbers` is True, queue ids have no quotes, as fastjson writes them. Brokers can read both forms. If `file`
    has a data version, `groupTopicMap` is written too, because brokers of 5.x write it. They never read it.
    """
    unknown = dict(file.unknown)
    if file.data_version is not None:
        topics: dict[str, list[str]] = {}
        for key in sorted(file.offsets):
            topic, separator, group = key.partition("@")
            if separator:
                topics.setdefault(group, []).append(topic)
        unknown["groupTopicMap"] = topics
    return _write_file("offsetTable", file.offsets, file.data_version, unknown, bare_numbers)


def decode_delay_offsets(data: bytes) -> DelayOffsets:
    """Decode the content of delayOffset.json. Raises ValueError if it is invalid."""
    table, version, unknown = _read_file(data, "offsetTable")
    return DelayOffsets(_as_numbers(table, "offsetTable"), version, unknown)


def encode_delay_offsets(file: DelayOffsets, *, bare_numbers: bool = False) -> bytes:
    """Return the content of delayOffset.json. If `bare_numbers` is True, levels have no quotes, as fastjson writes."""
    return _write_file("offsetTable", file.offsets, file.data_version, file.unknown, bare_numbers)


def _read_file(data: bytes, table_name: str) -> tuple[dict[str, Any], DataVersion | None, dict[str, Any]]:
    """Return the table `table_name` of a file, its data version (None if it has none), and all other fields."""
    whole = _as_object(fastjson.parse(data.decode()), "the file")
    table = _as_object(whole.get(table_name), table_name)
    version = None
    if whole.get("dataVersion") is not None:
        fields = _as_object(whole["dataVersion"], "dataVersion")
        version = DataVersion(**_known_fields(fields, _VERSION_FIELDS, DataVersion(), "dataVersion"))
    return table, version, _rest(whole, {table_name, "dataVersion"})


def _write_file(
    table_name: str,
    table: Mapping[Any, Any],
    version: DataVersion | None,
    unknown: Mapping[str, Any],
    bare_numbers: bool = False,
) -> bytes:
    whole = {**unknown, table_name: table}
    if version is not None:
        whole["dataVersion"] = {theirs: getattr(version, ours) for theirs, ours in _VERSION_FIELDS.items()}
    return fastjson.write(whole, bare_numbers=bare_numbers).encode()


def _known_fields(config: Mapping[str, Any], names: Mapping[str, str], defaults: Any, where: str) -> dict[str, Any]:
    """Return the values of the known fields, by our names. A field that is missing or null is omitted.

    `names` maps names in JSON to our names. Raises ValueError if a value does not have the type of its default.
    """
    known = {}
    for theirs, ours in names.items():
        value = config.get(theirs)
        if value is None:
            continue
        kind = type(getattr(defaults, ours))
        known[ours] = _as_number(value, f"{where}.{theirs}") if kind is int else value
        if type(known[ours]) is not kind:
            raise ValueError(f"{where}.{theirs}: expected {_KINDS[kind]}, found {value!r}")
    return known


_KINDS = {int: "a whole number", bool: "true or false", str: "a string"}


def _rest(config: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in known}


def _as_object(value: Any, where: str) -> dict[str, Any]:
    """Return `value` if it is an object, or {} if it is null. Raises ValueError if it is anything else."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected an object, found {_shown(value)}")
    return value


def _as_numbers(value: Any, where: str) -> dict[int, int]:
    """Return an object whose keys and values are integers. Fields that are null are omitted.

    Raises ValueError if `value` is not an object, or if a key or value is not an integer.
    """
    numbers = _as_object(value, where)
    return {
        _as_number(key, f"a key of {where}"): _as_number(number, f"{where}.{key}")
        for key, number in numbers.items()
        if number is not None
    }


def _as_number(value: Any, where: str) -> int:
    """Return an integer of 64 bits. It may be in quotes, as fastjson accepts this too.

    Raises ValueError if `value` is anything else.
    """
    if isinstance(value, str) and len(value) <= 20 and value.isascii() and value.removeprefix("-").isdigit():
        value = int(value)
    if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{where}: expected a whole number, found {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
