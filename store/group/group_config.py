"""config/subscriptionGroup.json: what administrators set for a consumer group."""

import time
from collections.abc import Callable

from rmq_spark.store.disk import files
from rmq_spark.store.errors import DamageError
from rmq_spark.store.format import filenames
from rmq_spark.store.format.config_json import GroupConfig, decode_groups_file

NEXT_STEP = "Restore the file from a copy, or remove it and its .bak: then every group has RocketMQ's defaults."

_TRIES = 4
_WAIT_SECONDS = 0.02  # doubled each time: a broker overwrites the file in place within milliseconds


def group_config_path(root: str) -> str:
    """Return the path of the file in the store at `root`."""
    return files.join(root, filenames.CONFIG, filenames.SUBSCRIPTION_GROUP_JSON)


def read_group_config(root: str, group: str, sleep: Callable[[float], None] = time.sleep) -> GroupConfig | None:
    """Return what config/subscriptionGroup.json says of a group, None where it does not name it, or is not there.

    One that is half written is read again before its `.bak` counts (ConfigManager#load). Raises DamageError.
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
