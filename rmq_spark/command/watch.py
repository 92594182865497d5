"""`rmq watch`: live rates of topics, and the lag of groups with its trend. Read-only.

On a terminal one screen is drawn again after each interval. In a pipe each topic and group has a line, and with --json
each interval has one.
"""

import functools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import click

import rmq_spark
from rmq_spark.command.colours import Meaning, has_colours
from rmq_spark.command.completion import complete_groups, complete_topics
from rmq_spark.command.output import bytes_text, cell, duration_text, json_line, printable, rows_of, say, typed
from rmq_spark.command.parameters import Moment, as_json, examples, metrics_option
from rmq_spark.command.place import Place, PlaceCommand, reads_place
from rmq_spark.command.queue_views import ClusterView, StoreView, expand_topics, open_view
from rmq_spark.command.rates import (
    GROWING,
    SHRINKING,
    STEADY,
    GroupLook,
    GroupTrend,
    Look,
    TopicTrend,
    group_trends,
    new_ranges,
    topic_trends,
)
from rmq_spark.new_lines import NewLines
from rmq_spark.store import sum_lag
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import is_system_topic

if TYPE_CHECKING:
    from rich.console import RenderableType

_ARROWS = {GROWING: "↑", SHRINKING: "↓", STEADY: "="}
_STYLES = {GROWING: Meaning.WARNING, SHRINKING: Meaning.GOOD, STEADY: "", None: ""}
_OTHER_LINES = 7  # of the screen: the time, two heads with a line below, one between the tables, and the last one
_GAP = 3  # columns between two columns
_LEAST_NAME = 8


class Update(NamedTuple):
    """The changes of the `seconds` since the last look that succeeded, until `time_ms` (ms since the epoch).

    If the look at `time_ms` failed, `problem` says why, and the lists are empty.
    """

    time_ms: int
    seconds: float
    topics: list[TopicTrend]
    groups: list[GroupTrend]
    problem: str | None = None


