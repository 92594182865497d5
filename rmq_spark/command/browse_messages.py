"""The screens of `rmq browse` for messages: a page of a queue, what a search has found, and one message."""

from typing import Any, ClassVar

from click import BadParameter
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static

from rmq_spark.command.browse_lists import Listing, Page
from rmq_spark.command.browse_pages import HEX, JSON, PAGE_MESSAGES, TEXT, Found, MessageRow, best_form, body_lines
from rmq_spark.command.output import bytes_text, cell, printable, rows_of
from rmq_spark.command.parameters import Moment
from rmq_spark.store import count_text
from rmq_spark.store.model import QueueBounds, QueueKey

_FORMS = (TEXT, JSON, HEX)
_WIDE_COLUMNS = 80  # from this width on a line of hex has 16 bytes, and lists have keys


class Searched(Listing):
    """A list from which messages are searched by key and id, in `topics()`."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("k", "key", "Key"), Binding("i", "id", "Id", show=False)]

    def topics(self) -> list[str]:
        """Return the topics that are searched."""
        raise NotImplementedError(type(self))

    def action_key(self) -> None:
        """Search by key."""
        self.ask("Key", self._find_key)

    def action_id(self) -> None:
        """Search by message id."""
        self.ask("Message id", self._find_id)

    async def _find_key(self, key: str) -> None:
        self._show("key", key, await self.browser.read(self.pages.find_key, self.topics(), key))

    async def _find_id(self, message_id: str) -> None:
        self._show("id", message_id, await self.browser.read(self.pages.find_id, self.topics(), message_id.strip()))

    def _show(self, kind: str, word: str, found: Found) -> None:
        if len(found.rows) == 1:
            self.app.push_screen(MessageScreen(found.rows[0].queue, found.rows[0].offset))
        elif found.rows:
            self.app.push_screen(FoundScreen(kind, word, found))
        else:
            self.notify(f"No message has the {kind} {word}.", markup=False)
            self.say(f"No message has the {kind} {word}.")


class MessagesScreen(Searched):
    """One page of the messages of a queue. The last page is shown first."""

    columns = ("offset", "stored (UTC)", "tags", "keys", "body")
    flexible = "body"
    numbers = frozenset({"offset"})
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("n,pagedown", "next_page", "Next"),
        Binding("p,pageup", "previous_page", "Prev", show=False),
        Binding("home", "first_page", "First", show=False, priority=True),
        Binding("end", "last_page", "Last", show=False, priority=True),
        Binding("t", "time", "Time"),
        Binding("o", "offset", "Offset", show=False),
        Binding("f", "find", "Find"),
        Binding("F", "find_again", "Continue", show=False),
    ]

    def __init__(self, queue: QueueKey) -> None:
        super().__init__()
        self._queue, self._rows = queue, list[MessageRow]()
        self._begin: int | None = None  # of the page; None is the last page
        self._bounds = QueueBounds(0, 0)
        self._sought, self._sought_until = "", 0  # the last text, and the offset at which its search ended

    def path(self) -> str:
        return f"{self._queue} > messages"

    def topics(self) -> list[str]:
        return [self._queue.topic]

    def heads(self) -> tuple[str, ...]:
        return tuple(head for head in self.columns if head != "keys" or self.app.size.width >= _WIDE_COLUMNS)

    async def load(self) -> None:
        await self._go(self._begin, self._cursor_offset() if self._rows else None)

    async def _go(self, begin: int | None, cursor_offset: int | None = None) -> None:
        """Show the page from `begin`, the last one for None, with the cursor at an offset of it."""
        self._bounds = bounds = await self.browser.read(self.pages.bounds, self._queue)
        last = max(bounds.min_offset, bounds.max_offset - PAGE_MESSAGES)
        self._begin = last if begin is None else min(max(begin, bounds.min_offset), last)
        end = min(self._begin + PAGE_MESSAGES, bounds.max_offset)
        rows = await self.browser.read(self.pages.messages, self._queue, self._begin, end) if end > self._begin else []
        self._rows = rows
        default = end - 1 if begin is None else self._begin
        cursor = (default if cursor_offset is None else cursor_offset) - self._begin
        heads = self.heads()
        texts = [dict(zip(self.columns, _texts(row), strict=True)) for row in rows]
        self.fill([tuple(row[head] for head in heads) for row in texts], cursor=max(cursor, 0))
        shown = f"offsets {self._begin:,} to {end - 1:,}" if rows else "no messages"
        self.say(f"{shown} of [{bounds.min_offset:,}, {bounds.max_offset:,})")

    def action_next_page(self) -> None:
        """Show the next page."""
        if self._begin is not None and self._begin + len(self._rows) < self._bounds.max_offset:
            self.start(self._go(self._begin + PAGE_MESSAGES, self._begin + len(self._rows)))
        else:
            self.action_again()

    def action_previous_page(self) -> None:
        """Show the previous page."""
        if self._begin is not None and self._begin > self._bounds.min_offset:
            self.start(self._go(self._begin - PAGE_MESSAGES, self._begin - 1))

    def move_past(self, by: int) -> bool:
        """Show the next page or the previous one."""
        if by > 0:
            self.action_next_page()
        else:
            self.action_previous_page()
        return True

    def action_first_page(self) -> None:
        """Show the first page."""
        self.start(self._go(0))

    def action_last_page(self) -> None:
        """Show the last page."""
        self.start(self._go(None))

    def action_time(self) -> None:
        """Go to a time."""
        self.ask("Time: now-10m, 2026-01-31T12:00:00Z, ms since 1970", self._go_to_time)

    async def _go_to_time(self, text: str) -> None:
        time_ms = Moment().convert(text.strip(), None, None)
        offset = await self.browser.read(self.pages.offset_at, self._queue, time_ms)
        await self._go(offset, offset)

    def action_offset(self) -> None:
        """Go to a queue offset."""
        self.ask("Queue offset", self._go_to_offset)

    async def _go_to_offset(self, text: str) -> None:
        number = text.strip().replace(",", "")
        if not number.isdecimal():
            raise BadParameter(f"{text!r} is not a queue offset; expected a number.")
        await self._go(int(number), int(number))

    def action_find(self) -> None:
        """Find a text from the cursor on."""
        self.ask("Text in body, tags or keys", self._find_first)

    def action_find_again(self) -> None:
        """Find the same text where the last search ended."""
        if self._sought:
            self.start(self._find(self._sought, self._sought_until))

    def _cursor_offset(self) -> int:
        return self._rows[self.table.cursor_row].offset if self._rows else 0

    async def _find_first(self, text: str) -> None:
        await self._find(text, self._cursor_offset())

    async def _find(self, text: str, begin: int) -> None:
        self._sought, self._sought_until = text, begin
        self.say("searching …")
        found = await self.browser.read(self.pages.find_text, self._queue, text, begin)
        self._sought_until = found.next_offset
        if found.found is not None:
            await self._go(found.found, found.found)
            return
        if not found.is_end:
            await self._go(found.next_offset, found.next_offset)
        until = "the end" if found.is_end else f"offset {found.next_offset:,}; F continues"
        self.say(f"{text!r} was not found from offset {begin:,} to {until}.")

    def open_row(self, number: int) -> None:
        self.app.push_screen(MessageScreen(self._queue, self._rows[number].offset))


def _texts(row: MessageRow) -> tuple[str, ...]:
    stored = cell("", row.stored)[5:]  # without the year
    return f"{row.offset:,}", stored, _short(row.tags, 12), _short(row.keys, 16), row.preview


class FoundScreen(Listing):
    """The messages that a search for a word has found, in several queues. `kind` is key or id."""

    columns = ("queue", "offset", "stored (UTC)", "body")
    flexible = "body"
    numbers = frozenset({"offset"})

    def __init__(self, kind: str, word: str, found: Found) -> None:
        super().__init__()
        self._kind, self._word, self._found, self._total = kind, word, found.rows, found.total

    def path(self) -> str:
        return f"{self._kind} {self._word}"

    async def load(self) -> None:
        rows = [
            (printable(str(row.queue)), f"{row.offset:,}", cell("", row.stored)[5:], row.preview) for row in self._found
        ]
        self.fill(rows)
        count = count_text(self._total, "message")
        is_all = len(rows) == self._total
        self.say(count if is_all else f"the first {len(rows)} of {count}; `rmq get --{self._kind}` shows all")

    def open_row(self, number: int) -> None:
        self.app.push_screen(MessageScreen(self._found[number].queue, self._found[number].offset))


class MessageScreen(Page):
    """One message: its fields, properties and body."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("b", "form", "Body"),
        Binding("n", "step(1)", "Next"),
        Binding("p", "step(-1)", "Prev"),
    ]

    def __init__(self, queue: QueueKey, offset: int) -> None:
        super().__init__()
        self._queue, self._offset = queue, offset
        self._message: Any = None
        self._form: str | None = None

    def compose(self) -> ComposeResult:
        """Yield path, content, note and keys."""
        yield Static(id="path")
        with VerticalScroll():
            yield Static(id="fields")
        yield Static(id="note")
        yield Footer()

    def path(self) -> str:
        return f"{self._queue} @ {self._offset:,}"

    async def load(self) -> None:
        self._message = await self.browser.read(self.pages.message, self._queue, self._offset)
        self.query_one("#path", Static).update(Text(printable(self.path()), no_wrap=True, overflow="ellipsis"))
        self._draw()

    def action_form(self) -> None:
        """Show the body in the next form."""
        if self._message is not None:
            shown = self._form or best_form(self._message.body)
            self._form = _FORMS[(_FORMS.index(shown) + 1) % len(_FORMS)]
            self._draw()

    def action_step(self, by: int) -> None:
        """Show the next or the previous message of the queue."""
        self.start(self._step(by))

    async def _step(self, by: int) -> None:
        bounds = await self.browser.read(self.pages.bounds, self._queue)
        if bounds.min_offset <= self._offset + by < bounds.max_offset:
            self._offset, self._form = self._offset + by, None
            await self.load()
        else:
            self.say("The queue has no more messages." if by > 0 else "This is the first message of the queue.")

    def _draw(self) -> None:
        one = self._message
        form = self._form or best_form(one.body)
        text = Text()
        for name, value in _fields_of(one):
            text.append(f"{name:<10} ", "bold")
            text.append(f"{printable(value)}\n")
        text.append(f"\nbody as {form}\n", "bold")
        row_bytes = 16 if self.app.size.width >= _WIDE_COLUMNS else 8
        text.append("\n".join(body_lines(one.body, form, row_bytes)))
        text.append("\n\nproperties\n", "bold")
        for name, value in one.properties.items():
            text.append(f"  {printable(name)} ", "cyan")
            text.append(f"{printable(value)}\n")
        self.query_one("#fields", Static).update(text)
        self.say(f"{bytes_text(len(one.body))}; b: body as {_FORMS[(_FORMS.index(form) + 1) % len(_FORMS)]}")


def _fields_of(one: Any) -> list[tuple[str, str]]:
    """Return the names and texts of a message's fields that have a value."""
    names = [name for name in ("storeTimestamp", "bornTimestamp") if name in one.table.schema.names]
    (times,) = rows_of(one.table.select(names))
    fields = {
        "topic": one.topic,
        "stored in": one.physical_topic if one.physical_topic != one.topic else "",
        "broker": one.broker_name,
        "queue": f"{one.queue_id} @ {one.queue_offset:,}",
        "tags": one.tags or "",
        "keys": one.keys or "",
        "stored": cell("", times.get("storeTimestamp"), in_ms=True),
        "born": f"{cell('', times.get('bornTimestamp'), in_ms=True)} at {one.born_host}",
        "id": one.message_id,
        "offset id": one.offset_message_id,
        "tries": str(one.reconsume_times + 1) if one.reconsume_times else "",
    }
    return [(name, value) for name, value in fields.items() if value]


def _short(text: str, chars: int) -> str:
    """Return a text of at most `chars` characters, with … where the rest was."""
    return text if len(text) <= chars else text[: chars - 1] + "…"
