"""The Spark data source, in three folders. Each imports the ones before it:

options/   the options, subscriptions, filters and columns of a query or a write, parsed and checked
plan/      offsets, limits and the planning of batches: pure
spark/     the classes that Spark calls, and what they ask a place that has queues

From the engine they import the words (`errors`, `model`, `names`), the contract (`backend`) and `filter`. Only `spark`
imports `places`, which turns options into the location of a place.
"""
