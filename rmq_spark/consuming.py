"""`consume`: a streaming query that calls a message listener, as RocketMQ's push consumer does."""

import functools
import inspect
import math
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from rmq_spark.datasource.options.option_table import OPTIONS, parse_value, require
from rmq_spark.datasource.options.read_options import ReadOptions, parse_options
from rmq_spark.datasource.options.schema import Field
from rmq_spark.datasource.options.sink_schema import check_send_back_schema
from rmq_spark.datasource.options.subscription import spelled_topics
from rmq_spark.datasource.options.write_options import SendBackOptions
from rmq_spark.datasource.spark.clocks import wall_clock_ms
from rmq_spark.datasource.spark.listener import CONCURRENTLY, ORDERLY, THREADS, ConsumeContext, ListenerTerms
from rmq_spark.datasource.spark.listener_task import PLACE_COLUMNS, RESENT_COLUMNS, TOPIC_COLUMNS
from rmq_spark.datasource.spark.repeated_batch import find_repeated_batch
from rmq_spark.store.argument_checks import check_place
from rmq_spark.store.backend import BROKER_NAME, Capability, Location
from rmq_spark.store.errors import OptionError
from rmq_spark.store.model import QueueKey
from rmq_spark.store.names import check_retrying_group, retry_topic
from rmq_spark.store.places import locate

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from rmq_spark.datasource.spark.batch_counts import BatchCounts
    from rmq_spark.datasource.spark.listener_sink import ListenerJob

# DefaultMQPushConsumer#maxReconsumeTimes (4.9, 5.3): -1 means 16, or no limit for orderly listeners.
_MAX_RECONSUME_TIMES = {CONCURRENTLY: 16, ORDERLY: -1}
# DefaultMQPushConsumer#consumeTimeout: 15 minutes. ProcessQueue#cleanExpiredMsg leaves orderly consumers out.
_TIMEOUT_S = {CONCURRENTLY: 900.0, ORDERLY: math.inf}
_MOST_THREADS = 1_000  # DefaultMQPushConsumerImpl#checkConfig
_MOST_TIMEOUT_S = 1_000_000_000  # no platform waits for much longer than 2^63 ns
# The steps of a query plan that keep rows in their partition and order. An orderly listener allows no others.
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
_MOST_COUNTS = 1_000
_counts: "dict[str, BatchCounts]" = {}  # of the queries that this process started last, by run id
_PLACES = {option.name: option for option in OPTIONS if option.name in ("path", "nameServer")}


def consume(
    df: "DataFrame",
    listener: Callable[[list[Any], ConsumeContext], object],
    *,
    path: "str | PurePath | None" = None,
    name_server: str | None = None,
    group: str,
    checkpoint_location: "str | PurePath",
    model: str = CONCURRENTLY,
    batch_size: int = 1,
    threads: int = THREADS,
    max_reconsume_times: int | None = None,
    timeout: float | None = None,
    trigger: "str | Mapping[str, Any] | None" = None,
    query_name: str | None = None,
    expired_original: str = "error",
    allow_network_store: bool = False,
) -> "StreamingQuery":
    """Start a streaming query that passes the rows of `df` to `listener`. Return the query.

    `df` must be a stream that reads the store at `path`, or the cluster of `name_server`, with consumerGroup=`group`.
    Each of Spark's tasks calls `listener(messages, context)` from up to `threads` threads, with up to `batch_size` rows
    of one queue, so the listener must be thread-safe unless `threads` is 1. It returns a ConsumeConcurrentlyStatus (a
    ConsumeOrderlyStatus if `model` is "orderly"), or its name as a string. All rows of the call have failed if it
    returns RECONSUME_LATER, SUSPEND_CURRENT_QUEUE_A_MOMENT or None, raises an exception, or takes longer than `timeout`
    seconds (900; None with "orderly"; math.inf for no limit). With several threads and "concurrently" such a call is
    not waited for: it runs on, and its result is ignored.

    A failed row is sent back to the group's retry topic, and is delivered again later. If Spark repeats the batch, this
    is done once in a store. In a cluster the copies of the first attempt are looked for, and twice is rare. After
    `max_reconsume_times` retries (default 16) it becomes a dead letter. With `model="orderly"`, which requires
    orderly=true on the source and is not possible in a cluster, a queue has one call at a time, and the first failed
    call suspends its queue, which resumes later at the failed row, without a limit unless `max_reconsume_times` is set.
    With messageModel=broadcasting failed rows are dropped.
    `trigger` is a processing time ("10 seconds") or a mapping of the arguments of `DataStreamWriter.trigger`.

    Follows DefaultMQPushConsumer (4.9, 5.3). Raises OptionError before the query starts if arguments, columns or
    options of the source are invalid or conflict. The query fails if the listener returns anything else, if failed rows
    cannot be sent back, or if calls that take too long hold all threads for 15 minutes.
    """
    terms = _check_terms(listener, model, batch_size, threads, max_reconsume_times, timeout)
    check_retrying_group(group)
    if expired_original not in _EXPIRED_ORIGINALS:
        raise OptionError(f"expired_original={expired_original!r} is none of: {', '.join(_EXPIRED_ORIGINALS)}.")
    resends = expired_original == _RESEND
    if not isinstance(checkpoint_location, str | PurePath) or not str(checkpoint_location).strip():
        raise OptionError(f"checkpoint_location={checkpoint_location!r} is not a folder. Give a folder of its own.")
    _check_trigger(trigger)
    source = _find_source(df)
    location = _check_source(source, path, name_server, group, model)
    _check_columns(df, location, model, resends=resends)
    _check_pickles(listener)
    options = SendBackOptions(
        location=location,
        group=group,
        max_reconsume_times=terms.max_reconsume_times if model == CONCURRENTLY else None,
        expired_original=expired_original,
        allow_network_store=allow_network_store,
        repeated=find_repeated_batch(df.sparkSession, str(checkpoint_location)) if name_server is not None else None,
    )
    job = _make_job(df, source, listener, terms, options)
    writer = df.writeStream.outputMode("append").option("checkpointLocation", str(checkpoint_location))
    if query_name is not None:
        writer = writer.queryName(query_name)
    if trigger is not None:
        writer = writer.trigger(**({"processingTime": trigger} if isinstance(trigger, str) else dict(trigger)))
    return _start(df, writer, job)


