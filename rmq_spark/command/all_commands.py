"""The command group `rmq`: loads a command on demand, and maps errors to exit statuses."""

import difflib
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

import click

from rmq_spark import RmqError, UnknownOutcomeError, __version__
from rmq_spark.command.default_place import COMPLETION_VARIABLE
from rmq_spark.command.output import STOPPED, say, say_error, typed

_NAME = "rmq"
_NOTE = "rmq: "  # the notes on errors begin with it


class _Listed(NamedTuple):
    """A command: its module, its name in the module, and its line in the list of commands."""

    module: str
    name: str
    short_help: str
    section: str = ""  # of the help, of the first command in it


# In the order and in the sections of the help.
COMMANDS = {
    "topics": _Listed("list_commands", "topics", "List topics: messages, bytes, time span.", "Look"),
    "queues": _Listed("list_commands", "queues", "List queues: offsets, messages, time span."),
    "count": _Listed("count", "count", "Count messages, by time and by filters."),
    "groups": _Listed("list_commands", "groups", "List consumer groups and their lag."),
    "lag": _Listed("list_commands", "lag", "Show the lag of a group, queue by queue."),
    "members": _Listed("cluster_commands", "members", "List the members of consumer groups."),
    "brokers": _Listed("cluster_commands", "brokers", "List brokers: version, rates, disk."),
    "route": _Listed("cluster_commands", "route", "Show which brokers have a topic."),
    "stats": _Listed("cluster_commands", "stats", "Show the rates that brokers have counted."),
    "watch": _Listed("watch", "watch", "Show live rates and lag."),
    "browse": _Listed("browse", "browse", "Browse messages and groups."),
    "cat": _Listed("messages", "cat", "Print messages; --follow waits for more."),
    "get": _Listed("single_messages", "get", "Show messages by id, key or queue offset."),
    "dump": _Listed("dump", "dump", "Show a file of a store, entry by entry."),
    "send": _Listed("send", "send", "Send a message, or many.", "Send and change"),
    "create": _Listed("topic_commands", "create", "Create a store, or topics; alter topics."),
    "delete": _Listed("topic_commands", "delete", "Delete topics of a cluster."),
    "reset": _Listed("admin_commands", "reset", "Reset a group: a time, offsets, earliest …"),
    "dlq": _Listed("dead_letters", "dlq", "List or republish dead letters."),
    "export": _Listed("export_import", "export", "Write messages to a Parquet file.", "Copy"),
    "import": _Listed("export_import", "import_", "Send the messages of a Parquet file."),
    "check": _Listed("check_repair", "check", "Check every file of a store for damage.", "Check and operate"),
    "repair": _Listed("check_repair", "repair", "Repair a store, after confirmation."),
    "doctor": _Listed("doctor", "doctor", "Try what a query of a cluster needs."),
    "prepare-sink": _Listed("intents", "prepare_sink", "Prepare exactly-once writes to a cluster."),
    "intents": _Listed("intents", "intents", "List, finish or skip open cluster writes."),
    "close": _Listed("admin_commands", "close", "Mark a store as cleanly shut down."),
    "serve": _Listed("serve", "serve", "Deliver delayed messages when due."),
    "completion": _Listed("completion", "completion", "Print the completion of bash or zsh.", "Begin"),
    "demo": _Listed("demo", "demo", "Create a small example store."),
}
# These change nothing, so Ctrl-C prints no summary.
_READ_ONLY = frozenset(
    "topics queues count groups lag members brokers route stats watch browse cat get dump check doctor".split()  # noqa: SIM905
)
# Names that mqadmin and other tools have for these commands, in lower case.
OTHER_NAMES = {
    **dict.fromkeys(("ls", "list", "topiclist"), "topics"),
    **dict.fromkeys(("topicstatus", "offsets"), "queues"),
    **dict.fromkeys(("clusterlist", "brokerstatus"), "brokers"),
    "topicroute": "route",
    "statsall": "stats",
    **dict.fromkeys(("updatetopic", "updatetopicperm"), "create"),
    **dict.fromkeys(("deletetopic", "rm"), "delete"),
    **dict.fromkeys(("querymsgbyid", "querymsgbyuniquekey", "querymsgbykey", "querymsgbyoffset"), "get"),
    **dict.fromkeys(("printmsg", "printmsgbyqueue", "consumemessage", "consume", "read", "tail"), "cat"),
    **dict.fromkeys(("sendmessage", "produce", "write"), "send"),
    "consumerprogress": "groups",
    **dict.fromkeys(("consumerconnection", "consumerstatus"), "members"),
    **dict.fromkeys(("resetoffsetbytime", "skipaccumulatedmessage"), "reset"),
    "querycq": "dump",
    **dict.fromkeys(("verify", "fsck"), "check"),
}
# What to do in a cluster instead of the commands that need the files of a store.
_ON_THE_MACHINE = "Run it on the machine of a broker, with the broker's storePathRootDir as PATH"
_OF_FILES = {
    "dump": _ON_THE_MACHINE,
    "check": _ON_THE_MACHINE,
    "repair": _ON_THE_MACHINE,
    "close": _ON_THE_MACHINE,
    "serve": "The brokers of a cluster deliver delayed messages themselves",
}
_USAGE = "Usage: rmq COMMAND (PATH | -n HOST:PORT) ...\n       rmq COMMAND --help\n"


