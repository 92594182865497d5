"""Read permissions: whether the configuration of a store lets a consumer group read a topic or a queue.

The same settings are checked that a broker checks for a pull. Each of them forbids reading:

| setting | file | RocketMQ's answer |
| --- | --- | --- |
| `consumeEnable: false` of the group | config/subscriptionGroup.json | NO_PERMISSION |
| `consumeBroadcastEnable: false` of a group that broadcasts | config/subscriptionGroup.json | NO_PERMISSION |
| a `perm` of the topic without the bit 4 (read) | config/topics.json | NO_PERMISSION; clients do not see its queues |
| `readQueueNums` of the topic, if <= the queue id | config/topics.json | SYSTEM_ERROR; clients do not see the queue |

Topics and groups that are not in these files may be read. A reader without a group may read everything, because it may
inspect a copy of a store, or topics that an administrator has closed to consumers.
Source: PullMessageProcessor#processRequest, MQClientInstance#topicRouteData2TopicSubscribeInfo (4.9, 5.3).
"""

import time
from collections.abc import Callable, Mapping

from rmq_spark.store.backend import Barrier
from rmq_spark.store.disk import files
from rmq_spark.store.errors import DamageError, NoPermissionError, NotFoundError
from rmq_spark.store.format import file_names as filenames
from rmq_spark.store.format.config_json import PERM_READ, GroupConfig, TopicConfig, decode_groups_file
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import retry_topic

NEXT_STEP = "Restore the file from a copy, or remove it and its .bak: then every group has RocketMQ's defaults."
_TRIES = 4
_WAIT_SECONDS = 0.02  # doubled with each try; a broker overwrites the file in place within milliseconds


def group_config_path(root: str) -> str:
    """Return the path of config/subscriptionGroup.json in the store at `root`."""
    return files.join(root, filenames.CONFIG, filenames.SUBSCRIPTION_GROUP_JSON)


def read_group_config(root: str, group: str, sleep: Callable[[float], None] = time.sleep) -> GroupConfig | None:
    """Return a group's entry in config/subscriptionGroup.json, or None if the entry or the file is missing.

    A broker may be writing the file, so a file that is not valid is read again several times before its `.bak` is used
    (ConfigManager#load). `sleep` takes seconds. Raises DamageError if neither of the two files is valid.
    """
    path = group_config_path(root)
    problem = ""
    for attempt in range(_TRIES):
        text = files.read_small(path)
        if not text:
            break
        try:
            return decode_groups_file(text).groups.get(group)
        except ValueError as error:
            problem = str(error)
            sleep(_WAIT_SECONDS * 2**attempt)
    text = files.read_small(path + filenames.BACKUP_SUFFIX)
    try:
        if text:
            return decode_groups_file(text).groups.get(group)
    except ValueError as error:
        problem = str(error)
    if problem:
        what = "not the JSON of consumer groups, nor is its .bak"
        raise DamageError(what, path, 0, "JSON", problem, NEXT_STEP)
    return None


TopicConfigs = Mapping[str, TopicConfig]
_WITHOUT = "or read without a group, which is always allowed"


