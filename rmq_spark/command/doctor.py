"""`rmq doctor`: tries what a query of a live cluster needs, and says what is missing."""

import sys
import textwrap
from typing import Any

import click

import rmq_spark
from rmq_spark.command.cluster_options import CLUSTER, cluster_arguments, own_topics
from rmq_spark.command.colours import meaning_of, paint
from rmq_spark.command.completion import complete_groups, complete_topics
from rmq_spark.command.output import print_data, printable, say
from rmq_spark.command.parameters import as_data, examples
from rmq_spark.command.tables import PIPE_CHARS, terminal_width

_CAN_RUN = "A query can run."
_NOT_TRIED = " Rights for writing were not tried."
_STATE_WIDTH = len("missing")


@click.command(
    epilog=examples(
        "rmq doctor --name-server ns1:9876",
        "rmq doctor -n 'ns1:9876;ns2:9876' --topic orders --group billing",
        "rmq doctor -n ns1:9876 --sink results",
    )
)
@CLUSTER
@click.option(
    "--topic",
    "topics",
    multiple=True,
    metavar="TOPIC",
    shell_complete=complete_topics,
    help="Try to read this topic. Can be repeated.",
)
@click.option(
    "--group",
    metavar="GROUP",
    shell_complete=complete_groups,
    help="Try to read the committed offsets of this consumer group.",
)
@click.option(
    "--sink",
    "sinks",
    multiple=True,
    metavar="TOPIC",
    shell_complete=complete_topics,
    help="Try exactly-once writes to this topic. Can be repeated.",
)
@own_topics
@as_data
def doctor(
    name_server: str, topics: tuple[str, ...], group: str | None, sinks: tuple[str, ...], as_data: bool, **cluster: Any
) -> int:
    """Try every connection, right and feature that a query of a live cluster needs.

    Each finding has a state, and the next step if there is one. Exit status 0 if a query can run, else 1.

    \b
    ok       all is well
    warning  a query runs, but slower, or without a feature
    missing  a query fails or waits

    With --sink the doctor stores a row without effect in the ledger, a message without rows in the stage topic, and
    offsets in a consumer group RMQ_SPARK_… of its own. TOPIC gets no message.

    Without --sink the doctor changes nothing in the cluster. It creates no topic and no group, and commits no offset.
    So it does not find that a broker lacks the group that pulls and creates none, or forbids it.
    """
    findings = rmq_spark.examine_cluster(name_server, topics, group, sink_topics=sinks, **cluster_arguments(cluster))
    if as_data:
        print_data(
            {"what": one.what, "state": str(one.state), "why": one.why, "nextStep": one.next_step} for one in findings
        )
    else:
        for one in findings:
            _print_finding(one)
    missing = sum(one.state == "missing" for one in findings)
    if not as_data:
        say(f"A query cannot run: {missing} missing." if missing else _CAN_RUN + ("" if sinks else _NOT_TRIED))
    return 1 if missing else 0


def _print_finding(one: Any) -> None:
    """Print a finding: state, what, why, and the next step. On a terminal its lines are wrapped beside the state."""
    width = max(terminal_width(), 40) if sys.stdout.isatty() else PIPE_CHARS
    indent = " " * (_STATE_WIDTH + 2)
    wrap = textwrap.TextWrapper(width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    lines = wrap.wrap(f"{printable(one.what)}: {printable(one.why)}")
    if one.next_step:
        lines += wrap.wrap(printable(one.next_step))
    state = str(one.state)
    name = paint(state.ljust(_STATE_WIDTH), meaning_of("state", state), sys.stdout)
    click.echo("\n".join([f"{name}  {lines[0].lstrip()}", *lines[1:]]))
