"""Texts of single option values of the sink -> Python values, where the parsers of the source do not fit.

As in `values`, a parser raises Unacceptable with the rest of a sentence that begins with the option and the text.
"""

import re

from rmq_spark.datasource.values import COUNT_MAX, Unacceptable, check_topic, parse_count, parse_text

# What a broker would still load: each queue of a topic is a folder, and a slip of the finger must not make millions.
QUEUES_MAX = 1 << 16
INT_MAX = (1 << 31) - 1


def parse_topic(text: str) -> str:
    """Return one legal topic name."""
    return check_topic(parse_text(text))


def parse_queue_count(text: str) -> int:
    """Return how many queues a topic gets: from 1 to QUEUES_MAX."""
    count = parse_count(text)
    if count > QUEUES_MAX:
        raise Unacceptable(f"is more queues than a topic can have. Accepted: 1 to {QUEUES_MAX}.")
    return count


def parse_mode(text: str) -> str:
    """Return one of the sink's modes."""
    modes = {"send": "send", "sendback": "sendBack"}
    if text.strip().lower() not in modes:
        raise Unacceptable(f"is none of: {', '.join(modes.values())}.")
    return modes[text.strip().lower()]


def parse_reconsume_times(text: str) -> int:
    """Return how often a message may be consumed anew: a whole number from 0 on, as Java's int has it."""
    found = re.fullmatch(r"[+]?0*(\d{1,10})", text.strip(), re.ASCII)
    if found is None or int(found[1]) > INT_MAX:
        raise Unacceptable(f"is no whole number from 0 to {INT_MAX}.")
    return int(found[1])


def parse_version(text: str) -> int:
    """Return the number of a transaction: a whole number from 0 on, as Spark's batch ids are."""
    found = re.fullmatch(r"[+]?0*(\d{1,19})", text.strip(), re.ASCII)
    if found is None or int(found[1]) > COUNT_MAX:
        raise Unacceptable("is no whole number from 0 on.")
    return int(found[1])
