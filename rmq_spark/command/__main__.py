"""`python -m rmq_spark.command`, where the console script is not on the PATH."""

from rmq_spark.command import main

main()
