"""The place that a command reads or writes: a store directory at PATH, or a live cluster.

`reads_place` and `takes_place` give a command the argument PATH and the options of both, and call it with one `Place`.
The help of such a command lists the options for a cluster in a section of their own.
"""

import functools
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import click
from click.core import ParameterSource

import rmq_spark
from rmq_spark.command.cluster_options import (
    CONNECTION_NAMES,
    CONNECTION_OPTIONS,
    PULL_GROUP,
    ClusterOption,
    cluster_arguments,
    option_name,
)
from rmq_spark.command.completion import complete_path
from rmq_spark.command.default_place import NAME_SERVER_VARIABLE, STORE_VARIABLE, with_default_place
from rmq_spark.command.parameters import (
    Decorator,
    as_data,
    commit_log_path,
    reading_options,
    together,
)

# How long a read waits for a broker that goes away, in ms. A person at a terminal wants an answer.
_BROKER_DOWN_MS = 10_000
_FOR_CLUSTER = "rmq_spark.for_cluster"  # key in a context
_BOTH_PLACES = "(PATH | -n HOST:PORT)"
_NOT_IN_A_TOPIC = re.compile(r"[^%|a-zA-Z0-9_-]")
_NOT_IN_A_PATTERN = re.compile(r"[^%|a-zA-Z0-9_*?,\[\]!-]")


class PlaceCommand(click.Command):
    """A command that reads a store or a cluster."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, and take a missing place from the environment."""
        return super().parse_args(ctx, with_default_place(self, ctx, args))

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return the words of the usage, which has both places."""
        return [_BOTH_PLACES if piece == "PATH" else piece for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, and then those for a cluster."""
        options = [one for one in self.get_params(ctx) if isinstance(one, click.Option)]
        for title, is_of_cluster in (("Options", False), ("Options for a cluster", True)):
            chosen = [one for one in options if isinstance(one, ClusterOption) is is_of_cluster]
            with formatter.section(title):
                formatter.write_dl([record for one in chosen if (record := one.get_help_record(ctx)) is not None])


