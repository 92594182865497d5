"""Summaries of a store for notebooks and the `rmq` command, and the data of plots."""