class GroupRights:
    """Checks whether one group of the store at `root` may consume. For one thread at a time.

    The configuration file is read again only if it has changed. Otherwise a check costs one `stat`.
    """

    def __init__(
        self, root: str, group: str, *, is_broadcasting: bool = False, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._root, self._group, self._is_broadcasting, self._sleep = root, group, is_broadcasting, sleep
        self._path = group_config_path(root)
        self._stamp: tuple[int, int, int] | None = None
        self._config = GroupConfig(group)

    def check(self) -> None:
        """Raise NoPermissionError if the group may not consume now, and DamageError if the file is damaged."""
        stamp = files.stamp(self._path)
        if stamp != self._stamp:
            self._config = read_group_config(self._root, self._group, self._sleep) or GroupConfig(self._group)
            self._stamp = stamp
        if not self._config.consume_enable:
            raise self._error("consumeEnable", "-s true")
        if self._is_broadcasting and not self._config.consume_broadcast_enable:
            raise self._error("consumeBroadcastEnable", "-d true")

    def _error(self, name: str, switch: str) -> NoPermissionError:
        return NoPermissionError(
            f'consumer group "{self._group}" may not consume: {self._path} has {name}=false; expected true. Have '
            f"an administrator set it (mqadmin updateSubGroup -g {self._group} {switch}), give another group, "
            f"{_WITHOUT}. RocketMQ answers NO_PERMISSION."
        )


def is_closed(configs: TopicConfigs, topic: str) -> bool:
    """Say whether the `perm` of a topic forbids consumers to read it."""
    config = configs.get(topic)
    return config is not None and not config.perm & PERM_READ


def is_beyond(configs: TopicConfigs, queue: QueueKey) -> bool:
    """Say whether consumers may not read a queue, because its id is not below the topic's readQueueNums."""
    config = configs.get(queue.topic)
    return config is not None and queue.queue_id >= config.read_queue_count


def describe_closed(configs: TopicConfigs, topic: str) -> str:
    """Return a text for errors that describes why a topic is closed. `is_closed` must be True for it."""
    return f'topic "{topic}" has perm={configs[topic].perm} in topics.json, without {PERM_READ} (read)'


def describe_beyond(configs: TopicConfigs, queue: QueueKey) -> str:
    """Return a text for errors that describes why a queue may not be read. `is_beyond` must be True for it."""
    return f"queue {queue} is beyond readQueueNums={configs[queue.topic].read_queue_count} of its topic in topics.json"


def refuse_topic(configs: TopicConfigs, topic: str, group: str) -> None:
    """Raise NoPermissionError if the topic is closed to consumers (`is_closed`)."""
    if is_closed(configs, topic):
        raise _closed_error(configs, topic, group)


def refuse_queue(configs: TopicConfigs, queue: QueueKey, group: str) -> None:
    """Raise an error if the group may not read the queue.

    Raises NoPermissionError if the topic is closed (`is_closed`), and NotFoundError if the queue's id is too high
    (`is_beyond`).
    """
    refuse_topic(configs, queue.topic, group)
    if is_beyond(configs, queue):
        raise _beyond_error(configs, queue, group)


def queue_barrier(configs: TopicConfigs, queue: QueueKey, group: str | None) -> Barrier | None:
    """Return why the group must not read the queue, or None if it may. Without a group, the barrier has no error."""
    if is_closed(configs, queue.topic):
        error = None if group is None else _closed_error(configs, queue.topic, group)
        return Barrier(describe_closed(configs, queue.topic), error, is_topic=True)
    if is_beyond(configs, queue):
        return Barrier(
            describe_beyond(configs, queue),
            None if group is None else _beyond_error(configs, queue, group),
            is_topic=False,
        )
    return None


def _closed_error(configs: TopicConfigs, topic: str, group: str) -> NoPermissionError:
    retry = "; failed messages are not delivered again" if topic == retry_topic(group) else ""
    return NoPermissionError(
        f'consumer group "{group}" may not read: {describe_closed(configs, topic)}{retry}; expected 6 or 4. Have '
        f"an administrator set it (mqadmin updateTopicPerm -t {topic} -p 6), leave the topic out, {_WITHOUT}. "
        "RocketMQ answers NO_PERMISSION."
    )


def _beyond_error(configs: TopicConfigs, queue: QueueKey, group: str) -> NotFoundError:
    return NotFoundError(
        f'consumer group "{group}" has no queue {queue}: {describe_beyond(configs, queue)}; expected a smaller '
        f"id. Have an administrator raise readQueueNums (mqadmin updateTopic -t {queue.topic} -r "
        f"{queue.queue_id + 1}), {_WITHOUT}. RocketMQ answers SYSTEM_ERROR."
    )
