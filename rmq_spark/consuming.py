"""`consume`: a listener in RocketMQ's manner, run by a streaming query."""

import functools
import inspect
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from rmq_spark.datasource.clocks import wall_clock_ms
from rmq_spark.datasource.listening import CONCURRENTLY, ORDERLY, ConsumeContext, ListenerTerms
from rmq_spark.datasource.listening_task import PLACE_COLUMNS, RESENT_COLUMNS, TOPIC_COLUMNS
from rmq_spark.datasource.option_parsing import parse_value
from rmq_spark.datasource.option_table import OPTIONS
from rmq_spark.datasource.options import ReadOptions, parse_options
from rmq_spark.datasource.schema import Field
from rmq_spark.datasource.send_back_schema import check_send_back_schema
from rmq_spark.datasource.sink_options import SinkOptions
from rmq_spark.datasource.subscription import spelled_topics
from rmq_spark.store import check_retrying_group, retry_topic_of
from rmq_spark.store.errors import OptionError
from rmq_spark.store.units import QueueKey

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

# RocketMQ's own: DefaultMQPushConsumer#maxReconsumeTimes -1 is 16 concurrently, and no limit in order (4.9, 5.3).
_MAX_RECONSUME_TIMES = {CONCURRENTLY: 16, ORDERLY: -1}
# What leaves a source's rows where and as they are: between it and an orderly listener stands nothing else.
_IN_ORDER = {
    "StreamingRelationV2",
    "Project",
    "Filter",
    "SubqueryAlias",
    "View",
    "EventTimeWatermark",
    "CollectMetrics",
}
_EXPIRED_ORIGINALS = _ERROR, _RESEND = ("error", "resend")
_PATH = next(option for option in OPTIONS if option.name == "path")


def consume(
    df: "DataFrame",
    listener: Callable[[list[Any], ConsumeContext], object],
    *,
    path: "str | PurePath",
    group: str,
    checkpoint_location: "str | PurePath",
    model: str = CONCURRENTLY,
    batch_size: int = 1,
    max_reconsume_times: int | None = None,
    timeout: float | None = None,
    trigger: "str | Mapping[str, Any] | None" = None,
    query_name: str | None = None,
    expired_original: str = "error",
    allow_network_store: bool = False,
) -> "StreamingQuery":
    """Start a query that gives the rows of `df`, a stream of the store at `path` read by `group`, to a listener.

    `listener(messages, context)` runs in the tasks, with up to `batch_size` rows of one queue, and returns a
    ConsumeConcurrentlyStatus or ConsumeOrderlyStatus (or its name). RECONSUME_LATER, SUSPEND_CURRENT_QUEUE_A_MOMENT,
    None, an exception, and taking longer than `timeout` seconds mean that the rows failed. What failed is sent back
    once per batch and row, and comes again by the group's retry topic up to `max_reconsume_times` times (16), then it
    is a dead letter. With model="orderly", for which the source has orderly=true, the queue stops at the first call
    that fails, and goes on from there later (without limit unless `max_reconsume_times` sets one). A group that reads
    with messageModel=broadcasting drops what failed. `trigger` is what `DataStreamWriter.trigger` takes, as a mapping,
    or a processing time.

    Raises OptionError for arguments, columns and options of the source that do not fit together, before anything is
    started. The query fails if the listener returns something else, or if failed rows cannot be sent back.
    """
    terms = _check_terms(listener, model, batch_size, max_reconsume_times, timeout)
    check_retrying_group(group)
    resends = _check_expired(expired_original) == _RESEND
    checkpoint = _check_checkpoint(checkpoint_location)
    store, source = _absolute(parse_value(_PATH, str(path), 0)), _find_source(df)
    _check_source(source, store, group, model)
    _check_columns(df, model, resends=resends)
    retry_topic = _find_retry_topic(df, source, group)
    _check_pickles(listener)
    is_broadcasting = source.group is not None and source.group.is_broadcasting
    if model == ORDERLY and not is_broadcasting:
        _check_order(df)
    from rmq_spark.datasource.listening_sink import ListenerJob, make_sink

    log = source.commit_log_path
    options = SinkOptions(
        path=store,
        commit_log_path=None if log is None else tuple(map(_absolute, log)),
        mode="sendBack",
        group=group,
        max_reconsume_times=terms.max_reconsume_times if model == CONCURRENTLY else None,
        expired_original=expired_original,
        allow_network_store=allow_network_store,
    )
    name = f"rmq_listener_{uuid.uuid4().hex}"
    is_shared = source.group is not None and source.group.is_shared
    job = ListenerJob(listener, terms, options, drops=is_broadcasting, is_shared=is_shared, retry_topic=retry_topic)
    df.sparkSession.dataSource.register(make_sink(name, job))
    writer = df.writeStream.format(name).outputMode("append").option("checkpointLocation", checkpoint)
    if query_name is not None:
        writer = writer.queryName(query_name)
    if trigger is not None:
        writer = writer.trigger(**({"processingTime": trigger} if isinstance(trigger, str) else dict(trigger)))
    return writer.start()


