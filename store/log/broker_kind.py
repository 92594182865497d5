"""For which brokers a store is, where its settings do not say: told by the files that only RocketMQ 5 makes.

A broker of 4.9 delivers what waits in SCHEDULE_TOPIC_XXXX, and has no timer: what waits in rmq_sys_wheel_timer it would
keep for ever.
"""

from rmq_spark.store.disk import files
from rmq_spark.store.format import filenames
from rmq_spark.store.log.topics import find_topics

_ONLY_5 = ("timerwheel", "timerlog", "compaction", "abort.bak", filenames.BATCH_CONSUME_QUEUE)
_ONLY_5_CONFIG = (
    "timercheck",
    "timermetrics",
    "transactionMetrics",
    "consumerOrderInfo.json",
    "topicQueueMapping.json",
)
# What 5.x writes into topics.json, and 4.9 does not (DataVersion, TopicConfig).
_ONLY_5_FIELDS = (b'"stateVersion"', b'"attributes"')


def found_broker_version(root: str, *, has_log: bool) -> str:
    """Return "5" or "4.9", by what lies in a store. Ask before anything of ours writes its topics.json.

    A log without any sign counts as one of 4.9, an empty store as one for 5. Raises what `find_topics` raises.
    """
    names = {name for name, _ in files.list_folder(root)}
    config_names = {name for name, _ in files.list_folder(files.join(root, filenames.CONFIG))}
    if not names.isdisjoint(_ONLY_5) or not config_names.isdisjoint(_ONLY_5_CONFIG):
        return "5"
    text = find_topics(root).text
    if text:
        return "5" if any(name in text for name in _ONLY_5_FIELDS) else "4.9"
    return "4.9" if has_log else "5"
