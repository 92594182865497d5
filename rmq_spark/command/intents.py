"""`rmq prepare-sink` and `rmq intents`: the topics of exactly-once writes to a cluster, and their open batches."""

import os
import sys
import time
from datetime import UTC, datetime
from typing import Any

import click

import rmq_spark
from rmq_spark.command.cluster_options import SINK_CLUSTER, cluster_arguments, own_topics
from rmq_spark.command.default_place import NAME_SERVER_VARIABLE
from rmq_spark.command.output import print_data, printable, say, typed, waiting
from rmq_spark.command.parameters import as_data, examples, together
from rmq_spark.command.tables import show

_COMMANDS = ("list", "finish", "skip")
_COLUMNS = ("query", "batch", "begun", "age", "owners", "brokers", "rows")
_COUNTS = ("written", "missing")
_UNKNOWN = "unknown"
_times = together(
    click.option(
        "--settle-time",
        type=click.FloatRange(min=0),
        metavar="SECONDS",
        help="Time in which a broker executes what it has read, in seconds.  [default: 5]",
    ),
    click.option(
        "--fence-timeout",
        type=click.FloatRange(min=0),
        metavar="SECONDS",
        help="Maximum wait for the connections of earlier sessions to end, in seconds.  [default: 150]",
    ),
)


class _LedgerBroker(click.Option):
    """The option `--ledger-broker`. It is part of the usage."""

    def get_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return the words of the usage."""
        return [f"{self.opts[0]} {self.metavar}"]


class _BrokerName(click.ParamType):
    """The name of a broker."""

    name = "broker"

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None) -> str:
        """Return how to find the names."""
        return (
            "Expected the name of one broker, such as --ledger-broker broker-a. `rmq brokers -n HOST:PORT` lists the "
            "names."
        )


def _only_one(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> str:
    """Return the name of the broker. Fails for several names, of which click would take the last one."""
    if len(values) > 1:
        raise click.BadParameter(f"found {', '.join(values)}; expected one broker.", ctx, param)
    return values[0]


@click.command(
    "prepare-sink",
    epilog=examples("rmq prepare-sink -n ns1:9876 --ledger-broker broker-a"),
)
@SINK_CLUSTER
@click.option(
    "--ledger-broker",
    required=True,
    multiple=True,
    cls=_LedgerBroker,
    type=_BrokerName(),
    callback=_only_one,
    metavar="NAME",
    help="Name of the broker that keeps the ledger, for ever. `rmq brokers` lists the names.",
)
@click.option(
    "--replace-ledger",
    is_flag=True,
    help="Create a ledger although there was one, whose disk is lost. Batches may then be stored twice.",
)
@own_topics
@as_data
def prepare_sink(name_server: str, as_data: bool, **given: Any) -> None:
    """Create the topics that writes with exactly-once delivery need in a cluster.

    The stage topic is created on every master, and the ledger on one broker. Topics that exist stay as they are. If
    another broker has a ledger, or one does not answer, nothing is created; neither if there was a ledger, and its
    broker is down. Run it again after a broker was added.
    """
    with waiting("creating"):
        done = rmq_spark.prepare_sink(name_server, **_arguments(given))
    if as_data:
        row = {"ledgerBroker": done.ledger_broker, "isNew": done.is_new, "stageBrokers": list(done.stage_brokers)}
        print_data([{**row, "group": done.group, "refusals": dict(done.refusals)}])
        return
    say(f"The ledger {'is new' if done.is_new else 'exists already'} on broker {done.ledger_broker}.")
    say(f"Rows are staged on {', '.join(done.stage_brokers)}.")
    for broker, reason in done.refusals.items():
        say(f"Group {done.group} cannot be used on {broker}: {printable(typed(reason))}")


class _Intents(click.Group):
    """The commands about open intents. Without the name of one, they are listed."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. Without a command, `rmq intents -n HOST:PORT` lists the batches."""
        first = args[0] if args else "-n" if os.environ.get(NAME_SERVER_VARIABLE) else ""
        if first.startswith("-") and first not in ("-h", "--help"):
            args = [_COMMANDS[0], *args]
        return super().parse_args(ctx, args)


@click.group(cls=_Intents, subcommand_metavar="[list|finish|skip] -n HOST:PORT ...")
def intents() -> None:
    """List, finish or skip batches that were begun in a cluster and not ended.

    Without a command they are listed. `finish ID` stores the missing rows of a batch, as the next commit of its query
    does. `skip ID` loses the rows that cannot be stored. `rmq intents finish --help` shows the options.
    """