def _make_job(
    df: "DataFrame",
    source: ReadOptions,
    listener: Callable[[list[Any], ConsumeContext], object],
    terms: ListenerTerms,
    options: SendBackOptions,
) -> "ListenerJob":
    """Return the settings of the sink for a stream with the options `source`.

    Raises OptionError if `df` may move the rows of an orderly listener, or hides the queues of retried rows.
    """
    from rmq_spark.datasource.spark.batch_counts import BatchCounts
    from rmq_spark.datasource.spark.listener_sink import ListenerJob

    member = source.group
    assert member is not None
    retry_topic = _find_retry_topic(df, source, member.group)
    if terms.model == ORDERLY and not member.is_broadcasting:
        _check_order(df)
    return ListenerJob(
        listener,
        terms,
        options,
        drops=member.is_broadcasting,
        is_shared=member.is_shared,
        retry_topic=retry_topic,
        listener_id=f"rmq_listener_{uuid.uuid4().hex}",
        batch_counts=BatchCounts(df.sparkSession.sparkContext),
    )


def _start(df: "DataFrame", writer: "DataStreamWriter", job: "ListenerJob") -> "StreamingQuery":
    from rmq_spark.datasource.spark.listener_sink import make_sink

    df.sparkSession.dataSource.register(make_sink(job))
    query = writer.format(job.listener_id).start()
    assert job.batch_counts is not None
    _counts[str(query.runId)] = job.batch_counts
    for run_id in list(_counts)[:-_MOST_COUNTS]:
        _counts.pop(run_id, None)
    return query


def listener_progress(query: "StreamingQuery") -> dict[str, Any] | None:
    """Return counts and times of a listener in the last batch with calls, in the manner of `query.lastProgress`.

    `query` is the result of `consume`, in the process that called it, which knows its last 1,000 queries. Returns None
    before the first such batch. A batch is counted when Spark has reported its progress. The dict has these entries:

    - `id`, `runId`, `name`: those of the query. `batchId`: that of the batch.
    - `rows`, `calls`: rows that the listener got, and its calls. `failedRows`: rows that failed. `timedOutCalls`: calls
      that took longer than the timeout.
    - `rowsPerSecond`: `rows` over the time from the first call to the end of the last one.
    - `callMs`: the time of a call in ms, as `p50`, `p95` and `max`. Percentiles are wrong by at most 5 %.
    - `total`: the same entries, from `rows` on, of all batches since the query started. Its rate includes the time
      between batches.

    Raises OptionError for another query. Thread-safe.
    """
    counts = _counts.get(str(getattr(query, "runId", None)))
    if counts is None:
        raise OptionError(
            f"listener_progress: {query!r} is not one of the last {_MOST_COUNTS:,} queries that consume() started in "
            "this process; expected one. Give what consume() returned."
        )
    progress = query.lastProgress
    found = None if progress is None else counts.report(progress.batchId)
    return None if found is None else {"id": str(query.id), "runId": str(query.runId), "name": query.name, **found}