class PathFirstCommand(PlaceCommand):
    """A command whose other arguments follow PATH. With `--name-server` it has no argument PATH."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters."""
        return [one for one in super().get_params(ctx) if one.name != "path" or _FOR_CLUSTER not in ctx.meta]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Find out which place is given, and read the arguments. Raises UsageError unless there is exactly one."""
        args = with_default_place(self, ctx, args)
        given, _, _ = self.make_parser(ctx).parse_args(list(args))
        arguments = [one.name for one in self.params if isinstance(one, click.Argument)]
        words = [word for name in arguments if isinstance(word := given.get(name), str)]
        name_server = given.get("name_server")
        if isinstance(name_server, str):
            is_full = len(words) == len(arguments)
            if words and "group" in arguments:
                if _is_no_group(words[0], is_full):
                    raise _both_given(words[0], name_server)
                if is_full:
                    raise _surplus(words, self.params)
            elif words and (_is_no_topic(words[0], is_full) if "topic" in arguments else is_full):
                raise _both_given(words[0], name_server)
            ctx.meta[_FOR_CLUSTER] = True
        elif not words and "--help" not in args and "-h" not in args and not ctx.resilient_parsing:
            raise _no_place()
        return click.Command.parse_args(self, ctx, args)


def spell_limits(args: list[str]) -> None:
    """Write `-n NUMBER` as `--limit NUMBER`, because in some commands it is short for both options."""
    end = args.index("--") if "--" in args else len(args)
    for at, word in enumerate(args[:end]):
        if word == "-n" and at + 1 < end and args[at + 1].isdecimal():
            args[at] = "--limit"
        elif re.fullmatch(r"-n\d+", word):
            args[at] = f"--limit={word[2:]}"


def _is_no_group(word: str, is_full: bool) -> bool:
    """Return whether the first word is PATH, not a group. `is_full` says that there is a word for each argument."""
    return "/" in word or ((is_full or _NOT_IN_A_TOPIC.search(word) is not None) and os.path.isdir(word))


def _is_no_topic(word: str, is_full: bool) -> bool:
    """Return whether the first word is PATH, not a topic. `is_full` says that there is a word for each argument."""
    return _NOT_IN_A_TOPIC.search(word) is not None or (is_full and os.path.isdir(word))


class QueueName(NamedTuple):
    """The value of `--queue`: a queue id, and the name of a broker or "" for any."""

    broker: str
    queue_id: int

    def __str__(self) -> str:
        return f"{self.broker}:{self.queue_id}" if self.broker else str(self.queue_id)

    def fits(self, queue: Any) -> bool:
        """Return whether this is the name of a queue."""
        return queue.queue_id == self.queue_id and self.broker in ("", queue.broker)


class QueueParameter(click.ParamType):
    """A queue of a topic: `0`, or in a cluster `broker-a:0`."""

    name = "queue"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> QueueName:
        """Return the name of a queue."""
        if isinstance(value, QueueName):
            return value
        broker, _, queue_id = value.rpartition(":")
        if not (queue_id.isascii() and queue_id.isdigit()):
            self.fail(f"{value!r} is not a queue; expected a queue id, or in a cluster BROKER:ID.", param, ctx)
        return QueueName(broker, int(queue_id))


queue_names_option = click.option(
    "--queue",
    "queue_names",
    type=QueueParameter(),
    metavar="ID",
    multiple=True,
    help="Only this queue: its id, or in a cluster BROKER:ID. Repeatable.  [default: all]",
)


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a command. `cluster` has the arguments of `open_reader`, and is empty for a store.

    `writing` has the other arguments for a store that is written to.
    """

    path: str | None
    commit_log_path: str | None
    cluster: Mapping[str, Any] = field(repr=False)  # may contain a secret
    writing: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_cluster(self) -> bool:
        """Whether this is a cluster."""
        return bool(self.cluster)

    @property
    def reading(self) -> dict[str, Any]:
        """The arguments of a function of `rmq_spark` that only reads the place."""
        return replace(self, writing={}).arguments

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a function of `rmq_spark` that open the place."""
        if self.cluster:
            return dict(self.cluster)
        return {"path": self.path, "commit_log_path": self.commit_log_path, **self.writing}

    def open(self) -> Any:
        """Return a reader of the place."""
        if self.cluster:
            return rmq_spark.open_reader(**self.cluster)
        assert self.path is not None
        return rmq_spark.open_reader(self.path, commit_log_path=self.commit_log_path)


_NAME_SERVER = click.option(
    "-n",
    "--name-server",
    cls=ClusterOption,
    metavar="HOST:PORT",
    help="Use the cluster of this name server; PATH is left out then. Several are separated by semicolons.",
)
_NAMES = ("name_server", *CONNECTION_NAMES)


def reads_place(
    words: str | None = None, *, are_required: bool = False, pulls: bool = True, data: Decorator | None = as_data
) -> Decorator:
    """Return a decorator for the function of a command, which is called with a `place` and its other parameters.

    Parameters for a store that is written to, if the command has them, become part of the place. `pulls` says whether
    the command pulls messages from a cluster, and `data` is the decorator with its options for data, if any.

    `words` is the name of the parameter with the remaining arguments, such as topics. If a name server is given, the
    first argument is one of them, because PATH is left out. `are_required` says that there must be one.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(path: str | None, commit_log_path: str | None, **parameters: Any) -> Any:
            given = {name: parameters.pop(name) for name in _NAMES if name in parameters}
            given = {name: value for name, value in given.items() if value not in (None, False)}
            if words is not None and "name_server" in given and path is not None:
                if _NOT_IN_A_PATTERN.search(path):
                    raise _both_given(path, given["name_server"])
                parameters[words] = path, *parameters[words]
                path = None
            place = _make_place(path, commit_log_path, given)
            writing = {name: parameters.pop(name) for name in _WRITING if name in parameters}
            place = _with_writing(place, writing) if writing else place
            if are_required and not parameters[str(words)]:
                raise click.UsageError(
                    "Missing argument 'TOPIC...'. Give it after PATH, or after --name-server HOST:PORT."
                )
            try:
                return function(place, **parameters)
            except rmq_spark.NotFoundError as error:
                word = parameters[words][0] if words is not None and place.is_cluster and parameters[words] else None
                if word is None or not os.path.isdir(word):
                    raise
                raise rmq_spark.NotFoundError(f"{error} {_also_a_folder(word)}") from None

        path_argument = click.argument("path", metavar="PATH", required=False, shell_complete=complete_path)
        connection = [one for one in CONNECTION_OPTIONS if pulls or one is not PULL_GROUP]
        shared: list[Decorator] = [commit_log_path, *([] if data is None else [data])]
        return together(path_argument, *shared, _NAME_SERVER, *connection)(call)

    return decorate


