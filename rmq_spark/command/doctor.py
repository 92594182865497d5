"""`rmq doctor`: tries what a query of a live cluster needs, and says what is missing. It changes nothing."""

from typing import Any

import click

import rmq_spark
from rmq_spark.command.cluster_options import CONNECTION_OPTIONS, cluster_arguments
from rmq_spark.command.output import print_json, printable, say
from rmq_spark.command.parameters import as_json, examples, together

_CAN_RUN = "A query can run. Rights for writing were not tried."
_STATE_WIDTH = len("missing")
_COLOURS = {"missing": "red", "warning": "yellow", "ok": "green"}
_cluster = together(
    click.option(
        "-n",
        "--name-server",
        required=True,
        metavar="HOST:PORT",
        help="Name server of the cluster. Several are separated by semicolons.",
    ),
    *CONNECTION_OPTIONS,
)


@click.command(
    epilog=examples(
        "rmq doctor --name-server ns1:9876",
        "rmq doctor -n 'ns1:9876;ns2:9876' --topic orders --group billing",
    )
)
@_cluster
@click.option("--topic", "topics", multiple=True, metavar="TOPIC", help="Try to read this topic. Can be repeated.")
@click.option("--group", metavar="GROUP", help="Try to read the committed offsets of this consumer group.")
@as_json
def doctor(name_server: str, topics: tuple[str, ...], group: str | None, as_json: bool, **cluster: Any) -> int:
    """Try every connection, right and feature that a query of a live cluster needs.

    Each finding has a state, and the next step if there is one. Exit status 0 if a query can run, else 1.

    \b
    ok       all is well
    warning  a query runs, but slower, or without a feature
    missing  a query fails or waits

    The doctor changes nothing in the cluster. It creates no topic and no group, and commits no offset. So it does not
    find that a broker lacks the group that pulls and creates none, or forbids it.
    """
    findings = rmq_spark.examine_cluster(name_server, topics, group, **cluster_arguments(cluster))
    if as_json:
        print_json(
            {"what": one.what, "state": str(one.state), "why": one.why, "nextStep": one.next_step} for one in findings
        )
    else:
        for one in findings:
            _print_finding(one)
    missing = sum(one.state == "missing" for one in findings)
    if not as_json:
        say(f"A query cannot run: {missing} missing." if missing else _CAN_RUN)
    return 1 if missing else 0


def _print_finding(one: Any) -> None:
    state = click.style(str(one.state).ljust(_STATE_WIDTH), fg=_COLOURS[one.state])
    click.echo(f"{state}  {printable(one.what)}: {printable(one.why)}")
    if one.next_step:
        click.echo(f"{' ' * _STATE_WIDTH}  {printable(one.next_step)}")
