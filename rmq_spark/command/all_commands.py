"""All commands under one name, and what becomes of their errors."""

import os
import sys
from collections.abc import Sequence

import click

from rmq_spark import RmqError
from rmq_spark.command import dead_letters, demonstration, files, health, looking, messages, moving, serving, writing
from rmq_spark.command.output import say

STOPPED = 130  # by Ctrl-C, as shells say it
# In this order in the help: those that look, those that write, those that keep a store in order, and a toy.
_COMMANDS = (
    *(looking.topics, looking.queues, looking.groups, looking.lag, messages.cat, messages.get, files.dump),
    *(writing.send, writing.create, writing.reset, dead_letters.dlq, moving.export, moving.import_),
    *(health.check, health.repair, writing.close, serving.serve, demonstration.demo),
)


class _Rmq(click.Group):
    """The group, whose help is one screen of 24 lines."""

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write usage, the commands, and what exit statuses mean."""
        formatter.write("Usage: rmq COMMAND PATH …    PATH is a RocketMQ store's folder (storePathRootDir)\n\n")
        formatter.write_dl([(str(one.name), one.get_short_help_str(70)) for one in _COMMANDS])
        formatter.write("\n`rmq COMMAND --help` says more. Exit status: 0 done, 1 an error, 2 wrong words,\n")
        formatter.write("3 the answer is no (check, repair, get), 130 stopped by Ctrl-C.\n")


def make_group() -> click.Group:
    """Return the command with all its commands, as click has them."""
    return _Rmq(
        "rmq",
        commands=list(_COMMANDS),
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    )


def run(words: Sequence[str]) -> int:
    """Run the command that these words are; return its exit status."""
    try:
        status = make_group().main(list(words), prog_name="rmq", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except RmqError as error:
        say(f"rmq {words[0] if words else ''}: {error}")
        return 1
    except (KeyboardInterrupt, click.Abort):
        say("rmq: stopped. What was begun is left whole, or as it was.")
        return STOPPED
    except BrokenPipeError:  # whoever read has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status if isinstance(status, int) else 0
