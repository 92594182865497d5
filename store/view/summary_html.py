"""HTML that notebooks show for a store, a topic, a group's lag and a message.

The HTML does not need scripts, style sheets or images. It inherits colours from the page, so that it is legible on
light and dark pages. All text from a store is escaped, because a topic, a key or a body may contain markup.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from rmq_spark.store.group_tables import queue_of
from rmq_spark.store.view.summary_text import NOTHING, bytes_text, count_text, span_text, time_text

MAX_ROWS = 50  # rows of a table that are shown; about one page
MAX_VALUE_CHARS = 400  # characters of a property's value that are shown

_BOX = "font-size:13px;line-height:1.45;overflow-x:auto"
_TABLE = "border-collapse:collapse;font-size:inherit;color:inherit;margin:6px 0"
_MONO = "font-family:monospace"
_HEAD = "text-align:{};padding:2px 10px;border-bottom:1px solid rgba(128,128,128,.6);font-weight:600;white-space:nowrap"
_CELL = (
    "text-align:{};padding:1px 10px;border-bottom:1px solid rgba(128,128,128,.2);vertical-align:top;white-space:nowrap"
)
_LONG = "white-space:pre-wrap;overflow-wrap:anywhere;display:inline-block;max-width:60em"
_BAR = "display:inline-block;height:.7em;width:{:.1f}px;background:rgba(0,114,178,.7);vertical-align:baseline"
_BAR_PIXELS = 90
_PRE = (
    "margin:4px 0;padding:6px 10px;border:1px solid rgba(128,128,128,.35);max-height:24em;overflow:auto;"
    "white-space:pre-wrap;overflow-wrap:anywhere;text-align:left;max-width:80em"
)

# A StoreSummary, TopicSummary, GroupLag or Message. Their modules import this one, so it cannot import them.
_Shown = Any

# A column of a table: its header, whether it contains numbers, and its cells as HTML.
_Column = tuple[str, bool, Sequence[str]]


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
    hidden = _folded(f"{count_text(len(system), 'topic')} of RocketMQ's own, {count}", system)
    return _box(
        "RocketMQ store",
        store.path,
        facts,
        (_topics_table(own) if own else "")
        + _folded(f"{count_text(len(empty), 'topic')} without a message", empty)
        + hidden,
    )


def closed_html(path: str) -> str:
    """Return the HTML of a store explorer that was closed."""
    return _box("RocketMQ store", path, {"reader": "closed"}, "")


def topic_html(topic: _Shown) -> str:
    """Return the HTML of a topic summary: totals and a table of queues."""
    facts = {
        "messages": f"{topic.messages:,} in {count_text(len(topic.queues), 'queue')}",
        "records": bytes_text(topic.bytes, topic.is_exact),
        "stored": _range_text(topic.first_ms, topic.last_ms),
    }
    queues = topic.queues[:MAX_ROWS]
    columns: list[_Column] = [
        ("queue", True, [str(queue.queue_id) for queue in queues]),
        ("min offset", True, [f"{queue.min_offset:,}" for queue in queues]),
        ("max offset", True, [f"{queue.max_offset:,}" for queue in queues]),
        ("messages", True, [f"{queue.messages:,}" for queue in queues]),
        ("", False, _bars([queue.messages for queue in queues])),
        ("records", True, [bytes_text(queue.bytes, topic.is_exact) for queue in queues]),
        ("first stored, UTC", False, [time_text(queue.first_ms) for queue in queues]),
        ("last stored, UTC", False, [time_text(queue.last_ms) for queue in queues]),
    ]
    if any(queue.problem for queue in queues):
        columns.append(("problem", False, [escape(queue.problem or "") for queue in queues]))
    return _box("topic", topic.topic, facts, _table(columns, len(topic.queues), "queue"))


def lag_html(lag: _Shown) -> str:
    """Return the HTML of a GroupLag: totals, and a table with a row for each group and queue."""
    rows = lag.table.slice(0, MAX_ROWS).to_pylist()
    facts = {"unread": count_text(lag.messages, "message"), "as of": f"{time_text(lag.at_ms)} UTC"}
    columns: list[_Column] = [
        ("group", False, [escape(row["group"]) for row in rows]),
        ("topic", False, [escape(row["topic"]) for row in rows]),
        ("queue", True, [escape(queue_of(row).id_text) for row in rows]),
        ("state", False, [row["state"] for row in rows]),
        ("group offset", True, [_number(row["groupOffset"]) for row in rows]),
        ("max offset", True, [_number(row["maxOffset"]) for row in rows]),
        ("lag, messages", True, [_number(row["lagMessages"]) for row in rows]),
        ("", False, _bars([row["lagMessages"] or 0 for row in rows])),
        ("lag", True, [NOTHING if row["lagBytes"] is None else bytes_text(row["lagBytes"]) for row in rows]),
        (
            "behind",
            True,
            [NOTHING if row["secondsBehind"] is None else span_text(row["secondsBehind"]) for row in rows],
        ),
        ("member", False, [escape((row["member"] or NOTHING)[:24]) for row in rows]),
    ]
    if lag.group is not None:
        del columns[0]
    what = "lag of group" if lag.group is not None else "lag of all groups of"
    return _box(what, lag.group or lag.path, facts, _table(columns, lag.table.num_rows, "queue"))


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
    values = [
        text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}… ({len(text):,} characters)"
        for text in message.properties.values()
    ]
    columns: list[_Column] = [
        ("property", False, [escape(name) for name in names]),
        ("value", False, [f'<span style="{_LONG}">{escape(value)}</span>' for value in values]),
    ]
    kind, text, left = message.readable_body()
    title = f"body, {bytes_text(len(message.body))} of {kind}"
    more = f"<div>… and {count_text(left, 'byte' if kind == 'bytes' else 'character')} more</div>" if left else ""
    shown = f'<pre style="{_PRE}">{escape(text)}</pre>{more}' if text else ""
    properties = _table(columns, len(names), "property", limit=None) if names else ""
    return _box("message of", message.topic, facts, f"{properties}<div><b>{escape(title)}</b></div>{shown}")


def _topics_table(topics: Sequence[_Shown]) -> str:
    shown = topics[:MAX_ROWS]
    columns: list[_Column] = [
        ("topic", False, [escape(topic.topic) for topic in shown]),
        ("queues", True, [f"{len(topic.queues):,}" for topic in shown]),
        ("messages", True, [f"{topic.messages:,}" for topic in shown]),
        ("", False, _bars([topic.messages for topic in shown])),
        ("records", True, [bytes_text(topic.bytes, topic.is_exact) for topic in shown]),
        ("first stored, UTC", False, [time_text(topic.first_ms) for topic in shown]),
        ("last stored, UTC", False, [time_text(topic.last_ms) for topic in shown]),
    ]
    problems = [sum(queue.problem is not None for queue in topic.queues) for topic in shown]
    if any(problems):
        columns.append(("damaged", False, [count_text(count, "queue") if count else "" for count in problems]))
    return _table(columns, len(topics), "topic")


def _folded(title: str, topics: Sequence[_Shown]) -> str:
    """Return a table of topics that is folded under a title, or "" if `topics` is empty."""
    return f"<details><summary>{escape(title)}</summary>{_topics_table(topics)}</details>" if topics else ""


def _box(what: str, name: str, facts: Mapping[str, str], rest: str) -> str:
    """Return a heading with `what` and `name`, a table of facts, and `rest`, which is HTML."""
    lines = "".join(
        f'<tr><td style="{_CELL.format("left")};opacity:.75">{escape(label)}</td>'
        f'<td style="{_CELL.format("left")}">{escape(value)}</td></tr>'
        for label, value in facts.items()
    )
    title = f'<div style="margin-bottom:4px">{escape(what)} <b style="{_MONO}">{escape(name)}</b></div>'
    return f'<div style="{_BOX}">{title}<table style="{_TABLE}">{lines}</table>{rest}</div>'


def _table(columns: Sequence[_Column], row_count: int, noun: str, limit: int | None = MAX_ROWS) -> str:
    """Return the HTML of a table, followed by a line with the number of rows that were left out, if any.

    `row_count` is the number of all rows, and `noun` is what a row describes.
    """
    sides = ["right" if is_number else "left" for _, is_number, _ in columns]
    head = "".join(
        f'<th style="{_HEAD.format(side)}">{escape(name)}</th>'
        for side, (name, _, _) in zip(sides, columns, strict=True)
    )
    rows = "".join(
        "<tr>"
        + "".join(f'<td style="{_CELL.format(side)}">{cell}</td>' for side, cell in zip(sides, cells, strict=True))
        + "</tr>"
        for cells in zip(*(cells for _, _, cells in columns), strict=True)
    )
    more = ""
    if limit is not None and row_count > limit:
        more = f"<div>… and {count_text(row_count - limit, noun)} more: to_pandas() has all</div>"
    return f'<table style="{_TABLE};{_MONO}"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{more}'


def _bars(numbers: Iterable[int]) -> list[str]:
    """Return the HTML of a bar for each number. The largest number has the longest bar, and 0 has none."""
    numbers = list(numbers)
    most = max(numbers, default=0)
    return [f'<span style="{_BAR.format(_BAR_PIXELS * n / most)}"></span>' if n else "" for n in numbers]


def _range_text(first_ms: int | None, last_ms: int | None) -> str:
    if first_ms is None or last_ms is None:
        return "nothing yet"
    return f"{time_text(first_ms)} to {time_text(last_ms)} UTC, {span_text((last_ms - first_ms) / 1000)}"


def _number(value: Any) -> str:
    return NOTHING if value is None else f"{value:,}"
