"""Pictures of a store, drawn by matplotlib (the extra `plot`): each function returns matplotlib's Axes.

What is drawn is read by whole columns, from units and heads, and sampled where there is much of it; the title says so.
A store is given as its path or as what `open_reader` returned. `ax` is where to draw; a figure is made without it.
Nothing on disk is changed. Colours are those of Okabe and Ito, which colour-blind people tell apart. matplotlib is
imported when something is drawn: without it each function raises ModuleNotFoundError with the pip command.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from math import isnan, nan
from pathlib import PurePath
from typing import TYPE_CHECKING

from rmq_spark import drawing
from rmq_spark.drawing import MAX_SERIES, shown_name
from rmq_spark.store import (
    GroupLag,
    StoreExplorer,
    bytes_text,
    count_text,
    open_reader,
    segment_layout,
    span_text,
    stored_delays,
    stored_over_time,
    tag_counts,
)
from rmq_spark.store.errors import OptionError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Store = StoreExplorer | str | PurePath

MAX_TAGS = 12
_MARKED = 40  # so many moments of a line have a marker each; of more they would be a smear
_AROUND_ONE_MS = 30_000  # of a line with one moment
_LEAST_SPANS = 12  # room for so many, that one bar is no wall
_SEGMENT_COLOURS = {
    "records without a unit": "#000000",
    "filler (BLANK)": "#7F7F7F",
    "stale bytes behind the end": "#D55E00",
    "zeros behind the end": "#ECECEC",
    "other topics": "#8C6D46",
}
_SEGMENT_TOPICS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442")
_BARS_NAMED = 24
_BARS_APART, _BARS_ROOM = 100, 6  # so many bars have gaps; room for so many, that one is no wall
_ROWS, _CELLS = 32, 128  # of a segment's picture
_RECORDS_DRAWN = 800  # with a line where each begins
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
    """Draw how much was stored when: stacked bars over store time, in at most `bins` equal spans.

    A topic's name gives a colour for each of its queues, several names, or None for all topics but RocketMQ's own, one
    for each topic. `what` is "messages" or "bytes" (of records). Raises NotFoundError for a topic that is not there.
    """
    _refuse_other("what", what, ("messages", "bytes"))
    if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
        raise OptionError(f"bins={bins!r} is no whole number above 0.")
    _refuse_no_topics(topics)
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
    ax.set_ylim(0, max(bottom) * 1.05)  # where a stack is, matplotlib leaves no room above it
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
    """Draw how evenly a topic's messages, or bytes, lie in its queues: a bar for each queue, and their mean.

    A queue that cannot be read has no bar; the title says so. Raises NotFoundError for a topic that is not there.
    """
    _refuse_other("what", what, ("messages", "bytes"))
    _refuse_no_topic(topic)
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
    """Draw which share of a topic's messages has which tag, the most frequent first.

    Counted by the tags codes in the units, so that no message is read but a few for the names: tags with the same Java
    hash share a bar. Raises NotFoundError for a topic that is not there.
    """
    _refuse_no_topic(topic)
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
    rows = range(len(shown))  # by number: two long tags may look the same
    bars = ax.barh(rows, [100 * count / total for _, count in shown], color=drawing.COLOURS[0])
    ax.set_yticks(
        rows, drawing.shown_names(name for name, _ in shown), parse_math=False, fontfamily=drawing.font_families()
    )
    pad = max(0.0, (_BARS_ROOM - len(shown)) / 2)
    ax.set_ylim(-0.6 - pad, len(shown) - 0.4 + pad)
    ax.bar_label(bars, [f"{100 * count / total:.1f} %  ({count:,.0f})" for _, count in shown], padding=4)
    ax.set_xlim(0, 100 * max(count for _, count in shown) / total * 1.3)
    ax.set_xticks([tick for tick in ax.get_xticks() if tick <= 100])
    ax.set_xlabel("share of messages (%)")
    ax.set_ylabel("tag")
    about = () if counts.is_exact else (_ESTIMATED,)
    drawing.title(ax, f"{shown_name(topic)}: tags of {count_text(round(total), 'message')}", *about)
    drawing.frame(ax, "x")
    return ax


def plot_lag(samples: GroupLag | Iterable[GroupLag], *, what: str = "messages", ax: "Axes | None" = None) -> "Axes":
    """Draw how far groups were behind over time, from what `reader.lag()` gave at several moments.

    A line for each queue of one group that has up to seven of them, else for each topic, or for each of several groups.
    `what` is "messages", "bytes" or "seconds" (how long ago the next unread message was stored: of several queues, the
    longest). Queues at whose offset there are no messages any more, or none yet, count as 0; the title says how many.
    """
    column = {"messages": "lagMessages", "bytes": "lagBytes", "seconds": "secondsBehind"}
    _refuse_other("what", what, tuple(column))
    taken = [samples] if isinstance(samples, GroupLag) else list(samples) if isinstance(samples, Iterable) else [None]
    if not all(isinstance(sample, GroupLag) for sample in taken):
        raise OptionError("samples are accepted as what reader.lag() gave, one or a list of them.")
    ax = drawing.axes(ax)
    taken.sort(key=lambda sample: sample.at_ms)
    # By moment and queue: of two samples in one ms the second one counts, and not both.
    rows = {
        (sample.at_ms, row["group"], row["topic"], row["queueId"]): row
        for sample in taken
        for row in sample.to_arrow().to_pylist()
    }
    groups = sorted({group for _, group, _, _ in rows})
    if not groups:
        return drawing.nothing(ax, "no lag was sampled")
    by_queue = len({key[2:] for key in rows}) <= MAX_SERIES
    lines: dict[str, dict[int, float]] = {}
    join = max if what == "seconds" else sum
    for (at_ms, group, topic, queue_id), row in rows.items():
        name = group if len(groups) > 1 else f"{topic}/{queue_id}" if by_queue else topic
        line = lines.setdefault(name, {})
        line[at_ms] = join((line.get(at_ms, 0), row[column[what]] or 0))
    moments = sorted({sample.at_ms for sample in taken})
    drawn = drawing.largest({name: [line.get(at, nan) for at in moments] for name, line in lines.items()}, join)
    names = drawing.shown_names(name for name, _ in drawn)
    looks = zip(names, drawn, drawing.colours(drawn), drawing.MARKERS, drawing.STYLES, strict=False)
    for name, (_, values), colour, marker, style in looks:
        known = [(drawing.moment(at), value) for at, value in zip(moments, values, strict=True) if not isnan(value)]
        look = {"marker": marker, "markersize": 4} if len(moments) <= _MARKED else {"linestyle": style}
        ax.plot(*zip(*known, strict=True), color=colour, lw=1.5, label=name, **look)
    if len(moments) == 1:
        ax.set_xlim(drawing.moment(moments[0] - _AROUND_ONE_MS), drawing.moment(moments[0] + _AROUND_ONE_MS))
    drawing.time_axis(ax, "time (UTC)")
    drawing.count_axis(ax, what)
    odd = Counter({key[1:]: row["state"] for key, row in rows.items()}.values())  # as of the last moment of each queue
    more = [f"{count_text(odd[state], 'queue')} {state}" for state in ("ahead", "gone") if odd[state]]
    of = shown_name(groups[0]) if len(groups) == 1 else f"{len(groups)} groups"
    drawing.title(ax, f"lag of {of} ({what})", *more)
    drawing.legend(ax, len(drawn))
    return ax


def plot_delay(store: Store, topics: str | Sequence[str] | None = None, *, ax: "Axes | None" = None) -> "Axes":
    """Draw how long messages took from their birth at the producer to the store: which share within what time.

    A line for each topic: those named, or all but RocketMQ's own; of more than seven those with most messages. The
    legend says within what time 50, 95 and 99 % were stored. Delays below 0 mean that the producer's clock was ahead.
    Raises NotFoundError for a topic that is not there.
    """
    _refuse_no_topics(topics)
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
    """Draw what lies where in one segment of the commit log: read it as a page, line by line.

    Records by topic, those that no unit names, the filler before the end of the segment (BLANK), and the tail that is
    not written yet, with stale bytes in it if there are any. The segment is the one that holds the physical offset, or
    the last one; of one with next to nothing in it only the beginning is shown. Where it has few records, a line marks
    where each begins. Raises NotFoundError for no such segment.
    """
    ax = drawing.axes(ax, height=5.6)
    with _opened(store) as reader:
        reader.refresh()
        if physical_offset is None and not reader.log.segments.segments:
            return drawing.nothing(ax, "no messages")
        layout = segment_layout(reader, physical_offset, _ROWS * _CELLS)
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    topics = iter(_SEGMENT_TOPICS)
    colours = [_SEGMENT_COLOURS.get(name) or next(topics) for name in layout.names]
    size = layout.end - layout.begin
    row_bytes = (layout.shown_end - layout.begin) / _ROWS
    picture = layout.cells.reshape(_ROWS, _CELLS)
    last = max(len(colours) - 1, 1)
    ax.imshow(
        picture,
        ListedColormap(colours if len(colours) > 1 else colours * 2),
        vmin=0,
        vmax=last,
        aspect="auto",
        interpolation="nearest",
        extent=(0, row_bytes, _ROWS, 0),
    )
    count = len(layout.record_begins)
    if count <= _RECORDS_DRAWN:
        begins = (layout.record_begins - layout.begin).tolist()
        rows = [int(begin // row_bytes) for begin in begins]
        ax.vlines([begin % row_bytes for begin in begins], rows, [row + 1 for row in rows], color="white", lw=0.7)
    ax.hlines(range(1, _ROWS), 0, row_bytes, color="white", lw=1.2)
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
        Patch(facecolor=colour, edgecolor="#555555", lw=0.5, label=f"{name}: {bytes_text(held)}")
        for name, colour, held in zip(drawing.shown_names(layout.names), colours, layout.sizes, strict=True)
    ]
    ax.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize="small")
    return ax


@contextmanager
def _opened(store: Store) -> Iterator[StoreExplorer]:
    """Give a reader: the caller's, which stays open, or one for this picture."""
    if isinstance(store, StoreExplorer):
        yield store
        return
    with open_reader(store) as reader:
        yield reader


def _refuse_no_topic(topic: str) -> None:
    if not isinstance(topic, str):
        raise OptionError(f"topic={topic!r} is no text. Give the name of one topic.")


def _refuse_no_topics(topics: str | Sequence[str] | None) -> None:
    is_list = isinstance(topics, Sequence | set | frozenset) and not isinstance(topics, bytes)
    if topics is not None and not (is_list and all(isinstance(name, str) for name in topics)):
        raise OptionError(f"topics={topics!r} is accepted as a topic's name, a list of names, or None for all.")


def _refuse_other(name: str, value: str, accepted: Sequence[str]) -> None:
    if value not in accepted:
        raise OptionError(f"{name}={value!r} is none of: {', '.join(accepted)}.")