def _check_terms(
    listener: object, model: str, batch_size: int, max_reconsume_times: int | None, timeout: float | None
) -> ListenerTerms:
    _check_signature(listener)
    if model not in _MAX_RECONSUME_TIMES:
        raise OptionError(f'model={model!r} is none of: "{CONCURRENTLY}", "{ORDERLY}".')
    if not _is_count(batch_size, 1):
        raise OptionError(f"batch_size={batch_size!r} is no whole number from 1 on.")
    if max_reconsume_times is not None and not _is_count(max_reconsume_times, -1):
        raise OptionError(
            f"max_reconsume_times={max_reconsume_times!r}. Accepted: a whole number from 0 on; None or -1 for "
            "RocketMQ's own, which is 16, and no limit in order."
        )
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0):
        raise OptionError(f"timeout={timeout!r}. Accepted: seconds, more than 0; None for no limit.")
    most = max_reconsume_times if max_reconsume_times not in (None, -1) else _MAX_RECONSUME_TIMES[model]
    assert most is not None
    return ListenerTerms(model, batch_size, most, timeout)


def _check_signature(listener: object) -> None:
    """Raise OptionError for a listener that cannot be called with messages and context, or answers with no status."""
    if not callable(listener):
        raise OptionError(f"listener is {listener!r}, which cannot be called. Give a function of messages and context.")
    name = getattr(listener, "__qualname__", type(listener).__name__)
    called: Any = listener
    while isinstance(called, functools.partial):
        called = called.func
    call = called if inspect.isroutine(called) else getattr(called, "__call__", called)  # noqa: B004
    checks = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
    if any(check(call) for check in checks):
        raise OptionError(
            f"the listener {name} is a coroutine or a generator; expected a function that returns a status. Call what "
            "it awaits or yields within an ordinary function."
        )
    try:
        # Of the listener itself: what `functools.wraps` names may take other arguments.
        signature = inspect.signature(listener, follow_wrapped=False)
    except (TypeError, ValueError):  # of a function in C that does not show its arguments
        return
    try:
        signature.bind([], ConsumeContext("", 0))
    except TypeError as error:
        raise OptionError(
            f"the listener {name} is called with two arguments, messages and context, and takes {signature}: {error}. "
            "Declare it as def listener(messages, context)."
        ) from None


def _check_expired(word: str) -> str:
    if word not in _EXPIRED_ORIGINALS:
        raise OptionError(f"expired_original={word!r} is none of: {', '.join(_EXPIRED_ORIGINALS)}.")
    return word


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**31


def _check_checkpoint(given: object) -> str:
    if not isinstance(given, str | PurePath) or not str(given).strip():
        raise OptionError(f"checkpoint_location={given!r} is no folder. Give one that is this query's own.")
    return str(given)


def _check_pickles(listener: object) -> None:
    """Raise OptionError for a listener that Spark cannot take to the tasks."""
    from pyspark import cloudpickle

    try:
        cloudpickle.dumps(listener)  # type: ignore[no-untyped-call]
    except Exception as error:  # whatever the objects within it raise
        name = getattr(listener, "__qualname__", type(listener).__name__)
        raise OptionError(
            f"the listener {name} cannot be pickled: {type(error).__name__}: {error}. It runs in Spark's tasks, in "
            "other processes: locks, connections, sessions and open files stay here. Make them within the listener, at "
            "its first call."
        ) from error


def _find_source(df: "DataFrame") -> ReadOptions:
    """Return the options of the one stream in the plan, as its load() takes them.

    Raises OptionError unless there is one, and it is of format("rmq").
    """
    if not getattr(df, "isStreaming", False):
        raise OptionError('consume() needs a stream: spark.readStream.format("rmq")....load(). This is none.')
    if not hasattr(df, "_jdf"):
        raise OptionError("consume() needs a session in this process: Spark Connect does not show a stream's options.")
    streams = [plan for plan in _plans(df) if plan.getClass().getSimpleName().startswith("StreamingRelation")]
    if len(streams) != 1:
        raise OptionError(f"consume() needs one stream, and this query has {len(streams)}. Start a query for each.")
    stream = streams[0]
    is_ours = stream.getClass().getSimpleName() == "StreamingRelationV2" and stream.sourceName() == "rmq"
    if not is_ours:
        name = stream.sourceName() if hasattr(stream, "sourceName") else "?"
        raise OptionError(f'consume() needs a stream of format("rmq"), and this is one of format("{name}").')
    given = dict(stream.extraOptions().asCaseSensitiveMap())
    return parse_options({str(name): str(value) for name, value in given.items()}, wall_clock_ms())


