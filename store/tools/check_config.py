"""Checks of the files in `config/`. Each must be readable, and must agree with the queues of the store."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from rmq_spark.store.disk import files
from rmq_spark.store.errors import OptionError, StoreError
from rmq_spark.store.format import fastjson
from rmq_spark.store.format import file_names as filenames
from rmq_spark.store.format.config_json import (
    ConsumerOffsets,
    DelayOffsets,
    TopicConfig,
    TopicsFile,
    decode_consumer_offsets,
    decode_delay_offsets,
    decode_groups_file,
    decode_topics_file,
)
from rmq_spark.store.format.file_names import BACKUP_SUFFIX
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import MAX_QUEUES, SCHEDULE_TOPIC, check_topic_name
from rmq_spark.store.tools.finding import Action, Area, Finding, Severity

_JSON_WITHOUT_EXTENSION = {"timermetrics", "transactionMetrics"}
_CONTENTS = {
    filenames.TOPICS_JSON: "the topics and their numbers of queues",
    filenames.CONSUMER_OFFSET_JSON: "the offsets of the groups",
    filenames.SUBSCRIPTION_GROUP_JSON: "the groups",
    filenames.DELAY_OFFSET_JSON: "the offsets of the delay levels",
    filenames.COMPACTION_POSITION: "the positions of the compaction",
}
_TABLES = {
    filenames.TOPICS_JSON: "topicConfigTable",
    filenames.CONSUMER_OFFSET_JSON: "offsetTable",
    filenames.SUBSCRIPTION_GROUP_JSON: "subscriptionGroupTable",
    filenames.DELAY_OFFSET_JSON: "offsetTable",
}
_OF_BROKERS = {filenames.CONSUMER_OFFSET_JSON, filenames.SUBSCRIPTION_GROUP_JSON}
_NAME_FIELDS = {filenames.TOPICS_JSON: "topicName", filenames.SUBSCRIPTION_GROUP_JSON: "groupName"}
_RESTORE_STEP = "Restore the file from a copy, or its .bak."
_JSON = "JSON as a broker writes it"
# Returns the lowest and the next queue offset of a queue, or None if it has neither files nor records.
Bounds = Callable[[QueueKey], tuple[int, int] | None]


def decode_config(name: str, data: bytes) -> Any:
    """Decode the content of the config file `name`. Raises ValueError if the content is invalid."""
    decoders: Mapping[str, Callable[[bytes], Any]] = {
        filenames.TOPICS_JSON: decode_topics_file,
        filenames.CONSUMER_OFFSET_JSON: decode_consumer_offsets,
        filenames.SUBSCRIPTION_GROUP_JSON: decode_groups_file,
        filenames.DELAY_OFFSET_JSON: decode_delay_offsets,
    }
    whole = fastjson.parse(data.decode())
    if name not in decoders:
        return whole
    if isinstance(whole, dict) and _TABLES[name] not in whole:
        raise ValueError(f"no {_TABLES[name]}, which readers treat as an empty one")
    return decoders[name](data)


def check_configs(root: str, queues: set[QueueKey], batch_queues: set[QueueKey], bounds: Bounds) -> list[Finding]:
    """Return the findings about the files in `config/`.

    `queues` are all queues that have a folder. `batch_queues` are those of them that are batch queues, with entries of
    46 bytes.
    """
    folder = files.join(root, filenames.CONFIG)
    names = {name.removesuffix(BACKUP_SUFFIX) for name, _ in files.list_folder(folder)}
    names = {name for name in names if name.endswith(".json") or name in _JSON_WITHOUT_EXTENSION}
    found: list[Finding] = []
    decoded: dict[str, Any] = {}
    for name in sorted(names):
        value, findings = _check_pair(folder, name)
        found += findings
        if value is not None:
            decoded[name] = value
    compaction = files.join(root, filenames.COMPACTION)
    if files.list_folder(compaction):
        found += _check_pair(compaction, filenames.COMPACTION_POSITION)[1]
    topics_path = files.join(folder, filenames.TOPICS_JSON)
    if queues and filenames.TOPICS_JSON not in names and names & _OF_BROKERS:
        what = "topics.json is missing beside the other files: a broker serves no topic, whatever queues exist"
        found.append(_finding(what, topics_path, "JSON", "none"))
    found += [one for name in _NAME_FIELDS if name in decoded for one in _odd_names(files.join(folder, name), name)]
    if isinstance(topics := decoded.get(filenames.TOPICS_JSON), TopicsFile):
        found += _odd_topics(topics_path, topics.topics)
        found += _odd_queues(topics_path, topics.topics, queues, batch_queues)
        newer = sorted({key.topic for key in queues} - set(topics.topics))
        found = [_with_newer(one, newer) if one.path == topics_path else one for one in found]
    if isinstance(offsets := decoded.get(filenames.CONSUMER_OFFSET_JSON), ConsumerOffsets):
        found += _odd_offsets(files.join(folder, filenames.CONSUMER_OFFSET_JSON), offsets, bounds)
    if isinstance(delays := decoded.get(filenames.DELAY_OFFSET_JSON), DelayOffsets):
        found += _odd_delays(files.join(folder, filenames.DELAY_OFFSET_JSON), delays, bounds)
    return found


def _check_pair(folder: str, name: str) -> tuple[Any, list[Finding]]:
    """Return the decoded content of a config file, and the findings about the file and its `.bak`.

    If the file is missing or invalid, returns the content of its `.bak`. The content is None if neither is valid, or if
    one of them exists and cannot be read.
    """
    path = files.join(folder, name)
    backup = path + BACKUP_SUFFIX
    faults: dict[str, tuple[int, str]] = {}
    values: dict[str, Any] = {}
    for one in (path, backup):
        data: bytes | None = None
        try:
            data = files.read_small(one)
            if data is not None:
                values[one] = decode_config(name, data)
        except StoreError as error:
            if not files.is_folder(one):
                return None, [_unreadable(one, error)]  # the file may be valid, so its copy must not be used instead
            faults[one] = 0, "a folder"
        except ValueError as error:
            faults[one] = getattr(error, "position", 0), str(error) if data else "an empty file"
    if path not in values and path not in faults and backup in values:
        faults[path] = 0, "no such file"  # a broker died between the removal of the old file and the rename
    if path in faults:
        position, why = faults[path]
        has_backup = backup in values
        finding = Finding(
            severity=Severity.REPAIRABLE if has_backup else Severity.DAMAGE,
            area=Area.CONFIG,
            what=f"the file with {_CONTENTS.get(name, 'a part of the state of a broker')}",
            path=path,
            position=position,
            expected=_JSON,
            found=why,
            next_step="Its .bak is used instead, and may be older. rmq_spark.repair replaces the file by it."
            if has_backup
            else f"No .bak can be read. Restore {name} from a copy.",
            action=Action.RESTORE if has_backup and not files.is_folder(path) else Action.LEAVE,
        )
        return values.get(backup), [finding]
    found = []
    if backup in faults and files.file_size(backup) > 0:
        position, why = faults[backup]
        finding = Finding(
            severity=Severity.REPAIRABLE,
            area=Area.CONFIG,
            what="the .bak cannot be read; it is needed only if the file itself is lost",
            path=backup,
            position=position,
            expected=_JSON,
            found=why,
            next_step="rmq_spark.repair writes it again.",
            action=Action.RESTORE,
        )
        found.append(finding)
    return values.get(path, values.get(backup)), found


def _finding(what: str, path: str, expected: str, found: str, queue: QueueKey | None = None) -> Finding:
    """Return the finding about a wrong value in a config file."""
    return Finding(
        severity=Severity.DAMAGE,
        area=Area.CONFIG,
        what=what,
        path=path,
        expected=expected,
        found=found,
        topic=None if queue is None else queue.topic,
        queue_id=None if queue is None else queue.queue_id,
        next_step=_RESTORE_STEP,
    )


def _unreadable(path: str, error: StoreError) -> Finding:
    """Return the finding about a file that exists, but that this user or this machine cannot read."""
    return Finding(
        severity=Severity.DAMAGE,
        area=Area.CONFIG,
        what="the file cannot be read, so its content is unknown",
        path=path,
        found=str(error.__cause__ or error),
        next_step="Check and repair as its owner, or give this user the right to read it. No repair replaces it.",
    )


def _with_newer(one: Finding, newer: list[str]) -> Finding:
    """Add to a finding about topics.json which topics a repair adds to the `.bak`.

    `newer` are topics that have queues and are not in the `.bak`. Other findings are returned unchanged.
    """
    if one.action != Action.RESTORE or not newer:
        return one
    shown = ", ".join(newer[:5]) + (" …" if len(newer) > 5 else "")
    return replace(one, next_step=f"{one.next_step} It adds the topics that are only on disk: {shown}.")


def _odd_names(path: str, name: str) -> Iterator[Finding]:
    """Yield a finding for each entry of topics.json or subscriptionGroup.json whose name differs from its key."""
    try:
        whole = fastjson.parse((files.read_small(path) or b"{}").decode())
    except (ValueError, StoreError):
        return  # `_check_pair` reports the error
    table = whole.get(_TABLES[name]) if isinstance(whole, dict) else None
    for key, entry in table.items() if isinstance(table, dict) else ():
        own = entry.get(_NAME_FIELDS[name], key) if isinstance(entry, dict) else key
        if own != key:
            yield _finding(f"an entry whose {_NAME_FIELDS[name]} is not its key", path, repr(key), repr(own))


def _odd_topics(path: str, topics: Mapping[str, TopicConfig]) -> Iterator[Finding]:
    for name, config in topics.items():
        counts = (config.read_queue_count, config.write_queue_count)
        if min(counts) < 0 or max(counts) > MAX_QUEUES:
            finding = _finding(f"the number of queues of topic {name}", path, f"0 to {MAX_QUEUES}", str(counts))
            yield replace(finding, topic=name)
        if not 0 <= config.perm <= 15:
            yield replace(_finding(f"perm of topic {name}", path, "0 to 15", str(config.perm)), topic=name)
        try:
            check_topic_name(name)
        except OptionError:
            # A broker also creates topics named after itself and its cluster. Clients may not use such names.
            if not name or not name.isprintable() or "/" in name:
                yield _finding("the name of a topic", path, "a name", repr(name))


def _odd_queues(
    path: str, topics: Mapping[str, TopicConfig], queues: set[QueueKey], batch_queues: set[QueueKey]
) -> Iterator[Finding]:
    """Yield a finding for each queue that does not agree with the entry of its topic in topics.json."""
    for key in sorted(queues):
        config = topics.get(key.topic)
        note = Finding(
            severity=Severity.NOTE,
            area=Area.CONFIG,
            what=f"topic {key.topic} has queues and is not in topics.json: a broker does not serve it",
            path=path,
            topic=key.topic,
            queue_id=key.queue_id,
        )
        if config is None:
            yield note
        elif config.is_batch_queue != (key in batch_queues):
            kinds = ("BatchCQ", "SimpleCQ")
            expected, found = kinds if key in batch_queues else kinds[::-1]
            what = f"queue.type of topic {key.topic} differs from its queue {key.queue_id}: no broker loads that"
            finding = _finding(what, path, expected, found, key)
            yield replace(finding, next_step="Set queue.type among the topic's attributes.")
        elif key.queue_id >= max(config.read_queue_count, config.write_queue_count):
            what = f"topic {key.topic} has fewer queues in topics.json than on disk: consumers do not pull queue {key}"
            yield replace(note, what=what)


def _odd_offsets(path: str, offsets: ConsumerOffsets, bounds: Bounds) -> Iterator[Finding]:
    for key, numbers in offsets.offsets.items():
        topic, separator, group = key.rpartition("@")
        if not separator or not topic or not group or not key.isprintable():
            yield _finding("a key of the offsets", path, "topic@group", repr(key))
            continue
        for queue_id, offset in numbers.items():
            yield from _odd_offset(path, f"group {group}", QueueKey(topic, queue_id), offset, bounds)


def _odd_delays(path: str, delays: DelayOffsets, bounds: Bounds) -> Iterator[Finding]:
    for level, offset in delays.offsets.items():
        if level < 1:
            yield _finding("a delay level", path, "at least 1", str(level))
        else:
            yield from _odd_offset(path, f"delay level {level}", QueueKey(SCHEDULE_TOPIC, level - 1), offset, bounds)


def _odd_offset(path: str, owner: str, queue: QueueKey, offset: int, bounds: Bounds) -> Iterator[Finding]:
    if offset < 0 or queue.queue_id < 0:
        yield _finding(f"the offset of {owner} in queue {queue}", path, "at least 0", str(offset), queue)
        return
    extent = bounds(queue)
    if extent is None:
        return
    begin, end = extent
    if offset > end:
        what = f"the offset of {owner} is beyond the end of queue {queue}, so the next messages would be skipped"
        yield replace(
            _finding(what, path, f"at most {end}", str(offset), queue),
            begin=end,
            end=offset,
            next_step="Restore the messages, or set the offset back: rmq_spark.reset_offsets for your own groups; for "
            "all, including a broker's own groups and delay levels, rmq_spark.plan_repair with cut_log=True.",
            action=Action.RESET,
        )
    elif offset < begin:
        yield Finding(
            severity=Severity.NOTE,
            area=Area.CONFIG,
            what=f"the offset of {owner} is below the begin of queue {queue}: {begin - offset} messages expired before "
            "they were consumed",
            path=path,
            topic=queue.topic,
            queue_id=queue.queue_id,
        )
