"""What Spark calls. The modules that read, in the order in which a query uses them:

source.py                                 format("rmq"): creates readers and writers from the options
batch_reader.py                           spark.read: one plan
stream_reader.py                          spark.readStream: one micro-batch after the other
source_view.py, positions.py              bounds of queues, offsets of times, the end of a stream
read_rights.py, unmatched.py              permissions, and warnings about filters without a match
key_selection.py                          ranges by key or id
group_planner.py                          the queues of a member of a consumer group
partition.py, partition_reader.py         the input of a task, and how the task reads

log_lines.py                              log lines as JSON, and their set-up by the environment
json_text.py                              rows and log lines as JSON that is safe to print
worker_daemon.py                          forks Python workers that have the reader loaded

The modules that write:

writer.py, task_writer.py                 df.write and df.writeStream: on the driver, and in tasks
listener.py, listener_task.py, listener_sink.py   `rmq_spark.consume`: calls a listener with each batch of a stream
listener_calls.py, orderly_queues.py      the calls of a task, in the two models
call_window.py, call_threads.py           which calls run at the same time, and their threads
call_counts.py, batch_counts.py           counts and times of calls, and their way to the program
"""