class Watch:
    """Looks at a place again and again. `wait` waits for the next look, and `monotonic_s` never runs back.

    `list_topics` is called for each look, so that a topic that a pattern matches later is watched too. Without it all
    topics with messages are watched, except RocketMQ's own.
    """

    def __init__(
        self,
        view: StoreView | ClusterView,
        look_at_groups: Callable[[], dict[str, GroupLook]],
        list_topics: Callable[[], Sequence[str]] | None,
        wait: Callable[[], None],
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._view, self._look_at_groups, self._list_topics = view, look_at_groups, list_topics
        self._wait, self._monotonic_s = wait, monotonic_s
        self._listed: set[str] = set()  # all topics so far
        self._unreadable: set[str] = set()  # topics that were named because they cannot be read

    def updates(self, count: int | None) -> Iterator[Update]:
        """Yield `count` updates, or endlessly many if it is None. Each takes as long as `wait` does.

        Raises the error of the first look. If servers do not answer later, or what is watched does not exist any more,
        the update has a problem.
        """
        before = self._look()
        given = 0
        while count is None or given < count:
            self._wait()
            try:
                now = self._look()
                sizes = self._view.bytes_of(new_ranges(before, now))
            except (rmq_spark.BackendUnavailableError, rmq_spark.NotFoundError) as error:
                problem = printable(typed(str(error)))
                yield Update(_now_ms(), self._monotonic_s() - before.at_s, [], [], problem)
            else:
                topics = [one for one in topic_trends(before, now, sizes) if self._list_topics or one.messages]
                yield Update(_now_ms(), now.at_s - before.at_s, topics, group_trends(before, now))
                before = now
            given += 1

    def _look(self) -> Look:
        self._view.refresh()
        if self._list_topics is not None:
            names = self._list_topics()
        else:
            names = [name for name in self._view.topics() if not is_system_topic(name)]
        queues = [queue for name in names for queue in self._queues(name)]
        self._listed.update(queue.topic for queue in queues)
        bounds = self._view.bounds(queues)
        return Look(self._monotonic_s(), bounds, self._look_at_groups(), frozenset(self._listed))

    def _queues(self, name: str) -> list[QueueKey]:
        try:
            return self._view.queues(name)
        except rmq_spark.NotFoundError:
            if self._list_topics is not None:
                raise
            return []  # the topic was deleted after it was listed
        except rmq_spark.OptionError as error:
            if self._list_topics is not None:
                raise
            if name not in self._unreadable:
                self._unreadable.add(name)
                say(f"{printable(name)} is not watched: {printable(typed(str(error)))}")
            return []


def _is_screen() -> bool:
    """Return whether stdout is a terminal on which rich draws: on a dumb one it draws nothing."""
    from rich.console import Console

    return sys.stdout.isatty() and not Console().is_dumb_terminal


def _now_ms() -> int:
    return Moment().convert("now", None, None)


@click.command(
    cls=PlaceCommand,
    epilog=examples(
        "rmq watch store",
        "rmq watch -n ns1:9876 'orders*' --group billing",
        "rmq watch store --json --interval 10 | jq .groups",
    ),
)
@reads_place("topics", data=as_json)
@click.argument("topics", metavar="[TOPIC]...", nargs=-1, shell_complete=complete_topics)
@click.option(
    "--group",
    "groups",
    multiple=True,
    shell_complete=complete_groups,
    help="Only the lag of this group. Repeatable.  [default: all]",
)
@click.option(
    "--interval",
    type=click.FloatRange(min=0.01),
    default=2,
    show_default=True,
    metavar="SECONDS",
    help="Time between two looks.",
)
@click.option("--count", type=click.IntRange(min=1), help="End after this number of intervals.  [default: never]")
@metrics_option
def watch(
    place: Place,
    as_json: bool,
    topics: tuple[str, ...],
    groups: tuple[str, ...],
    interval: float,
    count: int | None,
    metrics: str | None,
) -> None:
    """Show messages and bytes per second of topics, and the lag of groups with its trend, until Ctrl-C.

    TOPIC is a name, a list with commas, or a pattern of a shell in quotes, such as 'order*'. Topics that match later
    are shown too. Without TOPIC: all topics with messages, except RocketMQ's own.

    Rates are those of the last interval,
    and so is the trend: how the lag changes in a second. Bytes are the size of records in the commit log, in a cluster
    an estimate.

    While the cluster does not answer, or a TOPIC does not exist any more, the reason is shown. The next rates are then
    those since the last answer.

    --json prints one object per interval. In a pipe, or with TERM=dumb, each topic and each group has a line per
    interval.
    """
    with place.open() as reader, ExitStack() as stack:
        view = open_view(place, reader)
        if metrics is not None:
            page = rmq_spark.serve_metrics(metrics, **place.arguments, groups=groups or None)
            say(f"Metrics are at {stack.enter_context(page).url}")
        look_at_groups = Groups(reader, groups, stack.enter_context(NewLines())).look
        list_topics = functools.partial(expand_topics, topics, reader.topics, view.readable) if topics else None
        watching = Watch(view, look_at_groups, list_topics, lambda: time.sleep(interval))
        with Screen(place, interval) if not as_json and _is_screen() else Lines(as_json=as_json) as shown:
            for update in watching.updates(count):
                shown.show(update)


class Groups:
    """The lag of groups of a place. If the account may not see it, this is printed once, and they are left out."""

    def __init__(self, reader: Any, names: Sequence[str], lines: NewLines) -> None:
        self._reader, self._names, self._lines = reader, names, lines
        self._is_refused = False

    def look(self) -> dict[str, GroupLook]:
        """Return the lag of each group."""
        self._lines.begin_look()
        if self._is_refused:
            return {}
        try:
            rows = [row for name in self._names or (None,) for row in rows_of(self._reader.lag(name))]
        except rmq_spark.NoPermissionError as error:
            if self._names:
                raise
            self._is_refused = True
            say(f"The lag of groups is not known: {printable(typed(str(error)))}")
            return {}
        found: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            found.setdefault(row["group"], []).append(row)
        totals = {group: sum_lag(of) for group, of in found.items()}
        return {group: GroupLook(one.messages, one.seconds_behind, one.unknown_queues) for group, one in totals.items()}


class Lines(AbstractContextManager["Lines"]):
    """Updates as lines: JSON, or text for a pipe and a dumb terminal."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json

    def __exit__(self, *of_error: object) -> None:
        return None

    def show(self, update: Update) -> None:
        """Print an update, and flush it for the reader of the pipe."""
        moment = datetime.fromtimestamp(update.time_ms / 1000, UTC)
        if self._as_json:
            click.echo(json_line(_object(update, moment)))
        else:
            for line in _texts(update):
                click.echo(f"{cell('', moment)}  {line}")
        sys.stdout.flush()


def _object(update: Update, moment: datetime) -> dict[str, Any]:
    return {
        "time": moment,
        "seconds": round(update.seconds, 3),
        "topics": [
            {
                "topic": one.topic,
                "messages": one.messages,
                "messagesPerSecond": round(one.messages_per_s, 3),
                "bytesPerSecond": None if one.bytes_per_s is None else round(one.bytes_per_s),
            }
            for one in update.topics
        ],
        "groups": [
            {
                "group": one.group,
                "lagMessages": one.lag_messages,
                "lagPerSecond": None if one.lag_per_s is None else round(one.lag_per_s, 3),
                "trend": one.trend,
                "secondsBehind": one.seconds_behind,
                "unknownQueues": one.unknown_queues,
            }
            for one in update.groups
        ],
        "problem": update.problem,
    }


def _texts(update: Update) -> Iterator[str]:
    """Yield a line for each topic and group, or for the problem."""
    if update.problem is not None:
        yield f"problem {update.problem}"
    for topic in update.topics:
        rate = f"{topic.messages_per_s:,.1f} messages/s"
        yield f"topic {printable(topic.topic)}  {rate}  {_bytes(topic.bytes_per_s)}  {topic.messages:,} messages"
    for group in update.groups:
        yield f"group {printable(group.group)}  lag {_lag(group)}  {_change(group)}"


def _bytes(per_s: float | None) -> str:
    return "?" if per_s is None else f"{bytes_text(per_s)}/s"


def _lag(group: GroupTrend) -> str:
    """Return the lag of a group, such as "≥ 15" if it is not known of all queues."""
    if group.lag_messages is None:
        return "?"
    return f"{'≥ ' if group.unknown_queues else ''}{group.lag_messages:,}"


def _change(group: GroupTrend) -> str:
    """Return the trend of a group, such as "↓ -12.0/s"."""
    return "" if group.lag_per_s is None or group.trend is None else f"{_ARROWS[group.trend]} {group.lag_per_s:+,.1f}/s"


class Screen(AbstractContextManager["Screen"]):
    """Updates on a terminal, each in place of the one before."""

    def __init__(self, place: Place, interval_s: float) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        self._interval_s = interval_s
        self._name = place.path or place.cluster["name_server"]
        self._last = Update(0, 0.0, [], [])  # without a problem
        self._console = Console(highlight=False, color_system="auto" if has_colours(sys.stdout) else None)
        begin = Text(f"{printable(self._name)}: the first rates in {interval_s:g} s …")
        self._live = Live(begin, console=self._console)

    def __enter__(self) -> "Screen":
        self._live.start(refresh=True)
        return self

    def __exit__(self, *of_error: object) -> None:
        self._live.stop()

    def show(self, update: Update) -> None:
        """Draw an update. One with a problem has the rows of the last one without."""
        if update.problem is None:
            self._last = update
        shown = self._last._replace(time_ms=update.time_ms, problem=update.problem)
        size = self._console.size
        drawn = draw_update(shown, self._name, self._interval_s, size.width, size.height)
        self._live.update(drawn, refresh=True)


def draw_update(update: Update, name: str, interval_s: float, width: int, lines: int) -> "RenderableType":
    """Return an update as two tables that fit a terminal of this many columns and lines. Long names are cut."""
    from rich.console import Group
    from rich.text import Text

    rows = max(lines - _OTHER_LINES - (update.problem is not None), 2)
    group_rows = min(len(update.groups), max(rows - len(update.topics), rows // 2))
    topic_rows = rows - group_rows
    moment = datetime.fromtimestamp(update.time_ms / 1000, UTC)
    title = f"{cell('', moment)[11:]} UTC  every {interval_s:g} s  {printable(name)}"
    parts: list[RenderableType] = [Text(title, no_wrap=True, overflow="ellipsis")]
    if update.problem is not None:
        parts.append(Text(update.problem, Meaning.ERROR, no_wrap=True, overflow="ellipsis"))
    parts.append(
        _table(("topic", "messages/s", "bytes/s", "messages"), map(_topic_row, update.topics[:topic_rows]), width)
    )
    if update.groups:
        parts.append("")
        parts.append(_table(("group", "lag", "trend", "behind"), map(_group_row, update.groups[:group_rows]), width))
    left_out = max(len(update.topics) - topic_rows, 0), len(update.groups) - group_rows
    if any(left_out):
        parts.append(Text(f"… {left_out[0]} topics and {left_out[1]} groups more", Meaning.ZERO))
    return Group(*parts)


class _Row(NamedTuple):
    """The texts of a row, and the style of its last but one text or of the whole row."""

    texts: tuple[str, ...]
    style: str = ""
    trend_style: str = ""


def _topic_row(one: TopicTrend) -> _Row:
    counts = f"{one.messages_per_s:,.1f}", _bytes(one.bytes_per_s).removesuffix("/s"), f"{one.messages:,}"
    return _Row((printable(one.topic), *counts), "" if one.messages_per_s else Meaning.ZERO)


def _group_row(one: GroupTrend) -> _Row:
    behind = "" if one.seconds_behind is None else duration_text(one.seconds_behind)
    texts = printable(one.group), _lag(one), _change(one), behind
    return _Row(texts, trend_style=_STYLES[one.trend])


def _table(columns: tuple[str, ...], rows: Iterable[_Row], width: int) -> "RenderableType":
    """Return a table whose numbers are complete, and whose names get the rest of the width."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shown = list(rows)
    widths = [max(map(len, (head, *(row.texts[at] for row in shown)))) for at, head in enumerate(columns)]
    of_names = max(min(widths[0], width - sum(widths[1:]) - _GAP * (len(columns) - 1)), _LEAST_NAME)
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
    made.add_column(columns[0], no_wrap=True, overflow="ellipsis", width=of_names)
    for head, most in zip(columns[1:], widths[1:], strict=True):
        made.add_column(head, justify="right", no_wrap=True, width=most)
    for row in shown:
        first, second, third, fourth = row.texts
        made.add_row(Text(first, no_wrap=True), second, Text(third, row.trend_style), fourth, style=row.style)
    return made
