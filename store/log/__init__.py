"""The files of one store: segments, commit log, consume queues, key index and topics, for readers and writers.

Modules here may import the modules directly in `store/`, and those of `store/format` and `store/disk`. Reading a store
changes nothing on disk.
"""
