"""Plots of a store with matplotlib (the extra `plot`). Each function returns the matplotlib Axes that it drew on.

The argument `store` is a path or the result of `open_reader`. `ax` is the Axes to draw on; by default a new figure is
created. The functions read consume-queue entries and record headers, and change nothing in the store. From a large
store they read only a sample, and the title then says so. The background is transparent, and all colours are readable
on light and on dark pages. Colour-blind readers can distinguish them. If matplotlib is not installed, the functions
raise ModuleNotFoundError with the pip command.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from math import isnan, nan
from pathlib import PurePath
from typing import TYPE_CHECKING

from rmq_spark import byte_cells, drawing
from rmq_spark.drawing import MAX_SERIES, shown_name
from rmq_spark.store import (
    GroupLag,
    StoreExplorer,
    bytes_text,
    count_text,
    open_reader,
    record_fields,
    segment_layout,
    span_text,
    stored_delays,
    stored_over_time,
    tag_counts,
)
from rmq_spark.store.errors import OptionError
from rmq_spark.store.model import QueueKey

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Store = StoreExplorer | str | PurePath

MAX_TAGS = 12
_MAX_MARKERS = 40  # lines with more points have no markers
_AROUND_ONE_MS = 30_000  # the length of the x axis on each side of a single point
_LEAST_SPANS = 12  # the minimum width of the x axis in bars, so that a single bar is not too wide
_SEGMENT_COLOURS = {
    "records without an entry": drawing.CRIMSON,
    "filler (BLANK)": drawing.OTHERS,
    "stale bytes after the end": drawing.COLOURS[5],
    "zeros after the end": f"{drawing.INK}30",  # nearly transparent: the background of the picture
    "other topics": drawing.COLOURS[6],
}
_SEGMENT_TOPICS = (*drawing.COLOURS[:5], drawing.VIOLET)
_LINE_PARTS = 8  # the rows of pixels in a line of a segment's picture; the last one is the gap to the next line
_BARS_NAMED = 24
_BARS_APART, _BARS_ROOM = 100, 6  # the maximum number of bars with gaps; the minimum width of the axis in bars
_ROWS, _CELLS = 32, 128  # lines in the plot of a segment, and cells in a line
_RECORDS_DRAWN = 800  # the maximum number of records whose beginnings are marked
_QUANTILES = (0.5, 0.95, 0.99)
_ESTIMATED = "estimated from a sample"


def plot_over_time(
    store: Store,
    topics: str | Sequence[str] | None = None,
    *,
    what: str = "messages",
    bins: int = 60,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw the messages or bytes stored over time, as stacked bars in at most `bins` equal intervals.

    If `topics` is the name of one topic, each queue has a colour. If it is a list of names, each topic has a colour;
    None means all topics except RocketMQ's own. `what` is "messages" or "bytes" (the size of their records). Raises
    NotFoundError for an unknown topic.
    """
    _check_choice("what", what, ("messages", "bytes"))
    if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
        raise OptionError(f"bins={bins!r} is not valid; expected an integer ≥ 1.")
    _check_topics(topics)
    ax = drawing.axes(ax)
    with _opened(store) as reader:
        series = stored_over_time(reader, topics, what, bins)
    if series is None:
        return drawing.nothing(ax, "no messages")
    count = len(next(iter(series.values.values())))
    edges = [drawing.moment(series.begin_ms + at * series.step_ms) for at in range(count)]
    width = timedelta(milliseconds=series.step_ms)
    bottom: list[float] = [0.0] * len(edges)
    drawn = drawing.largest({name: values.tolist() for name, values in series.values.items()})
    names = drawing.shown_names(name for name, _ in drawn)
    for name, (_, values), colour, hatch in zip(names, drawn, drawing.colours(drawn), drawing.HATCHES, strict=False):
        look = {"color": colour, "hatch": hatch, "edgecolor": "white", "lw": 0}
        ax.bar(edges, values, width, bottom, align="edge", label=name, **look)
        bottom = [below + value for below, value in zip(bottom, values, strict=True)]
    ax.set_ylim(0, max(bottom) * 1.05)  # matplotlib leaves no margin above stacked bars
    room = max(0, _LEAST_SPANS - count) * width / 2
    ax.set_xlim(edges[0] - room, edges[-1] + width + room)
    drawing.time_axis(ax, "store time (UTC)")
    drawing.count_axis(ax, what)
    of = f"{shown_name(topics)}: " if isinstance(topics, str) else ""
    about = () if series.is_exact else (_ESTIMATED,)
    drawing.title(ax, f"{of}{what} stored per {span_text(series.step_ms / 1000)}", *about)
    drawing.legend(ax, len(drawn), is_stacked=True)
    return ax


