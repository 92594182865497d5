"""The place that a command uses if its words name none: the environment variables RMQ_STORE and RMQ_NAME_SERVER.

A PATH or `--name-server` among the words has priority. The first word is PATH if there is a word for every argument, if
it contains a slash, or if it is the folder of a store; otherwise it is the next argument, such as a topic.
"""

import os
from collections.abc import Mapping
from typing import Any

import click

from rmq_spark.command.output import say

STORE_VARIABLE = "RMQ_STORE"
NAME_SERVER_VARIABLE = "RMQ_NAME_SERVER"
COMPLETION_VARIABLE = "_RMQ_COMPLETE"  # a shell that asks for completions sets it
_FOLDERS_OF_STORE = ("commitlog", "consumequeue", "config")


# Commands that change the place. They name a place of the environment on stderr.
_WRITING = frozenset(
    "send create delete reset republish import repair close serve prepare-sink finish skip".split()  # noqa: SIM905
)


class StoreCommand(click.Command):
    """A command for a store directory only, whose PATH may be in RMQ_STORE."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. Raises UsageError if neither a word nor the variable is PATH."""
        args = with_default_place(self, ctx, args)
        if not args and not ctx.resilient_parsing:
            raise click.UsageError(
                f"Missing argument 'PATH'. Give PATH, the folder of a store, or set {STORE_VARIABLE} to it.", ctx
            )
        return super().parse_args(ctx, args)


def with_default_place(command: click.Command, ctx: click.Context, args: list[str]) -> list[str]:
    """Return the words of a command with the place of the environment, unless they name a place or ask for help.

    The words of a line that a shell completes are those that can be parsed. A command that changes the place names it
    on stderr. Raises UsageError if both variables are set and the command works with both places, or if the first word
    of `rmq create` may be a new store or a topic.
    """
    if "--help" in args or "-h" in args:
        return args
    if ctx.resilient_parsing:
        args = _without_open_option(command, args)
    arguments = [one for one in command.params if isinstance(one, click.Argument)]
    has_path = any(one.name == "path" for one in arguments)
    has_name_server = any(one.name == "name_server" for one in command.params)
    store = os.environ.get(STORE_VARIABLE) if has_path else None
    name_server = os.environ.get(NAME_SERVER_VARIABLE) if has_name_server else None
    if not store and not name_server:
        return args
    given, _, _ = command.make_parser(ctx).parse_args(list(args))
    words = argument_words(arguments, given)
    if isinstance(given.get("name_server"), str) or _has_path(arguments, words, is_unfinished=ctx.resilient_parsing):
        return args
    if store and name_server:
        if ctx.resilient_parsing:
            return args
        raise click.UsageError(
            f"two places: found {STORE_VARIABLE}={store} and {NAME_SERVER_VARIABLE}={name_server} in the environment; "
            "expected one of them. Give PATH or --name-server HOST:PORT, which have priority, or unset one variable.",
            ctx,
        )
    if ctx.info_name == "create":
        found = f"{NAME_SERVER_VARIABLE}={name_server}" if name_server else f"{STORE_VARIABLE}={store}"
        _require_one_topic(ctx, words, found)
    if name_server:
        note_default_place(ctx, NAME_SERVER_VARIABLE, name_server)
        return ["--name-server", name_server, *args]
    assert store
    note_default_place(ctx, STORE_VARIABLE, store)
    return [store if not store.startswith("-") else os.path.join(".", store), *args]


def _without_open_option(command: click.Command, args: list[str]) -> list[str]:
    """Return the words without an option at the end whose value is being typed, which would stop the parser."""
    options = (one for one in command.params if isinstance(one, click.Option) and not one.is_flag)
    return args[:-1] if args and any(args[-1] in one.opts for one in options) else args


def note_default_place(ctx: click.Context, variable: str, place: str) -> None:
    """Name a place of the environment on stderr if the command changes it."""
    if ctx.info_name in _WRITING and not ctx.resilient_parsing:
        say(f"{variable}={place} is the {'cluster' if variable == NAME_SERVER_VARIABLE else 'store'}.")


def _require_one_topic(ctx: click.Context, words: list[str], variable: str) -> None:
    """Raise UsageError for several words: the first one may be meant as PATH of a store that does not exist yet."""
    if len(words) > 1 and not ctx.resilient_parsing:
        raise click.UsageError(
            f"{words[0]!r} may be a new store or a topic: found {len(words)} words and {variable} in the environment; "
            f"expected a place among the words. Give ./{words[0]} for a new store, or the place of the topics: its "
            "PATH with a slash, or -n HOST:PORT.",
            ctx,
        )


def argument_words(arguments: list[click.Argument], given: Mapping[str, Any]) -> list[str]:
    """Return the words that are arguments, in their order."""
    found: list[str] = []
    for one in arguments:
        value = given.get(one.name or "")
        values = value if isinstance(value, tuple | list) else (value,)
        found += [word for word in values if isinstance(word, str)]  # the parser has a mark for a missing word
    return found


def _has_path(arguments: list[click.Argument], found: list[str], *, is_unfinished: bool) -> bool:
    """Return whether the first word is PATH. More words may follow on a line that is unfinished."""
    if not found:
        return False
    required = sum(one.required or one.name == "path" for one in arguments)
    if len(found) < required and not is_unfinished:
        return False
    has_all = len(found) >= len(arguments) and all(one.nargs == 1 for one in arguments)
    return has_all or is_path(found[0])


def is_path(word: str) -> bool:
    """Return whether a word is a path rather than the name of a topic or group."""
    return (
        "/" in word or word in (".", "..") or any(os.path.isdir(os.path.join(word, one)) for one in _FOLDERS_OF_STORE)
    )