@intents.command(
    "list",
    short_help="List the batches that were begun and not ended.",
    epilog=examples("rmq intents -n ns1:9876", "rmq intents list -n ns1:9876 --count-rows --json"),
)
@SINK_CLUSTER
@click.option("--count-rows", is_flag=True, help="Read the target queues, and count which rows are stored so far.")
@own_topics
@as_data
def list_(name_server: str, as_data: bool, count_rows: bool, **given: Any) -> None:
    """List the batches that writes with exactly-once delivery have begun and not ended, the oldest first.

    A batch that is being written at this moment is in the list too. The next commit of a query finishes its batch. A
    plain batch write has no batch id, and nobody repeats it: finish it with `rmq intents finish`.
    """
    with waiting("reading the ledger"):
        found = rmq_spark.open_intents(name_server, count_rows=count_rows, **_arguments(given))
    now_ms = time.time_ns() // 1_000_000  # noqa: TID251 - the command line is where the clock is read
    rows: list[dict[str, Any]] = [
        {
            "query": one.query,
            "batch": one.batch,
            "begun": None if one.begun_ms is None else datetime.fromtimestamp(one.begun_ms / 1000, UTC),
            "age": None if one.begun_ms is None else max(now_ms - one.begun_ms, 0) // 1000,
            "owners": list(one.owners),
            "brokers": list(one.brokers),
            "rows": one.rows,
            "written": one.written,
            "missing": one.missing,
            "problem": one.problem or None,
        }
        for one in found
    ]
    columns = (*_COLUMNS, *(_COUNTS if count_rows else ()))
    shown = [{**row, "owners": len(row["owners"])} for row in rows]
    show(rows if as_data else shown, columns, as_data=as_data, nothing="No batch is open.", optional=("age", "owners"))
    for row in rows:
        if row["problem"] and not as_data:
            say(f"{printable(row['query'])}: {printable(typed(row['problem']))}")


@intents.command(short_help="Store the missing rows of a batch.", epilog=examples("rmq intents finish -n ns1:9876 ID"))
@SINK_CLUSTER
@click.argument("query_id", metavar="ID")
@_times
@own_topics
@as_data
def finish(name_server: str, query_id: str, as_data: bool, **given: Any) -> None:
    """Store the missing rows of the open batch of ID: a query, or a plain batch write.

    It waits until no session that has begun the batch is connected any more. So it is safe while the query runs.
    """
    with waiting("finishing"):
        key = rmq_spark.finish_intent(name_server, query_id, **_arguments(given))
    if as_data:
        print_data([{"query": key.query_id, "batch": key.batch_id, "state": "done"}])
    else:
        say(f"All rows of {printable(str(key))} are stored.")


@intents.command(
    short_help="End a batch without the rows that cannot be stored.",
    epilog=examples("rmq intents skip -n ns1:9876 ID", "rmq intents skip -n ns1:9876 ID --yes 17"),
)
@SINK_CLUSTER
@click.argument("query_id", metavar="ID")
@click.option(
    "--yes",
    "missing",
    metavar="N",
    help="Number of missing rows whose loss is accepted, or unknown for a batch of which nothing is left.",
)
@_times
@own_topics
@as_data
def skip(name_server: str, query_id: str, as_data: bool, missing: str | None, **given: Any) -> int:
    """End the open batch of ID without the rows that cannot be stored any more, which are lost then.

    First all rows are published that can be. Then it asks for the number of the missing rows as confirmation. Without a
    terminal, and with --json, --yes is required, and must be that number. Exit status 1 if the batch stays open.
    """
    arguments = _arguments(given)
    number = _parse_missing(missing)
    try:
        with waiting("publishing what can be"):
            done = rmq_spark.skip_intent(name_server, query_id, number, **arguments)
    except rmq_spark.IntentStuckError as error:
        if as_data or missing is not None:
            raise
        say(printable(typed(str(error))))
        number = _UNKNOWN if error.missing is None else error.missing
        if not _confirm(number):
            say("The batch stays open.")
            return 1
        with waiting("skipping"):
            done = rmq_spark.skip_intent(name_server, query_id, number, batch_id=error.batch_id, **arguments)
    if as_data:
        row = {"query": done.key.query_id, "batch": done.key.batch_id, "written": done.written}
        damaged = {str(queue): list(offsets) for queue, offsets in done.damaged.items()}
        print_data([{**row, "missing": done.missing, "damaged": damaged}])
        return 0
    if done.is_lost:
        how = ""
    elif done.missing is None:
        how = " Another session has ended it, or the answer to this one was lost."
    else:
        how = f" {done.written:,} of its rows are stored, {done.missing:,} are missing."
    say(f"{printable(str(done.key))} is ended.{how}")
    if done.is_lost:
        say("Start the query once with onBatchConflict=skip: Spark repeats the batch, and its rows are not known.")
    for queue, offsets in done.damaged.items():
        say(f"Queue {queue} has damaged copies of rows at the queue offsets {', '.join(map(str, offsets))}.")
    return 0


def _confirm(number: Any) -> bool:
    """Ask on the terminal for the number of missing rows. False without a terminal, even if a pipe contains it."""
    if not sys.stdin.isatty():
        say(f"Standard input is not a terminal, so confirmation is impossible. Add --yes {number} to skip the batch.")
        return False
    click.echo(f"Type {number} to give the missing rows up: ", nl=False, err=True)
    answer = sys.stdin.readline()
    if not answer:
        say("")  # Ctrl-D
    return answer.strip() == str(number)


def _parse_missing(text: str | None) -> Any:
    """Return the argument of `skip_intent`. Raises UsageError for a text of another form."""
    if text is None or text == _UNKNOWN:
        return text
    if not (text.isascii() and text.isdigit()):
        raise click.UsageError(f"--yes {text}: expected the number of missing rows, or unknown.")
    return int(text)


def _arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a function of `rmq_spark` for the options of a command."""
    found = cluster_arguments({name: value for name, value in given.items() if value is not None})
    for name in ("settle_time", "fence_timeout"):
        if name in found:
            found[f"{name}_ms"] = round(found.pop(name) * 1000)
    return found