def plot_queue_skew(store: Store, topic: str, *, what: str = "messages", ax: "Axes | None" = None) -> "Axes":
    """Draw how a topic's messages are distributed over its queues: a bar for each queue, and a line for the mean.

    `what` is "messages", or "bytes" for the size of their records. Queues that cannot be read are left out, and the
    title says how many. Raises NotFoundError for an unknown topic.
    """
    _check_choice("what", what, ("messages", "bytes"))
    _check_topic(topic)
    ax = drawing.axes(ax)
    with _opened(store) as reader:
        summary = reader.topic(topic)
    readable = [queue for queue in summary.queues if queue.problem is None or queue.messages]
    held = {queue.queue_id: getattr(queue, what) for queue in readable}
    if not held:
        return drawing.nothing(ax, f"{shown_name(topic)}: no queue can be read")
    mean = sum(held.values()) / len(held)
    ax.bar(list(held), list(held.values()), width=0.8 if len(held) <= _BARS_APART else 1, color=drawing.COLOURS[0])
    ax.axhline(mean, color=drawing.COLOURS[5], ls="--", lw=1.5, label="mean")
    ax.set_xlabel("queue id")
    if len(held) <= _BARS_NAMED:
        ax.set_xticks(list(held))
    else:
        ax.xaxis.get_major_locator().set_params(integer=True)
    pad = max(0.0, (_BARS_ROOM - len(held)) / 2)
    ax.set_xlim(min(held) - 0.6 - pad, max(held) + 0.6 + pad)
    ax.set_ylim(0, max(*held.values(), 1) * 1.15)
    drawing.count_axis(ax, what)
    more = [f"the fullest holds {max(held.values()) / mean:.2f} times the mean" if mean else "all are empty"]
    if left_out := len(summary.queues) - len(readable):
        more.append(f"{count_text(left_out, 'queue')} cannot be read and left out")
    if damaged := sum(queue.problem is not None for queue in readable):
        more.append(f"{count_text(damaged, 'queue')} damaged")
    about = "" if summary.is_exact or what == "messages" else f" ({_ESTIMATED})"
    drawing.title(ax, f"{shown_name(topic)}: {what}{about} by queue", *more)
    drawing.legend(ax, 2)
    return ax


def plot_tag_shares(store: Store, topic: str, *, ax: "Axes | None" = None) -> "Axes":
    """Draw the share of each tag in a topic's messages, the most frequent first.

    Tags are counted by their hashes (Java's String#hashCode), which consume-queue entries contain. Only a few messages
    are read, to find the tags' names. So tags with the same hash share a bar. Raises NotFoundError for an unknown
    topic.
    """
    _check_topic(topic)
    ax = drawing.axes(ax)
    with _opened(store) as reader:
        counts = tag_counts(reader, topic)
    total = sum(counts.messages.values()) + counts.rare_messages
    if not total:
        return drawing.nothing(ax, f"{shown_name(topic)}: no messages")
    shown = [("(no tag)" if tag is None else tag, count) for tag, count in counts.messages.items()]
    rest = shown[MAX_TAGS - 1 :] if len(shown) + (counts.rare_tags > 0) > MAX_TAGS else []
    if rest or counts.rare_tags:
        others = f"{len(rest) + counts.rare_tags:,} others"
        shown = [*shown[: MAX_TAGS - 1], (others, sum(count for _, count in rest) + counts.rare_messages)]
    shown.reverse()  # the first bar is drawn at the bottom
    rows = range(len(shown))  # not names: two shortened names may be equal
    bars = ax.barh(rows, [100 * count / total for _, count in shown], color=drawing.COLOURS[0])
    ax.set_yticks(
        rows, drawing.shown_names(name for name, _ in shown), parse_math=False, fontfamily=drawing.font_families()
    )
    pad = max(0.0, (_BARS_ROOM - len(shown)) / 2)
    ax.set_ylim(-0.6 - pad, len(shown) - 0.4 + pad)
    ax.bar_label(
        bars, [f"{100 * count / total:.1f} %  ({count:,.0f})" for _, count in shown], padding=4, color=drawing.INK
    )
    ax.set_xlim(0, 100 * max(count for _, count in shown) / total * 1.3)
    ax.set_xticks([tick for tick in ax.get_xticks() if tick <= 100])
    ax.set_xlabel("share of messages (%)")
    ax.set_ylabel("tag")
    about = () if counts.is_exact else (_ESTIMATED,)
    drawing.title(ax, f"{shown_name(topic)}: tags of {count_text(round(total), 'message')}", *about)
    drawing.frame(ax, "x")
    return ax