class _Rmq(click.Group):
    """Command group that loads commands on demand and has a line of help for each of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, None for an unknown name."""
        listed = COMMANDS.get(cmd_name)
        if listed is None:
            return None
        found: click.Command = getattr(import_module(f"rmq_spark.command.{listed.module}"), listed.name)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return name, command and remaining arguments. Raises UsageError with similar names for an unknown one."""
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            other = OTHER_NAMES.get(args[0].lower())
            near = [other] if other else difflib.get_close_matches(args[0], COMMANDS, 2)
            hint = f"Did you mean {' or '.join(near)}?" if near else "`rmq --help` lists them."
            ctx.fail(f"unknown command {args[0]!r}. {hint}")
        name, command, rest = super().resolve_command(ctx, args)
        return name, command, rest

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the usage, and the commands in sections."""
        formatter.write(_USAGE)
        width = max(map(len, COMMANDS))
        for name, listed in COMMANDS.items():
            if listed.section:
                formatter.write(f"\n{listed.section}:\n")
            formatter.write(f"  {name:<{width}}  {listed.short_help}\n")


def make_group() -> click.Group:
    """Return click's group of all commands."""
    group = _Rmq(_NAME, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
    return click.version_option(__version__, prog_name="rmq-spark", message="%(prog)s %(version)s")(group)


def open_streams() -> None:
    """Open standard streams that the parent process closed, and print in UTF-8, which JSON requires.

    Without this the next file to be opened, maybe one of the store, would get the descriptor of a standard stream.
    A path that is not valid UTF-8 is printed as its bytes.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        stream = getattr(sys, name)
        if stream is None:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, `number`
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))
        elif name == "stdout":
            stream.reconfigure(encoding="utf-8", errors="surrogateescape")


def keep_interrupts() -> None:
    """Make Ctrl-C end the command even if it arrives inside a finalizer.

    Python reports an exception of `__del__` and continues. A timer therefore raises the interrupt again after 10 ms.
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
    """Run the command line `words`; return its exit status. Errors are printed to stderr."""
    group = make_group()
    if COMPLETION_VARIABLE in os.environ:
        import_module("rmq_spark.command.completion")  # it registers what it changes
        group.main(list(words), prog_name=_NAME)
    command = f"rmq {words[0]}" if words and words[0] in COMMANDS else _NAME
    try:
        # click's main would exit with 1 after a broken pipe.
        with group.make_context(_NAME, list(words)) as ctx:
            status = group.invoke(ctx)
        sys.stdout.flush()
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.ClickException as error:
        shown = _explained(error, words[0]) if isinstance(error, click.NoSuchOption) else error
        shown.show()
        return error.exit_code
    except RmqError as error:
        _print_error(command, error, words)
        return 1
    except (KeyboardInterrupt, click.Abort):
        if not words or words[0] not in _READ_ONLY:
            say(f"{command}: stopped. Nothing was left half-done.")
        return STOPPED
    except BrokenPipeError:  # the reader, such as `head`, closed the pipe
        _discard_output()
        return 0
    except UnicodeEncodeError as error:  # a topic, key or tag of the command line
        say_error(command, f"{_bytes_of(error.object)!r} is not valid UTF-8.")
        return 2
    except OSError as error:
        say_error(command, f"{error.filename or 'system error'}: {error.strerror or error}")
        return 1
    return status if isinstance(status, int) else 0


def _print_error(command: str, error: RmqError, words: Sequence[str]) -> None:
    """Print an error with its notes, and the ids of all messages that may be stored."""
    # The arguments, the values of `--option=value`, and both as absolute paths, are printed unchanged.
    given = [*words[1:], *(word.partition("=")[2] for word in words if word.startswith("-"))]
    own = [*given, *(os.path.abspath(word) for word in given if word), *getattr(error, "shown", ())]
    for text in (str(error), *getattr(error, "__notes__", ())):
        say_error(command, typed(text.removeprefix(_NOTE), own))
    if isinstance(error, UnknownOutcomeError):
        for message_id in error.message_ids:
            if message_id not in error.text:
                say(message_id)


def _bytes_of(text: str) -> bytes:
    """Return the bytes of a word of the command line; of another text with half of a surrogate pair, its escapes."""
    try:
        return os.fsencode(text)
    except UnicodeEncodeError:
        return text.encode(errors="backslashreplace")


def _explained(error: click.NoSuchOption, command: str) -> click.UsageError:
    """Return the error, or a clearer one if the option belongs to other commands or must not exist."""
    if error.option_name in ("-n", "--name-server") and command in _OF_FILES:
        text = f"{error.option_name}: `rmq {command}` needs the files of a store. {_OF_FILES[command]}."
    elif error.option_name == "--secret-key":
        text = (
            "--secret-key does not exist, because other users see the words of a command. Set the environment variable "
            "RMQ_SECRET_KEY, or give --credentials-file."
        )
    else:
        return error
    return click.UsageError(text, error.ctx)


def _discard_output() -> None:
    """Redirect stdout to /dev/null, so that flushing its buffer at exit does not fail again."""
    if sys.__stdout__ is not None and sys.stdout is sys.__stdout__:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())
