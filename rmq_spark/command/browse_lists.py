"""The common parts of the screens of `rmq browse`: a path on top, a note below, a table, a question, and the keys.

Every screen fits 60 columns. Texts of messages are shown as they are, never as markup.
"""

from abc import abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ClassVar, ParamSpec, Protocol, TypeVar, cast

from click import BadParameter
from rich.cells import cell_len
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import DataTable, Footer, Input, Static

import rmq_spark
from rmq_spark.command.browse_pages import Pages
from rmq_spark.command.output import printable, typed

P = ParamSpec("P")
T = TypeVar("T")

_PADDING, _BAR = 1, 2  # columns beside a cell, and of the scroll bar
_LEAST_WIDTH = 8  # of a column whose texts are cut
_KEYS = """\
up, down   move; in messages also to the next page
enter      open: topic, queue, message, group
esc        back
r          read again

in topics, queues and messages
k          search by key
i          search by message id

in messages
n, p       next page, previous page
home, end  first page, last page
t          go to a time: now-10m, 2026-01-31T12:00:00Z
o          go to a queue offset
f          find a text from the cursor on; F: continue

in a message
b          body as text, JSON or hex
n, p       next message, previous message

g          groups and their lag
s          show or hide RocketMQ's own topics
q          quit
"""


class Browser(Protocol):
    """The application, as its screens use it."""

    pages: Pages

    async def read(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Call a method of the pages in the thread that reads, after the calls before it have ended."""
        raise NotImplementedError


class Page(Screen[None]):
    """A screen with a path on top and a note below. Errors of reads are shown, and nothing else is lost."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "Back"),
        Binding("r", "again", "Read", show=False),
    ]

    @property
    def browser(self) -> Browser:
        """The application."""
        return cast(Browser, self.app)

    @property
    def pages(self) -> Pages:
        """The pages of the place."""
        return self.browser.pages

    def path(self) -> str:
        """Return the text on top."""
        raise NotImplementedError(type(self))

    def say(self, note: str) -> None:
        """Show a note."""
        self.query_one("#note", Static).update(Text(printable(note), no_wrap=True, overflow="ellipsis"))

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something that reads, and show its error if it fails."""
        self.run_worker(self._guard(work), exclusive=False)

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except (rmq_spark.RmqError, BadParameter, OSError) as error:
            text = error.message if isinstance(error, BadParameter) else typed(str(error))
            self.say(text)
            self.notify(Text(printable(text)).plain, severity="error", timeout=8, markup=False)

    def action_back(self) -> None:
        """Return to the screen before, except from the first one."""
        if len(self.app.screen_stack) > 2:
            self.app.pop_screen()

    def action_again(self) -> None:
        """Read again."""
        self.start(self.load())

    @abstractmethod
    async def load(self) -> None:
        """Read and show."""

    def on_mount(self) -> None:
        """Read when the screen is opened."""
        self.query_one("#path", Static).update(Text(printable(self.path()), no_wrap=True, overflow="ellipsis"))
        self.say("reading …")
        self.start(self.load())


class _Table(DataTable[Text]):
    """A table that tells its screen when the cursor is moved past an end."""

    def action_cursor_down(self) -> None:
        """Move down, or past the end."""
        if self.cursor_row < self.row_count - 1 or not self._move_past(1):
            super().action_cursor_down()

    def action_cursor_up(self) -> None:
        """Move up, or past the beginning."""
        if self.cursor_row > 0 or not self._move_past(-1):
            super().action_cursor_up()

    def _move_past(self, by: int) -> bool:
        return isinstance(self.screen, Listing) and self.screen.move_past(by)


class Listing(Page):
    """A screen with a table. `columns` are its heads, those in `numbers` have numbers, and `flexible` may be cut."""

    columns: ClassVar[tuple[str, ...]] = ()
    flexible: ClassVar[str] = ""
    numbers: ClassVar[frozenset[str]] = frozenset()
    _names: Sequence[str] = ()  # the first text of each row

    def compose(self) -> ComposeResult:
        """Yield path, table, note and keys."""
        yield Static(id="path")
        yield _Table(cursor_type="row", zebra_stripes=True)
        yield Static(id="note")
        yield Footer()

    @property
    def table(self) -> _Table:
        """The table."""
        return self.query_one(_Table)

    def heads(self) -> tuple[str, ...]:
        """Return the heads of the columns that fit."""
        return self.columns

    def fill(self, rows: Sequence[tuple[str, ...]], styles: Sequence[str] = (), cursor: int | None = None) -> None:
        """Show rows. `styles` has a style for each row, and `cursor` is the row with the cursor.

        Without `cursor` the cursor stays where it is: at the row that begins with the same text, if there is one.
        Numbers are complete. The column `flexible` gets the rest of the width, and its texts are cut: names in their
        middle, because names of queues differ at their end, and bodies at their end.
        """
        heads = self.heads()
        cursor = self._kept_row(rows) if cursor is None else cursor
        widths = {
            head: max(map(cell_len, (head, *(row[at] for row in rows))), default=0) for at, head in enumerate(heads)
        }
        others = sum(width for head, width in widths.items() if head != self.flexible)
        rest = self.app.size.width - others - 2 * _PADDING * len(heads) - _BAR
        widths[self.flexible] = max(min(widths[self.flexible], rest), _LEAST_WIDTH)
        self.table.clear(columns=True)
        for head in heads:
            self.table.add_column(_cell(head, head in self.numbers), width=widths[head])
        for number, row in enumerate(rows):
            style = styles[number] if styles else ""
            texts = [
                (head, _cut_middle(text, widths[head]) if head == self.flexible and head != "body" else text)
                for head, text in zip(heads, row, strict=True)
            ]
            self.table.add_row(*(_cell(text, head in self.numbers, style) for head, text in texts))
        self._names = [row[0] for row in rows]
        if rows:
            self.table.move_cursor(row=min(cursor, len(rows) - 1))

    def _kept_row(self, rows: Sequence[tuple[str, ...]]) -> int:
        """Return the one of the new rows at which the cursor stays."""
        if not self._names:
            return 0
        at = self.table.cursor_row
        same = [number for number, row in enumerate(rows) if row[0] == self._names[at]]
        return at if at in same or not same else same[0]

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Open the row that was chosen with Enter or the mouse."""
        self.open_row(event.cursor_row)

    @abstractmethod
    def open_row(self, number: int) -> None:
        """Open a row."""

    def move_past(self, by: int) -> bool:
        """Show what is after the last row (1), or before the first (-1). Return whether there may be something."""
        return False

    def ask(self, question: str, answer: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        """Ask for a text, and start `answer` with it unless it is empty."""

        def take(text: str | None) -> None:
            if text:
                self.start(answer(text))

        self.app.push_screen(Question(question), take)


def _cut_middle(text: str, cells: int) -> str:
    """Return a text that takes at most `cells` columns of the terminal, with … in place of its middle."""
    if cell_len(text) <= cells:
        return text
    first, last = 0, len(text)
    while cell_len(text[: first + 1]) + cell_len(text[last - 1 :]) < cells:
        first, last = first + 1, last - 1
    return f"{text[:first]}…{text[last:]}"


def _cell(text: str, is_number: bool, style: str = "") -> Text:
    return Text(text, style, justify="right" if is_number else "left", no_wrap=True, overflow="ellipsis")


class Question(ModalScreen[str | None]):
    """A question for one line of text. Esc answers None."""

    AUTO_FOCUS = "Input"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "Back")]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        """Yield the question and the line."""
        with VerticalScroll(id="box"):
            yield Static(Text(self._question))
            yield Input()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Answer with the line."""
        self.dismiss(event.value)

    def action_leave(self) -> None:
        """Answer None."""
        self.dismiss(None)


class HelpScreen(ModalScreen[None]):
    """The keys."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,question_mark,q", "leave", "Back")]

    def compose(self) -> ComposeResult:
        """Yield the keys."""
        with VerticalScroll(id="box"):
            yield Static(Text(_KEYS))

    def action_leave(self) -> None:
        """Return to the screen below."""
        self.dismiss(None)