def plot_lag(samples: GroupLag | Iterable[GroupLag], *, what: str = "messages", ax: "Axes | None" = None) -> "Axes":
    """Draw the lag of consumer groups over time. `samples` are one or several results of `reader.lag()`.

    If the samples have one group, there is a line for each of its queues, or for each topic if there are more than
    seven queues. If they have several groups, there is a line for each group. `what` is "messages", "bytes", or
    "seconds" for the age of the oldest unread message; a line for several queues shows their maximum age. A queue whose
    state is "ahead" or "gone" has the lag 0, and the title says how many there are, and how many are "away". A cluster
    may have null values, which are not drawn, and its bytes are estimates.
    """
    column = {"messages": "lagMessages", "bytes": "lagBytes", "seconds": "secondsBehind"}
    _check_choice("what", what, tuple(column))
    taken = [samples] if isinstance(samples, GroupLag) else list(samples) if isinstance(samples, Iterable) else [None]
    if not all(isinstance(sample, GroupLag) for sample in taken):
        raise OptionError("samples: expected a result of reader.lag(), or a list of them.")
    ax = drawing.axes(ax)
    taken.sort(key=lambda sample: sample.at_ms)
    # By time and queue: if two samples have the same ms, the second one replaces the first.
    rows = {
        (sample.at_ms, row["group"], QueueKey(row["topic"], row["queueId"], row.get("brokerName") or "")): row
        for sample in taken
        for row in sample.to_arrow().to_pylist()
    }
    groups = sorted({group for _, group, _ in rows})
    if not groups:
        return drawing.nothing(ax, "no lag was sampled")
    by_queue = len({queue for _, _, queue in rows}) <= MAX_SERIES
    lines: dict[str, dict[int, float]] = {}
    join = max if what == "seconds" else sum
    for (at_ms, group, queue), row in rows.items():
        if row[column[what]] is None and row["state"] != "gone":
            continue  # not known
        name = group if len(groups) > 1 else str(queue) if by_queue else queue.topic
        line = lines.setdefault(name, {})
        line[at_ms] = join((line.get(at_ms, 0), row[column[what]] or 0))
    if not lines:
        return drawing.nothing(ax, "the lag is not known")
    moments = sorted({sample.at_ms for sample in taken})
    drawn = drawing.largest({name: [line.get(at, nan) for at in moments] for name, line in lines.items()}, join)
    names = drawing.shown_names(name for name, _ in drawn)
    looks = zip(names, drawn, drawing.colours(drawn), drawing.MARKERS, drawing.STYLES, strict=False)
    for name, (_, values), colour, marker, style in looks:
        known = [(drawing.moment(at), value) for at, value in zip(moments, values, strict=True) if not isnan(value)]
        look = {"marker": marker, "markersize": 4} if len(moments) <= _MAX_MARKERS else {"linestyle": style}
        ax.plot(*zip(*known, strict=True), color=colour, lw=1.5, label=name, **look)
    if len(moments) == 1:
        ax.set_xlim(drawing.moment(moments[0] - _AROUND_ONE_MS), drawing.moment(moments[0] + _AROUND_ONE_MS))
    drawing.time_axis(ax, "time (UTC)")
    drawing.count_axis(ax, what)
    odd = Counter({key[1:]: row["state"] for key, row in rows.items()}.values())  # the last state of each queue
    more = [f"{count_text(odd[state], 'queue')} {state}" for state in ("ahead", "gone", "away") if odd[state]]
    of = shown_name(groups[0]) if len(groups) == 1 else f"{len(groups)} groups"
    drawing.title(ax, f"lag of {of} ({what})", *more)
    drawing.legend(ax, len(drawn))
    return ax


