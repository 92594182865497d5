"""Entry point of `python -m rmq_spark.command`, for when `rmq` is not on the PATH."""

from rmq_spark.command import main

main()
