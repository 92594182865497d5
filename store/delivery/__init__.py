"""Delivery of scheduled messages (delay levels, timer), and retries of failed ones (retry topics, dead letters).

This package finds the messages that are due and builds their records. `store/transaction/` commits these records like
any other batch. The modules may import the layers below: format, filter, disk, log, transaction and group. They start
no threads.
"""
