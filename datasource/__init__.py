"""The Spark side: options, offsets and planning (pure arithmetic), and the readers that Spark calls.

What lives where, in the order in which a query meets it:

source.py            format("rmq"): options in, readers out
option_table.py, values.py, options.py   the one table of options, how texts are read, what contradicts
subscription.py      which queues
schema.py, settings.py   which columns, and what of the options goes into a task
batch_reader.py      spark.read: one plan
stream_reader.py     spark.readStream: one micro-batch after the other
offsets.py           the text in the checkpoint
planning.py, limits.py, splitting.py   where to begin and end, how much, how many tasks
store_view.py, timestamps.py, stream_end.py   what is asked of the store: bounds, times, where a stream ends
partition.py, partition_reader.py   what travels to a task, and what the task does

Sees the engine only through its door, `rmq_spark.store`, and the words beside it. Only source, partition and the two
readers import pyspark.
"""
