"""`rmq completion`, and the words that a shell proposes for paths, topics and groups.

Names are read from the place of the command line. If that fails, nothing is proposed, and nothing is printed. Names
that a shell does not take as one word are left out: a store may have been written by others.
"""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    ZshComplete,
    add_completion_class,
    get_completion_class,
    split_arg_string,
)

import rmq_spark
from rmq_spark.command.cluster_options import CONNECTION_NAMES, cluster_arguments
from rmq_spark.command.default_place import COMPLETION_VARIABLE
from rmq_spark.store.names import is_system_topic

_REQUEST_MS = 1000  # a person waits at the keyboard
_WORD = re.compile(r"[%a-zA-Z0-9_-]+")


class _Bash(BashComplete):
    """Completion in bash, which takes the signs `:` and `=` for the ends of words, as in `-n ns1:9876`.

    So the script passes the line up to the cursor instead of bash's words.
    """

    source_template = BashComplete.source_template.replace(
        'COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD', 'COMP_WORDS="${COMP_LINE:0:COMP_POINT}"'
    )

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the one at the cursor, and that one."""
        line = os.environ["COMP_WORDS"]
        words = split_arg_string(line)[1:]
        if not words or line[-1].isspace():
            return words, ""
        return words[:-1], words[-1]


add_completion_class(_Bash)


class _Zsh(ZshComplete):
    """Completion in zsh, where `--topic=or` is one word: what is before the value stays."""

    source_template = (
        ZshComplete.source_template.replace(
            "    for type key", '    [[ ${words[CURRENT]} == --*=* ]] && compset -P 1 "*="\n    for type key'
        )
        .replace("compadd -U", 'compadd -U -i "$IPREFIX"')
        .replace("completions_with_descriptions -U", 'completions_with_descriptions -U -i "$IPREFIX"')
    )


add_completion_class(_Zsh)


def complete_path(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Propose folders. With a name server PATH is left out, so the names of the next argument are proposed."""
    if ctx.params.get("name_server"):
        names = {one.name for one in ctx.command.params}
        if "group" in names:
            return complete_groups(ctx, param, incomplete)
        return complete_topics(ctx, param, incomplete) if names & {"topic", "topics"} else []
    return [CompletionItem(incomplete, type="dir")]


def complete_topics(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Propose topics; RocketMQ's own only after their first character. A word with a slash is PATH."""
    if "/" in incomplete or incomplete.startswith("."):
        return [CompletionItem(incomplete, type="dir")]

    def read(arguments: dict[str, Any]) -> list[str]:
        with rmq_spark.open_reader(**arguments) as reader:
            reader.refresh()
            return [name for name in reader.topics() if incomplete or not is_system_topic(name)]

    return _items(ctx, read, incomplete)


def complete_groups(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Propose consumer groups."""
    return _items(ctx, lambda arguments: rmq_spark.groups(**arguments), incomplete)


def _items(ctx: click.Context, read: Callable[[dict[str, Any]], list[str]], incomplete: str) -> list[CompletionItem]:
    with suppress(Exception):
        return [
            CompletionItem(name)
            for name in read(_arguments(ctx))
            if name.startswith(incomplete) and _WORD.fullmatch(name)
        ]
    return []


def _arguments(ctx: click.Context) -> dict[str, Any]:
    """Return the arguments of `open_reader` for the words so far."""
    given = {name: ctx.params.get(name) for name in ("name_server", *CONNECTION_NAMES)}
    if given["name_server"]:
        found = cluster_arguments(given)
        return {**found, "broker_down_timeout_ms": 1, "request_timeout_ms": _REQUEST_MS}
    return {"path": ctx.params.get("path"), "commit_log_path": ctx.params.get("commit_log_path")}


@click.command(epilog="\b\nExamples:\n  rmq completion bash\n  rmq completion zsh")
@click.argument("shell", type=click.Choice(["bash", "zsh"]))
def completion(shell: str) -> None:
    """Print the script with which a shell completes commands, options, paths, topics and groups.

    \b
    ~/.bashrc: eval "$(rmq completion bash)"
    ~/.zshrc:  eval "$(rmq completion zsh)"
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(click.get_current_context().find_root().command, {}, "rmq", COMPLETION_VARIABLE).source())
