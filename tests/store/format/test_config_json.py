"""Config files of brokers: decoded, and encoded without loss."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rmq_spark.store.format.config_json import (
    PERM_INHERIT,
    PERM_PRIORITY,
    PERM_READ,
    PERM_WRITE,
    ConsumerOffsets,
    DataVersion,
    DelayOffsets,
    GroupConfig,
    GroupsFile,
    TopicConfig,
    TopicsFile,
    decode_consumer_offsets,
    decode_delay_offsets,
    decode_groups_file,
    decode_topics_file,
    encode_consumer_offsets,
    encode_delay_offsets,
    encode_groups_file,
    encode_topics_file,
    offset_key,
)

BROKERS = ["demo", "broker497", "livekill533"]
TOPICS = b"""{"dataVersion":{"counter":3,"stateVersion":1,"timestamp":9},"future":[1],"topicConfigTable":{"T":{
"attributes":{"queue.type":"batchcq"},"order":true,"perm":2,"readQueueNums":3,"topicFilterType":"MULTI_TAG",
"topicName":"T","topicSysFlag":1,"writeQueueNums":"5","more":{"x":1}}}}"""


def test_decode_topics_file_reads_all_fields() -> None:
    file = decode_topics_file(TOPICS)
    assert file.data_version == DataVersion(1, 3, 9)
    assert file.unknown == {"future": [1]}
    assert file.topics == {
        "T": TopicConfig("T", 3, 5, 2, True, "MULTI_TAG", 1, {"queue.type": "batchcq"}, {"more": {"x": 1}})
    }
    assert file.topics["T"].is_batch_queue
    assert TopicConfig("T", attributes={"queue.type": "BatchCQ"}).is_batch_queue
    assert not TopicConfig("T", attributes={"queue.type": "SimpleCQ"}).is_batch_queue


def test_encode_topics_file_keeps_unknown_fields() -> None:
    file = decode_topics_file(TOPICS)
    assert decode_topics_file(encode_topics_file(file)) == file


@pytest.mark.parametrize("store", BROKERS)
def test_encode_topics_file_restores_golden_files(golden: Path, store: str) -> None:
    data = (golden / store / "config/topics.json").read_bytes()
    file = decode_topics_file(data)
    assert file.topics["SCHEDULE_TOPIC_XXXX"].read_queue_count == 18
    assert file.topics["SCHEDULE_TOPIC_XXXX"].perm == 6
    assert not file.topics["SCHEDULE_TOPIC_XXXX"].is_batch_queue
    again = json.loads(encode_topics_file(file))
    for name, config in json.loads(data)["topicConfigTable"].items():
        assert {**config, "attributes": config.get("attributes", {})} == again["topicConfigTable"][name]


@pytest.mark.parametrize("store", ["demo", "broker497", "json"])
def test_encode_groups_file_restores_golden_files(golden: Path, store: str) -> None:
    path = golden / store / ("subscriptionGroup.json" if store == "json" else "config/subscriptionGroup.json")
    file = decode_groups_file(path.read_bytes())
    config = file.groups["TOOLS_CONSUMER"]
    assert (config.retry_queue_count, config.retry_max_times, config.consume_enable) == (1, 16, True)
    again = json.loads(encode_groups_file(file))
    for name, config_there in json.loads(path.read_bytes())["subscriptionGroupTable"].items():
        assert config_there.items() <= again["subscriptionGroupTable"][name].items()
    assert decode_groups_file(encode_groups_file(file)).unknown == file.unknown


def test_encode_consumer_offsets_restores_golden_files(golden: Path) -> None:
    data = (golden / "json/consumerOffset.json").read_bytes()
    file = decode_consumer_offsets(data)
    assert file.of("TopicA", "GroupA") == {0: 13, 1: 34}
    assert file.of("%RETRY%GroupB", "GroupB") == {0: 5}
    assert file.of("TopicA", "GroupB") == {}
    assert file.unknown == {}
    assert encode_consumer_offsets(file, bare_numbers=True) == data
    assert decode_consumer_offsets(encode_consumer_offsets(file)) == file
    json.loads(encode_consumer_offsets(file))


@pytest.mark.parametrize("store", BROKERS)
def test_decode_consumer_offsets_reads_golden_files(golden: Path, store: str) -> None:
    offsets = decode_consumer_offsets((golden / store / "config/consumerOffset.json").read_bytes())
    assert all("@" in key for key in offsets.offsets)
    assert decode_consumer_offsets(encode_consumer_offsets(offsets)) == offsets
    delays = decode_delay_offsets((golden / store / "config/delayOffset.json").read_bytes())
    assert set(delays.offsets) <= set(range(1, 19))
    assert decode_delay_offsets(encode_delay_offsets(delays)) == delays


def test_encode_consumer_offsets_adds_no_version_to_a_file_of_4_9() -> None:
    assert encode_delay_offsets(DelayOffsets({3: 2, 1: 5}), bare_numbers=True) == b'{\n\t"offsetTable":{1:5,3:2\n\t}\n}'
    text = encode_consumer_offsets(ConsumerOffsets({offset_key("T", "G"): {0: 1}}))
    assert json.loads(text) == {"offsetTable": {"T@G": {"0": 1}}}


@pytest.mark.parametrize("data", [b"{}", b'{"topicConfigTable":null}', b'{"topicConfigTable":{}}', b"null"])
def test_decode_topics_file_without_a_table_has_no_topics(data: bytes) -> None:
    assert decode_topics_file(data).topics == {}


def test_decode_topics_file_uses_defaults_for_missing_and_null_fields() -> None:
    topics = decode_topics_file(b'{"topicConfigTable":{"T":{"perm":null,"attributes":null},"U":null}}').topics
    assert topics == {"T": TopicConfig("T"), "U": TopicConfig("U")}
    assert (topics["T"].read_queue_count, topics["T"].perm) == (16, 6)
    groups = decode_groups_file(b'{"subscriptionGroupTable":{"G":{}}}').groups
    assert groups == {"G": GroupConfig("G")}


@pytest.mark.parametrize(
    ("decode", "data", "what"),
    [
        (decode_topics_file, b"[]", "the file: expected an object"),
        (decode_topics_file, b'{"topicConfigTable":[]}', "topicConfigTable: expected an object"),
        (decode_topics_file, b'{"topicConfigTable":{"T":3}}', r"topicConfigTable\.T: expected an object, found 3"),
        (decode_topics_file, b'{"topicConfigTable":{"T":{"perm":"x"}}}', r"T\.perm: expected a whole number, found 'x"),
        (decode_topics_file, b'{"topicConfigTable":{"T":{"perm":true}}}', r"T\.perm: expected a whole number"),
        (decode_topics_file, b'{"topicConfigTable":{"T":{"perm":9223372036854775808}}}', "whole number, found 9"),
        (decode_topics_file, b'{"topicConfigTable":{"T":{"order":1}}}', r"T\.order: expected true or false, found 1"),
        (decode_topics_file, b'{"topicConfigTable":{"T":{"topicFilterType":1}}}', "expected a string"),
        (decode_topics_file, b'{"dataVersion":7}', "dataVersion: expected an object"),
        (decode_topics_file, b"\xff", "codec can't decode"),
        (decode_topics_file, b"", "character 0"),
        (decode_consumer_offsets, b'{"offsetTable":{"T@G":{"x":1}}}', r"a key of offsetTable\.T@G: expected a whole"),
        (decode_consumer_offsets, b'{"offsetTable":{"T@G":{0:1.5}}}', r"offsetTable\.T@G\.0: expected a whole number"),
        (decode_delay_offsets, b'{"offsetTable":{1:true}}', r"offsetTable\.1: expected a whole number, found True"),
        (decode_delay_offsets, b'{"offsetTable":7}', "offsetTable: expected an object"),
        (decode_groups_file, b'{"subscriptionGroupTable":{"G":[]}}', "expected an object"),
    ],
)  # fmt: skip
def test_decoders_refuse_other_files_with_the_json_path(decode: Any, data: bytes, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        decode(data)


def test_decoders_refuse_a_file_cut_anywhere() -> None:
    for size in range(len(TOPICS)):
        with pytest.raises(ValueError, match="character"):
            decode_topics_file(TOPICS[:size])
    with pytest.raises(ValueError, match="nothing after the value"):
        decode_topics_file(TOPICS + TOPICS)


def test_encoders_write_new_files() -> None:
    topics = TopicsFile({"T": TopicConfig("T", 4, 4)}, DataVersion(0, 1, 2))
    assert decode_topics_file(encode_topics_file(topics)) == topics
    groups = GroupsFile({"G": GroupConfig("G", retry_max_times=3)})
    assert decode_groups_file(encode_groups_file(groups)) == groups


def test_decode_groups_file_reads_all_fields() -> None:
    # No value is RocketMQ's default, and all values of one type differ, except booleans.
    names = {
        "consumeBroadcastEnable": False, "consumeEnable": False, "consumeFromMinEnable": False,
        "consumeMessageOrderly": True, "notifyConsumerIdsChangedEnable": False, "brokerId": 7, "retryMaxTimes": 5,
        "retryQueueNums": 3, "whichBrokerWhenConsumeSlowly": 9,
    }  # fmt: skip
    group = GroupConfig("g", False, False, False, True, 3, 5, 7, 9, False, {"more": 1})
    whole = {
        "dataVersion": {"counter": 3, "stateVersion": 1, "timestamp": 9},
        "future": [1],
        "subscriptionGroupTable": {"g": {**names, "groupName": "other", "more": 1}},
    }
    file = decode_groups_file(json.dumps(whole).encode())
    assert file == GroupsFile({"g": group}, DataVersion(1, 3, 9), {"future": [1]})
    whole["subscriptionGroupTable"]["g"]["groupName"] = "g"  # type: ignore[index]
    assert json.loads(encode_groups_file(file)) == whole


@pytest.mark.parametrize("field", [
    "consume_enable", "consume_from_min_enable", "consume_broadcast_enable", "consume_message_orderly",
    "notify_consumer_ids_changed_enable",
])  # fmt: skip
def test_encode_groups_file_writes_each_switch_under_its_name(field: str) -> None:
    usual = GroupConfig("g")
    turned = replace(usual, **{field: not getattr(usual, field)})  # type: ignore[arg-type]
    word = field.replace("_", "").lower()
    table = json.loads(encode_groups_file(GroupsFile({"g": turned})))["subscriptionGroupTable"]["g"]
    before = json.loads(encode_groups_file(GroupsFile({"g": usual})))["subscriptionGroupTable"]["g"]
    assert [name.lower() for name in table if table[name] != before[name]] == [word]
    assert decode_groups_file(encode_groups_file(GroupsFile({"g": turned}))).groups["g"] == turned


def test_decode_consumer_offsets_and_delay_offsets_read_all_fields() -> None:
    version = {"counter": 3, "stateVersion": 1, "timestamp": 9}
    whole = {"dataVersion": version, "future": [1], "groupTopicMap": {"g": ["T"]}, "offsetTable": {"T@g": {"0": 5}}}
    offsets = decode_consumer_offsets(json.dumps(whole).encode())
    assert offsets == ConsumerOffsets({"T@g": {0: 5}}, DataVersion(1, 3, 9), {"future": [1]})
    assert json.loads(encode_consumer_offsets(offsets)) == whole
    del whole["groupTopicMap"]
    whole["offsetTable"] = {"1": 7}
    delays = decode_delay_offsets(json.dumps(whole).encode())
    assert delays == DelayOffsets({1: 7}, DataVersion(1, 3, 9), {"future": [1]})
    assert json.loads(encode_delay_offsets(delays)) == whole


def test_perm_constants_are_rocketmqs_bits() -> None:
    assert (PERM_PRIORITY, PERM_READ, PERM_WRITE, PERM_INHERIT) == (8, 4, 2, 1)  # PermName
