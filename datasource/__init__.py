"""The Spark data source: options, offsets, planning, and the readers and writers that Spark calls.

The modules that read, in the order in which a query uses them:

source.py                                 format("rmq"): creates readers and writers from the options
option_table.py, option_parsers.py        the declaration of each option, and the parsers of their texts
read_options.py, group_options.py         the checked options of a query
subscription.py, filters.py, schema.py    topics and queues, filters, columns
batch_reader.py                           spark.read: one plan
stream_reader.py                          spark.readStream: one micro-batch after the other
offsets.py                                the JSON in the checkpoint
source_view.py, positions.py              bounds of queues, offsets of times, the end of a stream
planning.py, limits.py, splitting.py      start and end of a batch, its limits, its tasks
pushdown.py, key_selection.py             conditions of the query, and ranges by key or id
stream_progress.py                        the positions before a batch, and the losses
group_planner.py, batch_assignment.py     the queues of a query that is a member of a consumer group
group_placement.py                        where such a query begins in each queue
partition.py, partition_reader.py         the input of a task, and how the task reads

The modules that write:

write_options.py, sink_schema.py          the checked options, and the columns that can be written
writer.py, task_writer.py                 df.write and df.writeStream: on the driver, and in tasks
listener.py, listener_task.py, listener_sink.py   `rmq_spark.consume`: calls a listener with each batch of a stream

From the engine these modules import only `rmq_spark.store`, `rmq_spark.store.errors` and `rmq_spark.store.model`. Only
`source`, `partition`, `listener_sink` and the readers and writers import pyspark.
"""
