"""Pictures of a store, drawn by matplotlib (the extra `plot`): each function returns matplotlib's Axes.

What is drawn is read by whole columns, from units and heads, and sampled where there is much of it; the title says so.
A store is given as its path or as what `open_reader` returned. `ax` is where to draw; a figure is made without it.
Nothing on disk is changed. Colours are those of Okabe and Ito, which colour-blind people tell apart. matplotlib is
imported when something is drawn: without it each function raises ModuleNotFoundError with the pip command.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from rmq_spark.store import (
    GroupLag,
    StoreExplorer,
    bytes_text,
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

MAX_SERIES = 7  # in one picture: as many colours as are told apart; what is less is "others"
MAX_TAGS = 12
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
_OTHERS = "#999999"
_HATCHES = ("", "///", "...", "xxx", "\\\\\\", "ooo", "---")  # for those who see no colour, and for print
_MARKERS = "osD^vPX"
_STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
_MARKED = 40  # so many moments of a line have a marker each; of more they would be a smear
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
_BYTE_TICKS = 8
_QUANTILES = (0.5, 0.95, 0.99)


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
    ax = _axes(ax)
    with _opened(store) as reader:
        series = stored_over_time(reader, topics, what, bins)
    if series is None:
        return _nothing(ax, "no messages")
    edges = [_moment(series.begin_ms + at * series.step_ms) for at in range(len(next(iter(series.values.values()))))]
    bottom: list[float] = [0.0] * len(edges)
    drawn = _largest({name: values.tolist() for name, values in series.values.items()})
    for (name, values), colour, hatch in zip(drawn, _colours(drawn), _HATCHES, strict=False):
        width = _moment(series.begin_ms + series.step_ms) - edges[0]
        ax.bar(
            edges, values, width, bottom, color=colour, hatch=hatch, edgecolor="white", lw=0, align="edge", label=name
        )
        bottom = [below + value for below, value in zip(bottom, values, strict=True)]
    ax.set_ylim(0, max(bottom) * 1.05)  # where a stack is, matplotlib leaves no room above it
    _time_axis(ax, "store time (UTC)")
    _count_axis(ax, what)
    about = "" if series.is_exact else ", estimated from a sample"
    of = f"{topics}: " if isinstance(topics, str) else ""
    ax.set_title(f"{of}{what} stored per {span_text(series.step_ms / 1000)}{about}")
    _legend(ax, len(drawn), is_stacked=True)
    return ax


def plot_queue_skew(store: Store, topic: str, *, what: str = "messages", ax: "Axes | None" = None) -> "Axes":
    """Draw how evenly a topic's messages, or bytes, lie in its queues: a bar for each queue, and their mean.

    Raises NotFoundError for a topic that is not there.
    """
    _refuse_other("what", what, ("messages", "bytes"))
    ax = _axes(ax)
    with _opened(store) as reader:
        summary = reader.topic(topic)
    held = {queue.queue_id: getattr(queue, what) for queue in summary.queues}
    mean = sum(held.values()) / len(held)
    ax.bar(list(held), list(held.values()), width=0.8 if len(held) <= _BARS_APART else 1, color=_COLOURS[0])
    ax.axhline(mean, color=_COLOURS[5], ls="--", lw=1.5, label="mean")
    ax.set_xlabel("queue id")
    if len(held) <= _BARS_NAMED:
        ax.set_xticks(list(held))
    else:
        ax.xaxis.get_major_locator().set_params(integer=True)
    pad = max(0.0, (_BARS_ROOM - len(held)) / 2)
    ax.set_xlim(min(held) - 0.6 - pad, max(held) + 0.6 + pad)
    ax.set_ylim(0, max(*held.values(), 1) * 1.15)
    _count_axis(ax, what)
    most = f", the fullest holds {max(held.values()) / mean:.2f} times the mean" if mean else ""
    about = "" if summary.is_exact or what == "messages" else " (estimated)"
    ax.set_title(f"{topic}: {what}{about} by queue{most}")
    _legend(ax, 2)
    return ax


def plot_tag_shares(store: Store, topic: str, *, ax: "Axes | None" = None) -> "Axes":
    """Draw which share of a topic's messages has which tag, the most frequent first.

    Counted by the tags codes in the units, so that no message is read but a few for the names: tags with the same Java
    hash share a bar. Raises NotFoundError for a topic that is not there.
    """
    ax = _axes(ax)
    with _opened(store) as reader:
        counts = tag_counts(reader, topic)
    total = sum(counts.values())
    if not total:
        return _nothing(ax, f"{topic} has no messages")
    shown = [("(no tag)" if tag is None else _short(tag), count) for tag, count in counts.items()]
    if len(shown) > MAX_TAGS:
        rest = shown[MAX_TAGS - 1 :]
        shown = [*shown[: MAX_TAGS - 1], (f"{len(rest)} others", sum(count for _, count in rest))]
    shown.reverse()  # the first bar is drawn at the bottom
    bars = ax.barh([name for name, _ in shown], [100 * count / total for _, count in shown], color=_COLOURS[0])
    labels = [f"{100 * count / total:.1f} %  ({count:,.0f})" for _, count in shown]
    ax.bar_label(bars, labels, padding=4)
    ax.set_xlim(0, 100 * max(count for _, count in shown) / total * 1.3)
    ax.set_xticks([tick for tick in ax.get_xticks() if tick <= 100])
    ax.set_xlabel("share of messages (%)")
    ax.set_ylabel("tag")
    ax.set_title(f"{topic}: tags of {total:,.0f} messages")
    _frame(ax, "x")
    return ax


def plot_lag(samples: Iterable[GroupLag], *, what: str = "messages", ax: "Axes | None" = None) -> "Axes":
    """Draw how far groups were behind over time, from what `reader.lag()` gave at several moments.

    A line for each queue of one group that has up to seven of them, else for each topic, or for each of several groups.
    `what` is "messages", "bytes" or "seconds" (how long ago the next unread message was stored: of several queues, the
    longest). A queue of which nothing is known counts as 0.
    """
    column = {"messages": "lagMessages", "bytes": "lagBytes", "seconds": "secondsBehind"}
    _refuse_other("what", what, tuple(column))
    ax = _axes(ax)
    taken = sorted(samples, key=lambda sample: sample.at_ms)
    rows = [(sample.at_ms, row) for sample in taken for row in sample.to_arrow().to_pylist()]
    groups = sorted({row["group"] for _, row in rows})
    if not groups:
        return _nothing(ax, "no lag was sampled")
    by_queue = len({(row["topic"], row["queueId"]) for _, row in rows}) <= MAX_SERIES

    def line_of(row: dict[str, Any]) -> str:
        if len(groups) > 1:
            return str(row["group"])
        return f"{row['topic']}/{row['queueId']}" if by_queue else str(row["topic"])

    lines: dict[str, dict[int, float]] = {}
    for at_ms, row in rows:
        line, value = lines.setdefault(line_of(row), {}), row[column[what]] or 0
        held = line.get(at_ms, 0)
        line[at_ms] = max(held, value) if what == "seconds" else held + value
    moments = sorted({sample.at_ms for sample in taken})
    join = max if what == "seconds" else sum
    drawn = _largest({name: [line.get(at, 0) for at in moments] for name, line in lines.items()}, join)
    for (name, values), colour, marker, style in zip(drawn, _colours(drawn), _MARKERS, _STYLES, strict=False):
        times = [_moment(at) for at in moments]
        look = {"marker": marker, "markersize": 4} if len(times) <= _MARKED else {"linestyle": style}
        ax.plot(times, values, color=colour, lw=1.5, label=name, **look)
    ax.set_ylim(bottom=0)
    _time_axis(ax, "time (UTC)")
    _count_axis(ax, what)
    ax.set_title(f"lag of {groups[0] if len(groups) == 1 else f'{len(groups)} groups'} ({what})")
    _legend(ax, len(drawn))
    return ax


def plot_delay(store: Store, topics: str | Sequence[str] | None = None, *, ax: "Axes | None" = None) -> "Axes":
    """Draw how long messages took from their birth at the producer to the store: which share within what time.

    A line for each topic: those named, or all but RocketMQ's own. The legend has the median, 95 % and 99 %. Delays
    below 0 mean that the producer's clock was ahead. Raises NotFoundError for a topic that is not there.
    """
    ax = _axes(ax)
    with _opened(store) as reader:
        named = [topics] if isinstance(topics, str) else topics
        chosen = [topic.topic for topic in reader.summary().topics if not topic.is_system] if named is None else named
        found = [(topic, stored_delays(reader, topic)) for topic in chosen]
    drawn = [(topic, delays) for topic, delays in found if delays is not None]
    drawn = sorted(drawn, key=lambda one: -float(one[1].messages.sum()))[:MAX_SERIES]
    if not drawn:
        return _nothing(ax, "no messages")
    for (topic, delays), colour, marker in zip(drawn, _COLOURS, _MARKERS, strict=False):
        within = delays.messages.cumsum() / delays.messages.sum() * 100
        told = ", ".join(f"{100 * part:g} %: {_ms_text(delays.quantile(part))}" for part in _QUANTILES)
        ax.step(delays.delays_ms, within, where="post", color=colour, lw=1.8, label=f"{topic}  ({told})")
        ax.plot(
            [delays.quantile(part) for part in _QUANTILES], [100 * part for part in _QUANTILES], marker, color=colour
        )
    ax.set_xscale("symlog", linthresh=1)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    ax.set_xlabel("from birth to store (ms, logarithmic)")
    ax.set_ylabel("stored within it (% of messages)")
    ax.set_ylim(0, 103)
    ax.set_title("delay from birth to store")
    _frame(ax, "both")
    ax.legend(loc="lower right", frameon=True, fontsize="small")
    return ax


def plot_segment(store: Store, physical_offset: int | None = None, *, ax: "Axes | None" = None) -> "Axes":
    """Draw what lies where in one segment of the commit log: read it as a page, line by line.

    Records by topic, those that no unit names, the filler before the end of the segment (BLANK), and the tail that is
    not written yet, with stale bytes in it if there are any. The segment is the one that holds the physical offset, or
    the last one. Where it has few records, a line marks where each begins. Raises NotFoundError for no such segment.
    """
    ax = _axes(ax, height=5.6)
    with _opened(store) as reader:
        layout = segment_layout(reader, physical_offset, _ROWS * _CELLS)
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    topics = iter(_SEGMENT_TOPICS)
    colours = [_SEGMENT_COLOURS.get(name) or next(topics) for name in layout.names]
    size = layout.end - layout.begin
    row_bytes = size / _ROWS
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
    begins = (layout.record_begins - layout.begin).tolist()
    if len(begins) <= _RECORDS_DRAWN:
        rows = [int(begin // row_bytes) for begin in begins]
        ax.vlines([begin % row_bytes for begin in begins], rows, [row + 1 for row in rows], color="white", lw=0.7)
    ax.hlines(range(1, _ROWS), 0, row_bytes, color="white", lw=1.2)
    ax.set_xlim(0, row_bytes)
    _bytes_axis(ax.xaxis, row_bytes)
    ax.set_xlabel(f"position in the line (a line is {bytes_text(row_bytes)}, a cell {bytes_text(row_bytes / _CELLS)})")
    shown = range(0, _ROWS, 4)
    ax.set_yticks([row + 0.5 for row in shown], [f"{layout.begin + int(row * row_bytes):,}" for row in shown])
    ax.set_ylabel("physical offset at which the line begins (bytes)")
    ax.set_title(f"segment {PurePath(layout.path).name}, {bytes_text(size)}, {len(begins):,} records")
    patches = [
        Patch(facecolor=colour, edgecolor="#555555", lw=0.5, label=f"{_short(name)}: {bytes_text(held)}")
        for name, colour, held in zip(layout.names, colours, layout.sizes, strict=True)
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


def _axes(ax: "Axes | None", height: float = 4.2) -> "Axes":
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'drawing needs matplotlib: pip install "rmq-spark[plot]".', name="matplotlib"
        ) from error
    if ax is None:
        _, ax = plt.subplots(figsize=(9, height), layout="constrained")
    return ax


def _refuse_other(name: str, value: str, accepted: Sequence[str]) -> None:
    if value not in accepted:
        raise OptionError(f"{name}={value!r} is none of: {', '.join(accepted)}.")


def _moment(time_ms: float) -> datetime:
    return datetime.fromtimestamp(time_ms / 1000, UTC)


def _largest(series: dict[str, list[float]], join: Any = sum) -> list[tuple[str, list[float]]]:
    """Return the series in the order of what they come to, the smallest of more than MAX_SERIES joined."""
    ordered = sorted(series.items(), key=lambda one: -sum(one[1]))
    if len(ordered) <= MAX_SERIES:
        return ordered
    rest = [values for _, values in ordered[MAX_SERIES - 1 :]]
    joined = [join(values) for values in zip(*rest, strict=True)]
    return [*ordered[: MAX_SERIES - 1], (f"{len(rest)} others", joined)]


def _colours(drawn: Sequence[tuple[str, Any]]) -> list[str]:
    return [_OTHERS if name.endswith(" others") else colour for (name, _), colour in zip(drawn, _COLOURS, strict=False)]


def _time_axis(ax: "Axes", label: str) -> None:
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    locator = AutoDateLocator(tz=UTC, maxticks=8)
    ax.xaxis.set_major_locator(locator)
    ax.xaxis.set_major_formatter(ConciseDateFormatter(locator, tz=UTC))
    ax.set_xlabel(label)


def _count_axis(ax: "Axes", what: str) -> None:
    if what == "bytes":
        _bytes_axis(ax.yaxis, ax.get_ylim()[1])
        ax.set_ylabel("bytes of records")
    elif what == "seconds":
        ax.yaxis.set_major_formatter(lambda value, _: span_text(value))
        ax.set_ylabel("time behind")
    else:
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value == int(value) else "")
        ax.set_ylabel("messages")
    _frame(ax, "y")


def _bytes_axis(axis: Any, most: float) -> None:
    """Write bytes at an axis that reaches up to `most`, at round numbers of KiB, MiB …"""
    from matplotlib.ticker import MultipleLocator

    axis.set_major_locator(MultipleLocator(2 ** max(0, math.ceil(math.log2(max(most, 1) / _BYTE_TICKS)))))
    axis.set_major_formatter(lambda value, _: bytes_text(value))


def _frame(ax: "Axes", axis: str) -> None:
    """Leave what helps to read values, and no more."""
    ax.set_axisbelow(True)
    ax.grid(axis=axis, color="#808080", alpha=0.25, lw=0.8)
    ax.spines[["top", "right"]].set_visible(False)


def _legend(ax: "Axes", count: int, is_stacked: bool = False) -> None:
    """Name the series, beside the picture where there are several; of a stack the topmost first."""
    if count > 1:
        ax.legend(reverse=is_stacked, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize="small")


def _nothing(ax: "Axes", why: str) -> "Axes":
    ax.text(0.5, 0.5, why, ha="center", va="center", transform=ax.transAxes)
    ax.set_axis_off()
    return ax


def _ms_text(delay_ms: float) -> str:
    return f"{delay_ms:,.0f} ms" if abs(delay_ms) < 10_000 else span_text(delay_ms / 1000)


def _short(name: str) -> str:
    return name if len(name) <= 40 else f"{name[:39]}…"
