"""`rmq reset` and `close`: administration of groups and stores. In a store each is atomic."""

import json
from datetime import UTC, datetime
from typing import Any

import click

import rmq_spark
from rmq_spark.command.completion import complete_groups, complete_topics
from rmq_spark.command.default_place import StoreCommand
from rmq_spark.command.output import print_data, printable, say, typed, waiting
from rmq_spark.command.parameters import TIMES, Moment, appending, examples, writing_options
from rmq_spark.command.place import PathFirstCommand, Place, takes_place
from rmq_spark.command.tables import show
from rmq_spark.store.model import LAST_SECONDS_MS

_KEYWORDS = ("earliest", "latest")
_OFFSETS = '\'{"orders": {"0": 12}}\''
_FORMS = f"earliest, latest, TIME, or {_OFFSETS}"


class _Where(click.ParamType):
    """Where a group is reset to, as text."""

    name = "where"

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None) -> str:
        """Return what is expected."""
        return f"Expected {_FORMS}. {TIMES}"


_RESET_EXAMPLES = examples(
    "rmq reset store billing earliest",
    "rmq reset store billing now-2h --topic orders",
    'rmq reset store billing \'{"orders": {"0": 12}}\'',
    'rmq reset -n ns1:9876 billing \'{"orders": {"broker-a:0": 12}}\'',
)


@click.command(cls=PathFirstCommand, epilog=f"{TIMES}\n\n{_RESET_EXAMPLES}")
@takes_place(writing_options)
@click.argument("group", shell_complete=complete_groups)
@click.argument("to", metavar="WHERE", type=_Where())
@click.option(
    "--topic",
    "topics",
    multiple=True,
    shell_complete=complete_topics,
    help="Only this topic, which may be new to the group. Repeatable.",
)
def reset(place: Place, as_data: bool, group: str, to: str, topics: tuple[str, ...]) -> None:
    """Reset the offsets of GROUP to WHERE: earliest, latest, a TIME, or offsets as JSON.

    Running queries continue there with their next batch. The previous offsets are printed too, so that a reset can be
    undone. The group's retry topic is only reset with --topic %RETRY%GROUP.

    In a cluster the masters of the topics are asked. With brokers of 4.9 the members of the group take the offsets
    after about 10 s. If only some brokers reset their queues, the exit status is 1, and the queues are named.
    """
    where = _parse_where(to)
    with waiting("resetting"):
        before, problem = _offsets_before(place, group)
        found = rmq_spark.reset_offsets(**place.arguments, group=group, to=where, topics=list(topics) or None)
    if problem is not None:
        say(f"The previous offsets are not known: {printable(typed(problem))}")
    rows = [
        {
            "group": group,
            "topic": topic,
            **_queue_columns(place, queue_id),
            "oldGroupOffset": before.get(topic, {}).get(queue_id),
            "groupOffset": offset,
        }
        for topic, queues in found.items()
        for queue_id, offset in queues.items()
    ]
    brokers = ("brokerName",) if place.is_cluster else ()
    columns = ("topic", *brokers, "queueId", "oldGroupOffset", "groupOffset")
    show(rows, columns, as_data=as_data, nothing="Nothing was reset: the group has no queues.")


def _offsets_before(place: Place, group: str) -> tuple[Any, str | None]:
    """Return the offsets of a group, and None; {} and the reason where the brokers of a cluster do not tell them."""
    try:
        return rmq_spark.group_offsets(**place.reading, group=group), None
    except (rmq_spark.NoPermissionError, rmq_spark.BackendUnavailableError) as error:
        if not place.is_cluster:
            raise
        return {}, str(error)


def _queue_columns(place: Place, queue_id: Any) -> dict[str, Any]:
    """Return the columns of a queue that `reset_offsets` names."""
    if not place.is_cluster:
        return {"queueId": queue_id}
    broker, _, number = str(queue_id).rpartition(":")
    return {"brokerName": broker, "queueId": int(number)}


def _parse_where(to: str) -> Any:
    """Return the argument of `reset_offsets`. Raises UsageError for a text of another form."""
    if to in _KEYWORDS:
        return to
    if to.lstrip().startswith("{"):
        try:
            return json.loads(to)
        except json.JSONDecodeError as error:
            raise click.UsageError(f"WHERE is not valid JSON: {error}; expected for example {_OFFSETS}.") from None
    try:
        time_ms = Moment().convert(to, None, None)
    except click.BadParameter:
        raise click.UsageError(f"WHERE {to!r}: expected {_FORMS}. {TIMES}") from None
    # `reset_offsets` refuses a number of ms that looks like seconds, which a date before 2001 may be.
    return datetime.fromtimestamp(time_ms / 1000, UTC) if time_ms <= LAST_SECONDS_MS else time_ms


@click.command(cls=StoreCommand, epilog=examples("rmq close store"))
@appending
def close(
    path: str, commit_log_path: str | None, lock_timeout_s: float, allow_network_store: bool, as_data: bool
) -> None:
    """Flush all files, write the checkpoint and remove `abort`, so that a broker starts without recovery."""
    with waiting("closing"):
        rmq_spark.close(
            path,
            commit_log_path=commit_log_path,
            lock_timeout_ms=round(lock_timeout_s * 1000),
            allow_network_store=allow_network_store,
        )
    if as_data:
        print_data([{"path": path, "state": "closed"}])
    else:
        say(f"The store at {path} is cleanly shut down.")
