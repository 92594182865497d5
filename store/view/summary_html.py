"""HTML that notebooks show for a store, a topic, a group's lag and a message. `html_tables` makes the tables."""

from collections.abc import Sequence
from typing import Any

from rmq_spark.store.group_tables import queue_of
from rmq_spark.store.html_tables import (
    MAX_ROWS,
    Column,
    bar_column,
    box,
    folded,
    number_column,
    table,
    text_block,
    text_column,
)
from rmq_spark.store.view.summary_text import NOTHING, bytes_text, count_text, span_text, time_text

# A StoreSummary, TopicSummary, GroupLag or Message. Their modules import this one, so it cannot import them.
_Shown = Any


def store_html(store: _Shown) -> str:
    """Return the HTML of a store summary: totals and a table of topics.

    Topics that are empty, and RocketMQ's own topics, are folded: a click shows them.
    """
    own = [topic for topic in store.topics if not topic.is_system and topic.messages]
    empty = [topic for topic in store.topics if not topic.is_system and not topic.messages]
    system = [topic for topic in store.topics if topic.is_system]
    facts = {
        "messages": f"{store.messages:,} in {count_text(store.used_queue_count, 'queue')} of {store.queue_count:,}",
        "commit log": f"{bytes_text(store.bytes)} in {count_text(store.segment_count, 'segment')} of "
        f"{bytes_text(store.segment_bytes)}, physical offsets [{store.log_begin:,}, {store.log_end:,})",
        "stored": _range_text(store.first_ms, store.last_ms),
        "state": {"closed": "cleanly shut down", "live": "in use by a writer"}.get(
            store.state, "crashed: its last writer died"
        ),
    }
    count = count_text(sum(topic.messages for topic in system), "message")
    hidden = _folded_topics(f"{count_text(len(system), 'topic')} of RocketMQ's own, {count}", system)
    return box(
        "RocketMQ store",
        store.path,
        facts,
        (_topics_table(own) if own else "")
        + _folded_topics(f"{count_text(len(empty), 'topic')} without a message", empty)
        + hidden,
    )


def closed_html(path: str) -> str:
    """Return the HTML of a store explorer that was closed."""
    return box("RocketMQ store", path, {"reader": "closed"}, "")


def topic_html(topic: _Shown) -> str:
    """Return the HTML of a topic summary: totals and a table of queues."""
    facts = {
        "messages": f"{topic.messages:,} in {count_text(len(topic.queues), 'queue')}",
        "records": bytes_text(topic.bytes, topic.is_exact),
        "stored": _range_text(topic.first_ms, topic.last_ms),
    }
    queues = topic.queues[:MAX_ROWS]
    columns = [
        number_column("queue", [str(queue.queue_id) for queue in queues]),
        number_column("min offset", [queue.min_offset for queue in queues]),
        number_column("max offset", [queue.max_offset for queue in queues]),
        number_column("messages", [queue.messages for queue in queues]),
        bar_column([queue.messages for queue in queues]),
        number_column("records", [bytes_text(queue.bytes, topic.is_exact) for queue in queues]),
        text_column("first stored, UTC", [time_text(queue.first_ms) for queue in queues]),
        text_column("last stored, UTC", [time_text(queue.last_ms) for queue in queues]),
    ]
    if any(queue.problem for queue in queues):
        columns.append(text_column("problem", [queue.problem or "" for queue in queues], is_long=True))
    return box("topic", topic.topic, facts, _rows(columns, len(topic.queues), "queue"))