def plot_delay(store: Store, topics: str | Sequence[str] | None = None, *, ax: "Axes | None" = None) -> "Axes":
    """Draw the cumulative distribution of the delay between a message's born timestamp and its store timestamp.

    There is a line for each topic in `topics`; None means all topics except RocketMQ's own. At most seven topics are
    drawn, those with the most messages. The legend shows the delays within which 50, 95 and 99 % of the messages were
    stored. A negative delay means that the producer's clock was ahead of the broker's. Raises NotFoundError for an
    unknown topic.
    """
    _check_topics(topics)
    ax = drawing.axes(ax, height=4.8)
    with _opened(store) as reader:
        named = [topics] if isinstance(topics, str) else topics
        if named is None:
            held = [topic for topic in reader.summary().topics if not topic.is_system and topic.messages]
        else:
            held = [reader.topic(topic) for topic in dict.fromkeys(named)]
        chosen = sorted(held, key=lambda topic: -topic.messages)[:MAX_SERIES]
        found = [(topic.topic, stored_delays(reader, topic.topic)) for topic in chosen]
    drawn = [(topic, delays) for topic, delays in found if delays is not None]
    if not drawn:
        return drawing.nothing(ax, "no messages")
    least = min(int(delays.delays_ms[0]) for _, delays in drawn)
    most = max(int(delays.delays_ms[-1]) for _, delays in drawn)
    drawing.spans_axis(ax, least, most)
    names = drawing.shown_names(topic for topic, _ in drawn)
    for name, (_, delays), colour, marker in zip(names, drawn, drawing.colours(drawn), drawing.MARKERS, strict=False):
        within = (delays.messages.cumsum() / delays.messages.sum() * 100).tolist()
        first, last = ax.get_xlim()
        times = [first, int(delays.delays_ms[0]), *delays.delays_ms.tolist(), last]
        ax.step(times, [0, 0, *within, 100], where="post", color=colour, lw=1.8)
        at = [delays.quantile(part) for part in _QUANTILES]
        told = ", ".join(
            f"{100 * part:g} % within {drawing.ms_text(delay)}" for part, delay in zip(_QUANTILES, at, strict=True)
        )
        label = f"{name}: {told}"
        ax.plot(at, [100 * part for part in _QUANTILES], marker, ls="", color=colour, label=label, clip_on=False)
    ax.set_xlabel("from birth to store (logarithmic)")
    ax.set_ylabel("stored within it (% of messages)")
    ax.set_ylim(0, 103)
    more = [f"the largest {len(chosen)} of {len(held)} topics"] if len(held) > len(chosen) else []
    more += [] if all(delays.is_exact for _, delays in drawn) else [_ESTIMATED]
    drawing.title(ax, "delay from birth to store", *more)
    drawing.frame(ax, "both")
    drawing.legend_below(ax)
    return ax


def plot_segment(store: Store, physical_offset: int | None = None, *, ax: "Axes | None" = None) -> "Axes":
    """Draw the layout of one segment (file) of the commit log, line by line like a page of text.

    The segment is the one that contains `physical_offset`, in bytes; by default the last one. The colours show the
    records of each topic, records without a consume-queue entry, the filler at the end (BLANK), and the unwritten rest,
    which may have stale bytes. If most of the segment is unwritten, only its beginning is drawn. If there are few
    records, white lines mark where each one begins. Raises NotFoundError if no segment contains the offset.
    """
    ax = drawing.axes(ax, height=5.6)
    with _opened(store) as reader:
        reader.refresh()
        if physical_offset is None and not reader.log.segments.segments:
            return drawing.nothing(ax, "no messages")
        layout = segment_layout(reader, physical_offset, _ROWS * _CELLS)
    from matplotlib.colors import to_rgba_array
    from matplotlib.patches import Patch

    topics = iter(_SEGMENT_TOPICS)
    colours = [_SEGMENT_COLOURS.get(name) or next(topics) for name in layout.names]
    size = layout.end - layout.begin
    row_bytes = (layout.shown_end - layout.begin) / _ROWS
    picture = to_rgba_array(colours)[layout.cells.reshape(_ROWS, _CELLS)].repeat(_LINE_PARTS, axis=0)
    picture[_LINE_PARTS - 1 :: _LINE_PARTS, :, 3] = 0
    ax.imshow(picture, aspect="auto", interpolation="nearest", extent=(0, row_bytes, _ROWS, 0))
    count = len(layout.record_begins)
    if count <= _RECORDS_DRAWN:
        begins = (layout.record_begins - layout.begin).tolist()
        rows = [int(begin // row_bytes) for begin in begins]
        ends = [row + 1 - 1 / _LINE_PARTS for row in rows]
        ax.vlines([begin % row_bytes for begin in begins], rows, ends, color=drawing.CELL_INK, lw=0.7)
    ax.set_xlim(0, row_bytes)
    drawing.bytes_axis(ax.xaxis, row_bytes, ticks=4)
    ax.set_xlabel(f"position in the line (a line is {bytes_text(row_bytes)}, a cell {bytes_text(row_bytes / _CELLS)})")
    shown = range(0, _ROWS, 4)
    ax.set_yticks([row + 0.5 for row in shown], [f"{layout.begin + int(row * row_bytes):,}" for row in shown])
    ax.set_ylabel("physical offset at which the line begins (bytes)")
    more = [] if layout.shown_end == layout.end else [f"its first {bytes_text(row_bytes * _ROWS)}: zeros follow"]
    about = f"segment {PurePath(layout.path).name}, {bytes_text(size)}, {count_text(count, 'record')}"
    drawing.title(ax, about, *more)
    patches = [
        Patch(facecolor=colour, edgecolor=drawing.INK, lw=0.5, label=f"{name}: {bytes_text(held)}")
        for name, colour, held in zip(drawing.shown_names(layout.names), colours, layout.sizes, strict=True)
    ]
    look = {"frameon": False, "fontsize": "small", "labelcolor": drawing.INK}
    ax.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.01, 1), **look)
    return ax