def takes_place(shared: Decorator = reading_options, *, pulls: bool = True) -> Decorator:
    """Return a decorator for the function of a `PathFirstCommand`, which is called with a `place`.

    It adds the `shared` options, which are those of a store that is read, changed or appended to. `pulls` says whether
    the command pulls messages from a cluster.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(commit_log_path: str | None, path: str | None = None, **parameters: Any) -> Any:
            given = {name: parameters.pop(name) for name in _NAMES if name in parameters}
            given = {name: value for name, value in given.items() if value not in (None, False)}
            place = _make_place(path, commit_log_path, given)
            writing = {name: parameters.pop(name) for name in _WRITING if name in parameters}
            try:
                return function(_with_writing(place, writing), **parameters)
            except rmq_spark.NotFoundError as error:
                group = parameters.get("group")
                if group is None or not place.is_cluster or not os.path.isdir(group):
                    raise
                raise rmq_spark.NotFoundError(f"{error} {_also_a_folder(group)}") from None

        first = click.argument("path", metavar="PATH", shell_complete=complete_path)
        connection = [one for one in CONNECTION_OPTIONS if pulls or one is not PULL_GROUP]
        return together(first, shared, _NAME_SERVER, *connection)(call)

    return decorate


def _also_a_folder(word: str) -> str:
    return f"{word} is also a folder: PATH and --name-server cannot be combined."


# The parameters for a store that is written to, and their options.
_WRITING = {"lock_timeout_s": "--lock-timeout", "allow_network_store": "--allow-network-store"}


def _with_writing(place: Place, given: Mapping[str, Any]) -> Place:
    """Return the place with the parameters for a store that is written to. Raises UsageError if a cluster has some."""
    if not place.is_cluster:
        writing = dict(given)
        if "lock_timeout_s" in writing:
            writing["lock_timeout_ms"] = round(writing.pop("lock_timeout_s") * 1000)
        return replace(place, writing=writing)
    context = click.get_current_context()
    for name in given:
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise click.UsageError(
                f"{_WRITING[name]} is for a store at PATH, and cannot be combined with --name-server. Leave it out."
            )
    return place


def _make_place(path: str | None, log_path: str | None, given: Mapping[str, Any]) -> Place:
    """Return the place that the parameters name. Raises UsageError unless they name exactly one."""
    if "name_server" not in given:
        if path is None:
            raise _no_place()
        if given:
            names = ", ".join(map(option_name, given))
            raise click.UsageError(
                f"{names}: for a cluster, but PATH {path} is a store. Give --name-server HOST:PORT instead of PATH, or "
                f"leave {names} out."
            )
        return Place(path, log_path, {})
    if path is not None:
        raise _both_given(path, given["name_server"])
    if log_path is not None:
        raise click.UsageError(
            "--commit-log-path is for a store at PATH, and cannot be combined with --name-server. Leave it out."
        )
    return Place(None, None, {"broker_down_timeout_ms": _BROKER_DOWN_MS, **cluster_arguments(given)})


def _no_place() -> click.UsageError:
    return click.UsageError(
        "Missing argument 'PATH' or option '--name-server'. Give PATH, the folder of a store, or --name-server "
        f"HOST:PORT, a cluster, or set {STORE_VARIABLE} or {NAME_SERVER_VARIABLE}."
    )


def _surplus(words: list[str], parameters: list[click.Parameter]) -> click.UsageError:
    names = [one.human_readable_name for one in parameters if isinstance(one, click.Argument) and one.name != "path"]
    return click.UsageError(
        f"unexpected argument {words[-1]!r}: found {' and '.join(words)} beside --name-server; expected only "
        f"{' and '.join(names)}. Leave the other out: with --name-server no PATH is given."
    )


def _both_given(path: str, name_server: str) -> click.UsageError:
    return click.UsageError(
        f"PATH and --name-server cannot be combined: found PATH {path} and --name-server {name_server}. Give one of "
        "them."
    )