def _check_terms(
    listener: object,
    model: str,
    batch_size: int,
    threads: int,
    max_reconsume_times: int | None,
    timeout: float | None,
) -> ListenerTerms:
    _check_signature(listener)
    if model not in _MAX_RECONSUME_TIMES:
        raise OptionError(f'model={model!r} is none of: "{CONCURRENTLY}", "{ORDERLY}".')
    if not _is_count(batch_size, 1):
        raise OptionError(f"batch_size={batch_size!r} must be an integer ≥ 1.")
    if not _is_count(threads, 1) or threads > _MOST_THREADS:
        raise OptionError(f"threads={threads!r} must be an integer from 1 to {_MOST_THREADS}.")
    if max_reconsume_times is not None and not _is_count(max_reconsume_times, -1):
        raise OptionError(
            f"max_reconsume_times={max_reconsume_times!r} must be an integer ≥ 0, or None or -1 for the default of "
            'RocketMQ: 16, or no limit with model="orderly".'
        )
    if timeout is not None and not _is_timeout(timeout):
        raise OptionError(
            f"timeout={timeout!r}. Accepted: seconds, more than 0 and at most {_MOST_TIMEOUT_S:,}; math.inf for no "
            'limit; None for the default: 900 seconds, or no limit with model="orderly".'
        )
    most = max_reconsume_times if max_reconsume_times not in (None, -1) else _MAX_RECONSUME_TIMES[model]
    assert most is not None
    limit_s = _TIMEOUT_S[model] if timeout is None else timeout
    return ListenerTerms(model, batch_size, most, None if limit_s == math.inf else limit_s, threads)


def _check_signature(listener: object) -> None:
    """Raise OptionError unless the listener can be called with messages and context, and can return a status.

    A coroutine or generator function cannot return a status.
    """
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
        # follow_wrapped=False: the function that `functools.wraps` wrapped may have other parameters.
        signature = inspect.signature(listener, follow_wrapped=False)
    except (TypeError, ValueError):  # a function in C without a signature
        return
    try:
        signature.bind([], ConsumeContext("", 0))
    except TypeError as error:
        raise OptionError(
            f"the listener {name} is called with two arguments, messages and context, and takes {signature}: {error}. "
            "Declare it as def listener(messages, context)."
        ) from None


