"""The files in `config/` looked at: whether each can be read, and whether what it says fits the queues."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from rmq_spark.store.disk import files
from rmq_spark.store.errors import OptionError, StoreError
from rmq_spark.store.explore.finding import DAMAGE, NOTE, REPAIRABLE, Finding
from rmq_spark.store.format import fastjson, filenames
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
from rmq_spark.store.format.filenames import BACKUP_SUFFIX, SCHEDULE_TOPIC
from rmq_spark.store.log.topics import MAX_QUEUES
from rmq_spark.store.units import QueueKey

_BINARY = {"timercheck"}  # of the timer
_JSON_WITHOUT_ENDING = {"timermetrics", "transactionMetrics"}
_MEANING = {
    filenames.TOPICS_JSON: "which topics there are, and how many queues each has",
    filenames.CONSUMER_OFFSET_JSON: "how far each group has come",
    filenames.SUBSCRIPTION_GROUP_JSON: "which groups there are",
    filenames.DELAY_OFFSET_JSON: "up to where each delay level was delivered",
    filenames.COMPACTION_POSITION: "how far compaction has come in each queue",
}
_TABLES = {
    filenames.TOPICS_JSON: "topicConfigTable",
    filenames.CONSUMER_OFFSET_JSON: "offsetTable",
    filenames.SUBSCRIPTION_GROUP_JSON: "subscriptionGroupTable",
    filenames.DELAY_OFFSET_JSON: "offsetTable",
}
_BESIDE_TOPICS = {
    filenames.CONSUMER_OFFSET_JSON,
    filenames.SUBSCRIPTION_GROUP_JSON,
}  # written by brokers, not by stores
_NAME_FIELDS = {filenames.TOPICS_JSON: "topicName", filenames.SUBSCRIPTION_GROUP_JSON: "groupName"}
Bounds = Callable[[QueueKey], tuple[int, int] | None]  # least and next queue offset, None for a queue without files


def decode_config(name: str, data: bytes) -> Any:
    """Return what a config file says. Raises ValueError for what is none."""
    kinds: Mapping[str, Callable[[bytes], Any]] = {
        filenames.TOPICS_JSON: decode_topics_file,
        filenames.CONSUMER_OFFSET_JSON: decode_consumer_offsets,
        filenames.SUBSCRIPTION_GROUP_JSON: decode_groups_file,
        filenames.DELAY_OFFSET_JSON: decode_delay_offsets,
    }
    whole = fastjson.parse(data.decode())
    if name not in kinds:
        return whole
    if isinstance(whole, dict) and _TABLES[name] not in whole:
        raise ValueError(f"no {_TABLES[name]}: a reader would take that for an empty one")
    return kinds[name](data)


def look_at_configs(root: str, queues: set[QueueKey], batch_queues: set[QueueKey], bounds: Bounds) -> list[Finding]:
    """Return what is wrong in `config/`. `queues` are those with a folder, `batch_queues` those of 46-byte units."""
    folder = files.join(root, filenames.CONFIG)
    names = [name for name, _ in files.list_folder(folder)]
    mains = {name.removesuffix(BACKUP_SUFFIX) for name in names if _is_json(name.removesuffix(BACKUP_SUFFIX))}
    found: list[Finding] = []
    read: dict[str, Any] = {}
    for name in sorted(mains):
        value, findings = _look_at_pair(folder, name)
        found += findings
        if value is not None:
            read[name] = value
    compaction = files.join(root, filenames.COMPACTION)
    if files.list_folder(compaction):
        found += _look_at_pair(compaction, filenames.COMPACTION_POSITION)[1]
    path = files.join(folder, "")
    if queues and filenames.TOPICS_JSON not in mains and mains & _BESIDE_TOPICS:
        what = "there is no topics.json beside the other files: a broker serves no topic, whatever queues there are"
        found.append(Finding(DAMAGE, "config", what, path + filenames.TOPICS_JSON, 0, "JSON", "none", next_step=_EDIT))
    found += [one for name in _NAME_FIELDS if name in read for one in _odd_names(path + name, name)]
    if isinstance(topics := read.get(filenames.TOPICS_JSON), TopicsFile):
        found += _odd_topics(path + filenames.TOPICS_JSON, topics.topics, queues, batch_queues)
        newer = sorted({key.topic for key in queues} - set(topics.topics))
        found = [_with_newer(one, newer) if one.path == path + filenames.TOPICS_JSON else one for one in found]
    if isinstance(offsets := read.get(filenames.CONSUMER_OFFSET_JSON), ConsumerOffsets):
        found += _odd_offsets(path + filenames.CONSUMER_OFFSET_JSON, offsets, bounds)
    if isinstance(delays := read.get(filenames.DELAY_OFFSET_JSON), DelayOffsets):
        found += _odd_delays(path + filenames.DELAY_OFFSET_JSON, delays, bounds)
    return found


def _is_json(name: str) -> bool:
    return name.endswith(".json") or name in _JSON_WITHOUT_ENDING


def _look_at_pair(folder: str, name: str) -> tuple[Any, list[Finding]]:
    """Return what a file says, by its backup if need be, and what is wrong with either."""
    path = files.join(folder, name)
    faults: dict[str, tuple[int, str]] = {}
    values: dict[str, Any] = {}
    for one in (path, path + BACKUP_SUFFIX):
        data: bytes | None = None
        try:
            data = files.read_small(one)
            if data is not None:
                values[one] = decode_config(name, data)
        except StoreError as error:
            if not files.is_folder(one):
                return None, [_unreadable(one, error)]  # it may be whole: nobody goes by the other one
            faults[one] = 0, "a folder"
        except ValueError as error:
            faults[one] = getattr(error, "position", 0), str(error) if data else "an empty file"
    if path not in values and path not in faults and path + BACKUP_SUFFIX in values:
        faults[path] = 0, "no such file"  # a broker died between taking the old one away and the new one's name
    if path in faults:
        position, why = faults[path]
        backup_is_good = path + BACKUP_SUFFIX in values
        what = f"the file that says {_MEANING.get(name, 'what a broker keeps in it')}"
        step = (
            "The file before it, .bak, counts instead, and may be older. rmq_spark.repair puts it in place."
            if backup_is_good
            else f"No .bak can be read. Restore {name} from a copy."
        )
        finding = Finding(
            REPAIRABLE if backup_is_good else DAMAGE,
            filenames.CONFIG,
            what,
            path,
            position,
            "JSON as a broker writes it",
            why,
            next_step=step,
            action="restore" if backup_is_good and not files.is_folder(path) else "leave",
        )
        return values.get(path + BACKUP_SUFFIX), [finding]
    found = []
    if path + BACKUP_SUFFIX in faults and files.file_size(path + BACKUP_SUFFIX) > 0:
        position, why = faults[path + BACKUP_SUFFIX]
        what = "the file before the last change cannot be read; nobody needs it while the newer one can be"
        step = "rmq_spark.repair makes it anew."
        json = "JSON as a broker writes it"
        at = path + BACKUP_SUFFIX
        found.append(
            Finding(REPAIRABLE, filenames.CONFIG, what, at, position, json, why, next_step=step, action="restore")
        )
    return values.get(path, values.get(path + BACKUP_SUFFIX)), found


def _unreadable(path: str, error: StoreError) -> Finding:
    """Return the finding of a file that is there and that this user, or this machine, cannot read."""
    what = "the file cannot be read, so nobody knows what it says"
    step = "Check, and repair, as its owner, or give the user who does the right to read it. Nothing takes its place."
    return Finding(DAMAGE, filenames.CONFIG, what, path, 0, "", str(error.__cause__ or error), next_step=step)


def _with_newer(one: Finding, newer: list[str]) -> Finding:
    """Return the finding of a topics.json for which its `.bak` counts, with the topics that are not in that."""
    if one.action != "restore" or not newer:
        return one
    shown = ", ".join(newer[:5]) + (" …" if len(newer) > 5 else "")
    return replace(one, next_step=f"{one.next_step} Not in it, and added by that with the queues on disk: {shown}.")


def _odd_names(path: str, name: str) -> Iterator[Finding]:
    """Yield entries of topics or groups that call themselves otherwise than their key does."""
    try:
        whole = fastjson.parse((files.read_small(path) or b"{}").decode())
    except (ValueError, StoreError):
        return  # told
    table = whole.get(_TABLES[name]) if isinstance(whole, dict) else None
    for key, entry in table.items() if isinstance(table, dict) else ():
        said = entry.get(_NAME_FIELDS[name], key) if isinstance(entry, dict) else key
        if said != key:
            what = f"an entry whose {_NAME_FIELDS[name]} is not its key"
            yield Finding(DAMAGE, "config", what, path, 0, repr(key), repr(said), next_step=_EDIT)


def _odd_topics(
    path: str, topics: Mapping[str, TopicConfig], queues: set[QueueKey], batch_queues: set[QueueKey]
) -> Iterator[Finding]:
    for name, config in topics.items():
        counts = (config.read_queue_count, config.write_queue_count)
        if min(counts) < 0 or max(counts) > MAX_QUEUES:
            what = f"the number of queues of topic {name}"
            yield Finding(DAMAGE, "config", what, path, 0, f"0 to {MAX_QUEUES}", str(counts), name, next_step=_EDIT)
        if not 0 <= config.perm <= 15:
            what = f"what may be done with topic {name} (perm)"
            yield Finding(DAMAGE, "config", what, path, 0, "0 to 15", str(config.perm), name, next_step=_EDIT)
        if not _is_name(name):
            yield Finding(DAMAGE, "config", "the name of a topic", path, 0, "a name", repr(name), next_step=_EDIT)
    for key in sorted(queues):
        held = topics.get(key.topic)
        if held is None:
            what = f"topic {key.topic} has queues and is not in topics.json: a broker does not serve it"
            yield Finding(NOTE, "config", what, path, topic=key.topic, queue_id=key.queue_id)
        elif held.is_batch_queue != (key in batch_queues):
            what = f"the queue.type of topic {key.topic} is not what its queue {key.queue_id} is: no broker loads that"
            kinds = ("BatchCQ", "SimpleCQ")
            expected, found = kinds if key in batch_queues else kinds[::-1]
            step = "Set queue.type among the topic's attributes."
            yield Finding(DAMAGE, "config", what, path, 0, expected, found, key.topic, key.queue_id, next_step=step)
        elif key.queue_id >= max(held.read_queue_count, held.write_queue_count):
            what = f"topic {key.topic} has fewer queues in topics.json than on disk: nobody pulls from queue {key}"
            yield Finding(NOTE, "config", what, path, topic=key.topic, queue_id=key.queue_id)


_EDIT = "Restore the file from a copy, or its .bak."


def _is_name(name: str) -> bool:
    try:
        filenames.check_topic_name(name)
    except OptionError:
        # A broker also keeps topics named after itself and its cluster: any text of letters that no client may send.
        return bool(name) and name.isprintable() and "/" not in name
    return True


def _odd_offsets(path: str, offsets: ConsumerOffsets, bounds: Bounds) -> Iterator[Finding]:
    for key, numbers in offsets.offsets.items():
        topic, separator, group = key.rpartition("@")
        if not separator or not topic or not group or not key.isprintable():
            yield Finding(DAMAGE, "config", "a key of the offsets", path, 0, "topic@group", repr(key), next_step=_EDIT)
            continue
        for queue_id, offset in numbers.items():
            yield from _odd_offset(path, f"group {group}", QueueKey(topic, queue_id), offset, bounds)


def _odd_delays(path: str, delays: DelayOffsets, bounds: Bounds) -> Iterator[Finding]:
    for level, offset in delays.offsets.items():
        if level < 1:
            yield Finding(DAMAGE, "config", "a delay level", path, 0, "from 1 on", str(level), next_step=_EDIT)
        else:
            yield from _odd_offset(path, f"delay level {level}", QueueKey(SCHEDULE_TOPIC, level - 1), offset, bounds)


def _odd_offset(path: str, who: str, queue: QueueKey, offset: int, bounds: Bounds) -> Iterator[Finding]:
    held = bounds(queue) if queue.queue_id >= 0 else None
    if offset < 0 or queue.queue_id < 0:
        yield Finding(
            DAMAGE,
            "config",
            f"the offset of {who} in queue {queue}",
            path,
            0,
            "0 or more",
            str(offset),
            queue.topic,
            queue.queue_id,
            next_step=_EDIT,
        )
    elif held is not None and offset > held[1]:
        yield Finding(
            DAMAGE,
            "config",
            f"{who} stands beyond the end of queue {queue}: what is stored there next would be passed over",
            path,
            0,
            f"at most {held[1]}",
            str(offset),
            queue.topic,
            queue.queue_id,
            held[1],
            offset,
            0,
            "Restore the messages, or set it back: rmq_spark.reset_offsets for a group of yours; for all, a "
            "broker's own groups and delay levels too, rmq_spark.plan_repair with cut_log=True.",
            "reset",
        )
    elif held is not None and offset < held[0]:
        what = f"{who} stands before the begin of queue {queue}: {held[0] - offset} messages have expired unread"
        yield Finding(NOTE, "config", what, path, topic=queue.topic, queue_id=queue.queue_id)
