"""A store directory as a place of the contract (`store.backend`): location, reading, groups and sinks over its files.

paths.py       the paths of a store directory
directory.py   the location: paths, and what can be done there
backend.py     reading, and the groups that read
sink.py        the sinks for new messages and for messages that are sent back
"""
