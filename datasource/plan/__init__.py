"""Planning: from offsets and bounds to the ranges of a batch. Pure: no place, no clock, no Spark.

offsets.py                                the JSON in the checkpoint
stream_progress.py, planning.py           start and end of a batch, and losses
limits.py, splitting.py                   the limits of a batch, and its tasks
pushdown.py                               conditions of the query
group_placement.py, batch_assignment.py   the queues of a member of a consumer group, and its positions there
"""
