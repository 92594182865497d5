"""How bytes are kept: segments, the commit log, consume queues, the key index, topics.

May import words, format and disk. Reading changes nothing on disk.
"""
