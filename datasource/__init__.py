"""The Spark side: options, offsets and planning (pure arithmetic), and the readers that Spark calls.

Sees the engine only through its door, `rmq_spark.store`, and the words beside it.
"""
