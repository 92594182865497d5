"""The screens of `rmq browse` for topics, queues, groups and the lag of one group.

A list reads its rows when it is opened and when it is refreshed.
"""

from typing import Any, ClassVar

from textual.binding import Binding, BindingType

from rmq_spark.command.browse_lists import Listing
from rmq_spark.command.browse_messages import MessagesScreen, Searched
from rmq_spark.command.browse_pages import QueueRow, TopicRow
from rmq_spark.command.colours import Meaning
from rmq_spark.command.output import duration_text, printable
from rmq_spark.store import count_text, sum_lag
from rmq_spark.store.model import QueueKey


class TopicsScreen(Searched):
    """The topics. Those of RocketMQ are hidden at first, and are searched nevertheless, as `rmq get` does."""

    columns = ("topic", "queues", "messages")
    flexible = "topic"
    numbers = frozenset({"queues", "messages"})
    BINDINGS: ClassVar[list[BindingType]] = [Binding("s", "system", "System"), Binding("g", "app.groups", "Groups")]

    def __init__(self) -> None:
        super().__init__()
        self._all: list[TopicRow] = []
        self._with_system = False

    def path(self) -> str:
        return self.pages.name

    def topics(self) -> list[str]:
        return [row.name for row in self._all if row.queues]

    async def load(self) -> None:
        self._all = await self.browser.read(self.pages.topics)
        self._draw()

    def action_system(self) -> None:
        """Show or hide RocketMQ's own topics."""
        self._with_system = not self._with_system
        self._draw()

    def _shown(self) -> list[TopicRow]:
        return [row for row in self._all if self._with_system or not row.is_system]

    def _draw(self) -> None:
        shown = self._shown()
        rows = [(printable(row.name), str(row.queues), f"{row.messages:,}") for row in shown]
        self.fill(rows, [Meaning.ERROR if row.problem else "" for row in shown])
        problems = [f"{row.name}: {row.problem}" for row in shown if row.problem]
        hidden = len(self._all) - len(shown)
        self.say(
            problems[0] if problems else f"{len(shown)} topics" + (f", {hidden} of RocketMQ (s)" if hidden else "")
        )

    def open_row(self, number: int) -> None:
        self.app.push_screen(QueuesScreen(self._shown()[number].name))


class QueuesScreen(Searched):
    """The queues of a topic."""

    columns = ("queue", "first", "end", "messages")
    flexible = "queue"
    numbers = frozenset({"first", "end", "messages"})

    def __init__(self, topic: str) -> None:
        super().__init__()
        self._topic, self._rows = topic, list[QueueRow]()

    def path(self) -> str:
        return f"{self._topic} > queues"

    def topics(self) -> list[str]:
        return [self._topic]

    async def load(self) -> None:
        self._rows = await self.browser.read(self.pages.queues, self._topic)
        rows = []
        for row in self._rows:
            found = row.bounds
            counts = (
                (None, None, None)
                if found is None
                else (found.min_offset, found.max_offset, found.max_offset - found.min_offset)
            )
            rows.append((printable(row.queue.id_text), *map(_number, counts)))
        self.fill(rows, [Meaning.ERROR if row.problem else "" for row in self._rows])
        problems = [f"{row.queue.id_text}: {row.problem}" for row in self._rows if row.problem]
        self.say(problems[0] if problems else f"{len(rows)} queues")

    def open_row(self, number: int) -> None:
        row = self._rows[number]
        if row.bounds is None:
            self.notify(printable(row.problem or ""), severity="error", markup=False)
        else:
            self.app.push_screen(MessagesScreen(row.queue))


class GroupsScreen(Listing):
    """The groups with their lag."""

    columns = ("group", "topics", "queues", "lag", "behind")
    flexible = "group"
    numbers = frozenset({"topics", "queues", "lag", "behind"})

    def __init__(self) -> None:
        super().__init__()
        self._groups: dict[str, list[dict[str, Any]]] = {}

    def path(self) -> str:
        return f"{self.pages.name} > groups"

    async def load(self) -> None:
        groups: dict[str, list[dict[str, Any]]] = {}
        for row in await self.browser.read(self.pages.lag):
            groups.setdefault(row["group"], []).append(row)
        self._groups = groups
        rows, styles = [], list[str]()
        for name, queues in groups.items():
            total = sum_lag(queues)
            unread = "" if total.messages is None else f"{'≥ ' if total.unknown_queues else ''}{total.messages:,}"
            topics = len({row["topic"] for row in queues})
            rows.append((printable(name), str(topics), str(len(queues)), unread, _seconds(total.seconds_behind)))
            styles.append(Meaning.WARNING if total.unknown_queues else "")
        self.fill(rows, styles)
        self.say(count_text(len(rows), "group"))

    def open_row(self, number: int) -> None:
        self.app.push_screen(LagScreen(list(self._groups)[number]))


class LagScreen(Listing):
    """The lag of a group, queue by queue."""

    columns = ("queue", "state", "offset", "end", "lag", "behind")
    flexible = "queue"
    numbers = frozenset({"offset", "end", "lag", "behind"})

    def __init__(self, group: str) -> None:
        super().__init__()
        self._group, self._queues = group, list[QueueKey]()

    def path(self) -> str:
        return f"{self._group} > lag"

    async def load(self) -> None:
        found = await self.browser.read(self.pages.lag, self._group)
        self._queues = [QueueKey(row["topic"], row["queueId"], row.get("brokerName") or "") for row in found]
        rows = [
            (
                printable(str(queue)),
                row["state"],
                *(_number(row[name]) for name in ("groupOffset", "maxOffset", "lagMessages")),
                _seconds(row["secondsBehind"]),
            )
            for queue, row in zip(self._queues, found, strict=True)
        ]
        self.fill(rows, ["" if row["state"] == "ok" else Meaning.WARNING for row in found])
        total = sum_lag(found)
        unread = f"{count_text(total.messages or 0, 'unread message')} in {count_text(len(rows), 'queue')}"
        away = total.unknown_queues
        self.say(f"at least {unread}; the lag in {count_text(away, 'queue')} is not known" if away else unread)

    def open_row(self, number: int) -> None:
        self.app.push_screen(MessagesScreen(self._queues[number]))


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _seconds(value: float | None) -> str:
    return "" if value is None else duration_text(value)
