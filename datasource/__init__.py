"""The Spark side: options, offsets and planning (pure arithmetic), and the readers and writers that Spark calls.

What lives where, in the order in which a query meets it:

source.py            format("rmq"): options in, readers and writers out
option_parsing.py, values.py   how options are read, names and texts
option_table.py, options.py   the one table of what a query takes, what contradicts
subscription.py      which queues
schema.py, settings.py   which columns, and what of the options goes into a task
batch_reader.py      spark.read: one plan
stream_reader.py     spark.readStream: one micro-batch after the other
offsets.py           the text in the checkpoint
planning.py, limits.py, splitting.py   where to begin and end, how much, how many tasks
store_view.py, timestamps.py, stream_end.py   what is asked of the store: bounds, times, where a stream ends
partition.py, partition_reader.py   what travels to a task, and what the task does

And a write:

sink_option_table.py, sink_values.py, sink_options.py   what a write takes, and what contradicts
sink_schema.py, sink_columns.py   which columns can be written, and as what the encoder gets them
batch_writer.py, stream_writer.py   df.write, and each micro-batch of df.writeStream
sink_task.py, commit_message.py   what a task does, and what it tells the commit
sink_commit.py, batch_ids.py   what the driver does then, and whose batch it is

Sees the engine only through its door, `rmq_spark.store`, and the words beside it. Only source, partition,
commit_message and the readers and writers import pyspark.
"""