def plot_record(store: Store, queue: QueueKey, queue_offset: int, *, ax: "Axes | None" = None) -> "Axes":
    """Draw the record of a message byte by byte, as it is in the commit log: a cell for each byte, coloured by field.

    The message is the one at `queue_offset` of `queue`. The first 2 KiB of a large record are drawn, and a line says
    how many bytes follow; the list below has the values of all fields. Raises NotFoundError if the queue does not
    exist, OffsetRangeError if it has no message there, and DamageError if the message is damaged.
    """
    with _opened(store) as reader:
        reader.refresh()
        data, fields = record_fields(reader, queue, queue_offset)
    named = [(field.position, field.size, field.name, field.value) for field in fields]
    title = f"record of {shown_name(str(queue))}, queue offset {queue_offset:,}: {count_text(len(data), 'byte')}"
    return plot_bytes(data, named, title=title, text=("body", "topic", "properties"), ax=ax)


def plot_bytes(
    data: bytes,
    fields: Sequence[tuple[int, int, str, object]],
    *,
    title: str = "",
    text: Collection[str] = (),
    bytes_per_line: int = 32,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw bytes, one cell each, coloured by field, with the number, name and value of each field below.

    A field is (position, size, name, value), with position and size in bytes. Bytes are shown in hex, and those of the
    fields in `text` as characters where they are printable ASCII. Bytes of no field are not drawn. If there are more
    than 2 KiB, the first 2 KiB are drawn, and a line says how many bytes follow.
    """
    if isinstance(bytes_per_line, bool) or not isinstance(bytes_per_line, int) or bytes_per_line < 1:
        raise OptionError(f"bytes_per_line={bytes_per_line!r} is not valid; expected an integer ≥ 1.")
    return byte_cells.draw(ax, data, fields, title, text, bytes_per_line)


@contextmanager
def _opened(store: Store) -> Iterator[StoreExplorer]:
    """Yield a reader of the store. If the caller gave a reader, it is used and stays open; else one is opened."""
    if isinstance(store, StoreExplorer):
        yield store
        return
    with open_reader(store) as reader:
        yield reader


def _check_topic(topic: str) -> None:
    if not isinstance(topic, str):
        raise OptionError(f"topic={topic!r} is not a string. Give the name of one topic.")


def _check_topics(topics: str | Sequence[str] | None) -> None:
    is_list = isinstance(topics, Sequence | set | frozenset) and not isinstance(topics, bytes)
    if topics is not None and not (is_list and all(isinstance(name, str) for name in topics)):
        raise OptionError(f"topics={topics!r} is not valid; expected a topic's name, a list of names, or None for all.")


def _check_choice(name: str, value: str, accepted: Sequence[str]) -> None:
    if value not in accepted:
        raise OptionError(f"{name}={value!r} is none of: {', '.join(accepted)}.")