def _plans(df: "DataFrame") -> Iterator[Any]:
    """Yield the nodes of the analysed plan."""
    left = [df._jdf.queryExecution().analyzed()]
    while left:
        plan = left.pop()
        yield plan
        children = plan.children()
        left += [children.apply(number) for number in range(children.size())]


def _check_source(source: ReadOptions, path: str, group: str, model: str) -> None:
    read, member = source.check_complete()[0], source.group
    if _absolute(read) != path:
        raise OptionError(
            f'path="{path}" is not where the stream reads: path="{read}". Failed rows go back into the store that they '
            "come from; give the same path to both."
        )
    if member is None or member.group != group:
        found = "has no group" if member is None else f"is read by consumerGroup={member.group}"
        raise OptionError(f'group="{group}", but the stream {found}. Add .option("consumerGroup", "{group}") to it.')
    if member.is_orderly != (model == ORDERLY) and not (member.is_broadcasting and model == ORDERLY):
        wanted = '.option("orderly", "true")' if model == ORDERLY else 'model="orderly"'
        raise OptionError(
            f'model="{model}" and the source\'s orderly={str(member.is_orderly).lower()} do not go together: queues '
            f"that are to be consumed in order must be read in order. Add {wanted}"
            + (" to the source." if model == ORDERLY else ', or leave .option("orderly", "true") out of the source.')
        )
    if model == CONCURRENTLY and not member.is_broadcasting and not member.subscribes_retry:
        retry = retry_topic_of(group)
        if source.subscription is None or not source.subscription.covers(QueueKey(retry, 0)):
            raise OptionError(
                f"subscribeRetry=false: what fails goes to {retry}, and this query would never see it again. Leave "
                "subscribeRetry out of the source."
            )


def _check_columns(df: "DataFrame", model: str, *, resends: bool) -> None:
    names = df.columns
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise OptionError(f"columns that are there twice: {', '.join(twice)}. Rename one, or leave it out.")
    missing = [name for name in PLACE_COLUMNS if name not in names]
    if model == ORDERLY and "physicalTopic" not in names:
        missing.append("physicalTopic")
    elif not set(TOPIC_COLUMNS) & set(names):
        missing.append("topic")
    if missing:
        raise OptionError(
            f"the rows lack {', '.join(missing)}, by which a message is known that failed. Keep these columns of the "
            'source; physicalTopic is there on request: .option("columns", "*").'
        )
    lost = [name for name in ("body", "msgId") if name not in names] if resends else []
    if lost:
        raise OptionError(
            f'expired_original="resend" sends messages that have left the log from their rows, and these lack '
            f'{", ".join(lost)}. Keep the columns; msgId is there on request: .option("columns", "*"). To keep a '
            "message's tags, keys and properties keep those, too."
        )
    used = {*PLACE_COLUMNS, *TOPIC_COLUMNS, *(RESENT_COLUMNS if resends else ())}
    fields = [Field(one.name, one.dataType.simpleString(), one.nullable) for one in df.schema.fields]
    check_send_back_schema([field for field in fields if field.name in used])


def _find_retry_topic(df: "DataFrame", source: ReadOptions, group: str) -> str | None:
    """Return the retry topic that the stream reads, None without one.

    Raises OptionError for a stream that reads the retry topic of another group, too, and lacks physicalTopic: a row of
    such a topic shows the topic to which it was first sent, so its queue cannot be known.
    """
    retry, read = retry_topic_of(group), source.for_stream().subscription
    prefix = retry.removesuffix(group)
    others = [name for name in spelled_topics(read) if name.startswith(prefix) and name != retry]
    if others and "physicalTopic" not in df.columns:
        raise OptionError(
            f"the rows lack physicalTopic, and the stream reads {', '.join(others)}, whose rows show the topic to "
            'which they were first sent. Add .option("columns", "*") to the source, and keep that column.'
        )
    return retry if read is not None and read.covers(QueueKey(retry, 0)) else None


def _check_order(df: "DataFrame") -> None:
    for plan in _plans(df):
        name = plan.getClass().getSimpleName()
        if name not in _IN_ORDER:
            raise OptionError(
                f'model="orderly" needs the rows as the source has them, and the query has a step that may move them: '
                f"{name}. select, filter, where, withColumn and drop are fine; leave the others to the listener."
            )


def _absolute(path: str) -> str:
    """Return a path as the source does."""
    try:
        return str(Path(path).expanduser().absolute())
    except RuntimeError:  # no such user, so `~name` is a folder
        return str(Path(path).absolute())
