"""`rmq browse`: an explorer for a terminal. Read-only.

`browse_app`, `browse_screens`, `browse_messages` and `browse_lists` draw, and need the extra `browse`. `browse_pages`
reads a page at a time.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import click

from rmq_spark.command.output import waiting
from rmq_spark.command.parameters import examples, require_package
from rmq_spark.command.place import Place, PlaceCommand, reads_place


@click.command(cls=PlaceCommand, epilog=examples("rmq browse store", "rmq browse -n ns1:9876"))
@reads_place(data=None)
def browse(place: Place) -> None:
    """Browse topics, queues, messages and the lag of groups on a terminal. Press ? for the keys.

    Messages are read a page at a time, never a whole topic, and nothing is changed. They can be searched by key, id,
    time, offset and text. A body is shown as text, JSON or hex.
    """
    require_package("textual", "browse")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError(
            "standard input or output is not a terminal; expected one. In a script use `rmq topics`, `rmq cat` or "
            "`rmq get` with --json."
        )
    from rmq_spark.command.browse_app import BrowseApp
    from rmq_spark.command.browse_pages import Pages

    with place.open() as reader, ThreadPoolExecutor(max_workers=1) as reading:
        with waiting("reading"):
            reader.refresh()
        BrowseApp(Pages(place, reader), reading).run()
