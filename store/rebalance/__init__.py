"""Allocation of the queues of a topic to the members of a consumer group. Pure.

strategies.py   RocketMQ's allocation strategies
allocation.py   the strategy that the option `allocateStrategy` names, and checks of its results
"""
