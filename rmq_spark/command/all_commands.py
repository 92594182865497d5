"""All commands under one name, and what becomes of their errors. A command's module is loaded when it is asked for."""

import difflib
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

import click

from rmq_spark import RmqError, __version__
from rmq_spark.command.output import say, typed

STOPPED = 130  # by Ctrl-C, as shells say it
_NAME = "rmq"


class _Listed(NamedTuple):
    """A command: the module that has it, its name there, and what the list of commands says."""

    module: str
    name: str
    short_help: str


# In this order in the help: those that look, those that write, those that keep a store in order, and a toy.
COMMANDS = {
    "topics": _Listed("looking", "topics", "The topics of a store: queues, messages, bytes, time span."),
    "queues": _Listed("looking", "queues", "The queues of topics: offsets, messages, bytes, time span."),
    "groups": _Listed("looking", "groups", "The consumer groups of a store, and how far each is behind."),
    "lag": _Listed("looking", "lag", "How far a group is behind, queue by queue."),
    "cat": _Listed("messages", "cat", "Messages in the order in which they were stored; --follow."),
    "get": _Listed("single_messages", "get", "Single messages, whole: by id, by key, or by place."),
    "dump": _Listed("files", "dump", "Any file of a store, entry by entry, with positions."),
    "send": _Listed("sending", "send", "Send a message, or one for each line of standard input."),
    "create": _Listed("writing", "create", "Make a store, or topics in one."),
    "reset": _Listed("writing", "reset", "Send a group to earliest, latest, a time or offsets."),
    "dlq": _Listed("dead_letters", "dlq", "Dead letters: list them, or republish them."),
    "export": _Listed("moving", "export", "Write messages to a Parquet file."),
    "import": _Listed("moving", "import_", "Append the messages of a Parquet file, each once."),
    "check": _Listed("health", "check", "Read every file: what is damaged, what would be lost?"),
    "repair": _Listed("health", "repair", "Make a store whole again; asks before it does."),
    "close": _Listed("writing", "close", "Leave a store as one that was closed in order."),
    "serve": _Listed("serving", "serve", "Deliver delayed messages when they are due."),
    "demo": _Listed("demonstration", "demo", "Make a small store to try the others on."),
}
# Ctrl-C is how some of these end, and none of them has anything to say of it.
_LOOKING = frozenset({"topics", "queues", "groups", "lag", "cat", "get", "dump", "check"})
_ENDING = """
rmq COMMAND --help says more, with examples. Exit status: 0 done, 1 an error,
2 wrong words, 3 the answer is no (check, repair, get), 130 stopped by Ctrl-C.
"""


class _Rmq(click.Group):
    """The group, whose help is one screen of 24 lines, and whose commands are loaded one by one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, None for a name that none has."""
        listed = COMMANDS.get(cmd_name)
        if listed is None:
            return None
        found: click.Command = getattr(import_module(f"rmq_spark.command.{listed.module}"), listed.name)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that is meant. Raises UsageError, which names those that it may have been."""
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], COMMANDS, 2)
            hint = f"Did you mean {' or '.join(near)}?" if near else "`rmq --help` lists them."
            ctx.fail(f"There is no command {args[0]!r}. {hint}")
        name, command, rest = super().resolve_command(ctx, args)
        return name, command, rest

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write usage, the commands, and what exit statuses mean."""
        formatter.write("Usage: rmq COMMAND PATH ...   PATH: a store's folder (storePathRootDir)\n\n")
        formatter.write_dl([(name, listed.short_help) for name, listed in COMMANDS.items()])
        formatter.write(_ENDING)


def make_group() -> click.Group:
    """Return the command with all its commands, as click has them."""
    group = _Rmq(_NAME, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
    return click.version_option(__version__, prog_name="rmq-spark", message="%(prog)s %(version)s")(group)


def open_streams() -> None:
    """Have all three standard streams, whoever started us without one; what is printed is UTF-8, as JSON has to be.

    Else a file of the store would be the next one to be opened, and have the number at which others print. A path that
    is no UTF-8 is printed as its bytes.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        stream = getattr(sys, name)
        if stream is None:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))
        elif name == "stdout":
            stream.reconfigure(encoding="utf-8", errors="surrogateescape")


def keep_interrupts() -> None:
    """Have Ctrl-C end the command also when it comes while Python collects an object.

    Python reports an exception of `__del__` and continues. So the interrupt is raised again, 10 ms later.
    """
    report = sys.unraisablehook

    def raise_again(ignored: "sys.UnraisableHookArgs") -> None:
        if issubclass(ignored.exc_type, KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.01)
        else:
            report(ignored)

    signal.signal(signal.SIGALRM, signal.default_int_handler)
    sys.unraisablehook = raise_again


def run(words: Sequence[str]) -> int:
    """Run the command that these words are; return its exit status."""
    group = make_group()
    if "_RMQ_COMPLETE" in os.environ:  # a shell asks what could follow
        group.main(list(words), prog_name=_NAME)
    command = f"rmq {words[0]}" if words and words[0] in COMMANDS else _NAME
    try:
        # Not by click's main: it answers 1 where whoever reads our output has seen enough.
        with group.make_context(_NAME, list(words)) as ctx:
            status = group.invoke(ctx)
        sys.stdout.flush()
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except RmqError as error:
        say(f"{command}: {typed(str(error), _own(words))}")
        return 1
    except (KeyboardInterrupt, click.Abort):
        if not words or words[0] not in _LOOKING:
            say(f"{command}: stopped. Nothing was left half-done.")
        return STOPPED
    except BrokenPipeError:
        _read_no_more()
        return 0
    except UnicodeEncodeError as error:  # a word of the command line: a topic, a key, a tag
        say(f"{command}: {os.fsencode(error.object)!r} is no UTF-8 text.")
        return 2
    except OSError as error:
        say(f"{command}: {error.filename or 'the system says'}: {error.strerror or error}")
        return 1
    return status if isinstance(status, int) else 0


def _own(words: Sequence[str]) -> list[str]:
    """Return the words of a command line, the values of `--option=value`, and all of them as absolute paths."""
    given = [*words[1:], *(word.partition("=")[2] for word in words if word.startswith("-"))]
    return given + [os.path.abspath(word) for word in given if word]


def _read_no_more() -> None:
    """Let what is left of the output go nowhere: whoever read it has seen enough, as `head` does."""
    if sys.__stdout__ is not None and sys.stdout is sys.__stdout__:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())
