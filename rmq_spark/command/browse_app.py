"""The application of `rmq browse`: it reads in one other thread, and shows screens on top of each other."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import ClassVar, ParamSpec, TypeVar

from textual.app import App
from textual.binding import Binding, BindingType

from rmq_spark.command.browse_lists import HelpScreen, Listing
from rmq_spark.command.browse_pages import Pages
from rmq_spark.command.browse_screens import GroupsScreen, TopicsScreen

P = ParamSpec("P")
T = TypeVar("T")


class BrowseApp(App[None]):
    """The explorer of a place. Its first screen lists the topics.

    `reading` has one thread, which makes all reads. A read that nobody waits for any more, as after the end of its
    screen, continues in that thread. So the caller shuts `reading` down before the reader is closed.
    """

    CSS = """
    #path { height: 1; width: 100%; background: $boost; text-style: bold; }
    #note { height: 1; width: 100%; color: $text-muted; }
    DataTable { height: 1fr; }
    VerticalScroll { height: 1fr; }
    HelpScreen, Question { align: center middle; }
    #box { width: 90%; max-width: 72; height: auto; max-height: 90%; border: round $primary; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("question_mark", "help", "Help", key_display="?"),
        Binding("g", "groups", "Groups", show=False),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, pages: Pages, reading: Executor) -> None:
        super().__init__()
        self.pages = pages
        self._reading = reading

    def on_mount(self) -> None:
        """Show the topics."""
        self.push_screen(TopicsScreen())

    async def read(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Call a method of the pages in the thread that reads, after the calls before it have ended."""
        return await asyncio.get_running_loop().run_in_executor(self._reading, partial(function, *arguments, **named))

    def action_help(self) -> None:
        """Show the keys."""
        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen())

    def action_groups(self) -> None:
        """Show the groups, unless they or a question are shown."""
        if isinstance(self.screen, Listing) and not isinstance(self.screen, GroupsScreen):
            self.push_screen(GroupsScreen())