def lag_html(lag: _Shown) -> str:
    """Return the HTML of a GroupLag: totals, and a table with a row for each group and queue."""
    rows = lag.table.slice(0, MAX_ROWS).to_pylist()
    unread = count_text(lag.messages, "message")
    if lag.unknown_queues:
        unread = f"at least {unread}; {count_text(lag.unknown_queues, 'queue')} not known"
    facts = {"unread": unread, "as of": f"{time_text(lag.at_ms)} UTC"}
    columns = [
        text_column("group", [row["group"] for row in rows]),
        text_column("topic", [row["topic"] for row in rows]),
        number_column("queue", [queue_of(row).id_text for row in rows]),
        text_column("state", [row["state"] for row in rows]),
        number_column("group offset", [row["groupOffset"] for row in rows]),
        number_column("max offset", [row["maxOffset"] for row in rows]),
        number_column("lag, messages", [row["lagMessages"] for row in rows]),
        bar_column([row["lagMessages"] for row in rows]),
        number_column("lag", [NOTHING if row["lagBytes"] is None else bytes_text(row["lagBytes"]) for row in rows]),
        number_column(
            "behind", [NOTHING if row["secondsBehind"] is None else span_text(row["secondsBehind"]) for row in rows]
        ),
        text_column("member", [(row["member"] or NOTHING)[:24] for row in rows]),
    ]
    if lag.group is not None:
        del columns[0]
    what = "lag of group" if lag.group is not None else "lag of all groups of"
    return box(what, lag.group or lag.path, facts, _rows(columns, lag.table.num_rows, "queue"))


def message_html(message: _Shown) -> str:
    """Return the HTML of a message: its position, its properties, and its body as JSON, text or a hex dump."""
    facts = {
        "id": message.message_id,
        "queue": f"{message.physical_topic}/{message.queue_id}, queue offset {message.queue_offset:,}",
        "record": f"physical offset {message.commit_log_offset:,}",
        "born": f"{time_text(message.born_ms)} UTC, by {message.born_host}",
        "stored": f"{time_text(message.stored_ms)} UTC, at {message.store_host} "
        f"({span_text((message.stored_ms - message.born_ms) / 1000)} later)",
    }
    if message.reconsume_times:
        facts["sent back"] = count_text(message.reconsume_times, "time")
    names = list(message.properties)
    columns = [
        text_column("property", names),
        text_column("value", message.properties.values(), is_long=True),
    ]
    kind, text, left = message.readable_body()
    title = f"body, {bytes_text(len(message.body))} of {kind}"
    more = f"… and {count_text(left, 'byte' if kind == 'bytes' else 'character')} more" if left else ""
    properties = table(columns) if names else ""
    return box("message of", message.topic, facts, f"{properties}{text_block(title, text, more)}")


def _topics_table(topics: Sequence[_Shown]) -> str:
    shown = topics[:MAX_ROWS]
    columns = [
        text_column("topic", [topic.topic for topic in shown]),
        number_column("queues", [len(topic.queues) for topic in shown]),
        number_column("messages", [topic.messages for topic in shown]),
        bar_column([topic.messages for topic in shown]),
        number_column("records", [bytes_text(topic.bytes, topic.is_exact) for topic in shown]),
        text_column("first stored, UTC", [time_text(topic.first_ms) for topic in shown]),
        text_column("last stored, UTC", [time_text(topic.last_ms) for topic in shown]),
    ]
    problems = [sum(queue.problem is not None for queue in topic.queues) for topic in shown]
    if any(problems):
        columns.append(text_column("damaged", [count_text(count, "queue") if count else "" for count in problems]))
    return _rows(columns, len(topics), "topic")


def _folded_topics(title: str, topics: Sequence[_Shown]) -> str:
    """Return a table of topics that is folded under a title, or "" if `topics` is empty."""
    return folded(title, _topics_table(topics)) if topics else ""


def _rows(columns: Sequence[Column], row_count: int, noun: str) -> str:
    """Return a table, with the number of rows that it leaves out of `row_count`. `noun` is what a row describes."""
    left_out = row_count - MAX_ROWS
    return table(columns, f"… and {count_text(left_out, noun)} more: to_pandas() has all" if left_out > 0 else "")


def _range_text(first_ms: int | None, last_ms: int | None) -> str:
    if first_ms is None or last_ms is None:
        return "nothing yet"
    return f"{time_text(first_ms)} to {time_text(last_ms)} UTC, {span_text((last_ms - first_ms) / 1000)}"