def _is_timeout(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value <= _MOST_TIMEOUT_S or value == math.inf


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**31


def _check_pickles(listener: object) -> None:
    """Raise OptionError for a listener that Spark cannot pickle."""
    from pyspark import cloudpickle

    try:
        cloudpickle.dumps(listener)  # type: ignore[no-untyped-call]
    except Exception as error:  # objects may raise any type
        name = getattr(listener, "__qualname__", type(listener).__name__)
        raise OptionError(
            f"the listener {name} cannot be pickled: {type(error).__name__}: {error}. It runs in Spark's tasks, in "
            "other processes: locks, connections, sessions and open files stay here. Make them within the listener, at "
            "its first call in each thread."
        ) from error


def _find_source(df: "DataFrame") -> ReadOptions:
    """Return the options of the rmq stream that `df` reads.

    Raises OptionError unless `df` reads exactly one stream, and that has the format rmq.
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
    return parse_options({str(name): str(value) for name, value in given.items()}, wall_clock_ms(), locate)


def _plans(df: "DataFrame") -> Iterator[Any]:
    """Yield the nodes of the analysed plan of `df`."""
    stack = [df._jdf.queryExecution().analyzed()]
    while stack:
        plan = stack.pop()
        yield plan
        children = plan.children()
        stack += [children.apply(number) for number in range(children.size())]


def _check_source(
    source: ReadOptions, path: "str | PurePath | None", name_server: str | None, group: str, model: str
) -> Location:
    """Return the location that the stream reads. Raises OptionError if it does not fit the arguments of `consume`."""
    location, member = source.check_complete()[0], source.group
    require(location, Capability.SEND_BACK, "consume()")
    _check_same_place(location, path, name_server)
    if model == ORDERLY and Capability.SUSPENSIONS not in location.capabilities:
        raise OptionError(
            f'consume() with model="{ORDERLY}" is not possible here: {location.describe()} cannot '
            f'{Capability.SUSPENSIONS}; expected a place that can. Use model="{CONCURRENTLY}", which sends back the '
            "rows that fail and goes on with the others."
        )
    if member is None or member.group != group:
        found = "has no group" if member is None else f"is read by consumerGroup={member.group}"
        raise OptionError(f'group="{group}", but the stream {found}. Add .option("consumerGroup", "{group}") to it.')
    if member.is_orderly != (model == ORDERLY) and not (member.is_broadcasting and model == ORDERLY):
        ordered = '.option("orderly", "true")'
        if model == ORDERLY:
            step = f"Add {ordered} to the source."
        elif Capability.SUSPENSIONS in location.capabilities:
            step = f'Add model="{ORDERLY}", or leave {ordered} out of the source.'
        else:
            step = f"Leave {ordered} out of the source."
        raise OptionError(
            f'model="{model}" and the source\'s orderly={str(member.is_orderly).lower()} do not go together: to '
            f"consume queues in order, the source must read them in order. {step}"
        )
    if model == CONCURRENTLY and not member.is_broadcasting and not member.subscribes_retry:
        retry = retry_topic(group)
        if source.subscription is None or not source.subscription.covers(QueueKey(retry, 0)):
            raise OptionError(
                f"subscribeRetry=false: what fails goes to {retry}, and this query would never see it again. Leave "
                "subscribeRetry out of the source."
            )
    return location


def _check_trigger(trigger: object) -> None:
    if trigger is not None and not isinstance(trigger, str | Mapping):
        raise OptionError(
            f"trigger={trigger!r}: found {type(trigger).__name__}; expected a text such as '1 second', or a mapping "
            "such as {'availableNow': True}."
        )


def _check_same_place(location: Location, path: "str | PurePath | None", name_server: str | None) -> None:
    """Raise OptionError unless path, or else name_server, names the place that the stream reads."""
    check_place("consume", path, name_server, "read from")
    name, value = ("path", str(path)) if name_server is None else ("nameServer", name_server)
    given = locate({name: parse_value(_PLACES[name], value, 0)})
    read = location.mark()
    marks = [mark[name] for mark in (read, {} if given is None else given.mark()) if name in mark]
    if name == "nameServer":
        marks = [";".join(sorted(mark.split(";"))) for mark in marks]
    if len(marks) < 2 or marks[0] != marks[1]:
        argument = "path" if name_server is None else "name_server"
        shown = next(f"{key}={read[key]}" for key in _PLACES if key in read)
        raise OptionError(
            f'{argument}="{value}" is not where the stream reads: {shown}. Failed rows go back to the place that they '
            "come from; give the same one to both."
        )


def _check_columns(df: "DataFrame", location: Location, model: str, *, resends: bool) -> None:
    names = df.columns
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise OptionError(f"duplicate columns: {', '.join(twice)}. Rename one, or leave it out.")
    missing = [name for name in PLACE_COLUMNS if name not in names]
    if model == ORDERLY and "physicalTopic" not in names:
        missing.append("physicalTopic")
    elif not set(TOPIC_COLUMNS) & set(names):
        missing.append("topic")
    if Capability.BROKERS in location.capabilities and BROKER_NAME not in names:
        missing.append(BROKER_NAME)
    if missing:
        hint = '; physicalTopic needs .option("columns", "*")' if "physicalTopic" in missing else ""
        raise OptionError(
            f"the rows lack {', '.join(missing)}; expected all columns that identify a failed message. Keep them in "
            f"the query{hint}."
        )
    lost = [name for name in ("body", "msgId") if name not in names] if resends else []
    if lost:
        raise OptionError(
            f'expired_original="resend" sends messages that have left the log from their rows, and these lack '
            f'{", ".join(lost)}. Keep the columns; msgId needs .option("columns", "*"). To keep a '
            "message's tags, keys and properties keep those, too."
        )
    used = {*PLACE_COLUMNS, *TOPIC_COLUMNS, BROKER_NAME, *(RESENT_COLUMNS if resends else ())}
    fields = [Field(one.name, one.dataType.simpleString(), one.nullable) for one in df.schema.fields]
    check_send_back_schema([field for field in fields if field.name in used])


def _find_retry_topic(df: "DataFrame", source: ReadOptions, group: str) -> str | None:
    """Return the group's retry topic if the stream reads it, else None.

    Raises OptionError if the stream also reads the retry topic of another group and `df` has no column physicalTopic.
    The column `topic` of such a row is the topic to which the message was first sent, so the row's queue would be
    unknown.
    """
    retry, read = retry_topic(group), source.for_stream().subscription
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
