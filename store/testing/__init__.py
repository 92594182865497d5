"""Test kit for this project and others: sample stores, sample messages, and disks that crash or fail.

sample_message.py      one message, with all fields of a record
sample_store.py        builds a complete store, with any messages or with millions of similar ones
uniform_records.py     records of equal length, encoded thousands at a time
strategies.py          hypothesis strategies for messages, mostly unusual ones
disk_effects.py        the changes of a disk: one value for each system call
crash_disk.py          a disk that records its changes and returns the states that a crash could leave
crash_image.py         the model of such states; writes a state to a folder
failing_disk.py        a disk on which one change fails, as if the disk were full or broken
busy_writer.py         a process that appends numbered messages and records which were acknowledged
backend_suite.py       the contract of `store.backend` as tests, for every place that has queues
backend_fixtures.py    their fixtures and messages
backend_reading.py     the reading half
backend_groups.py      members, offsets, fences and resets of consumer groups
backend_sinks.py       the sinks, under task retries and zombie tasks
pytest_plugin.py       the fixtures `rmq_store` and `rmq_cluster`, for the tests of programs that use RocketMQ
embedded.py            what these fixtures return: a store and a cluster that last as long as a test
brokers/               name servers and brokers in the test's process, which speak the remoting protocol

Modules in this package may import the whole engine, hypothesis, pytest and random. No module of the engine imports
them.
"""
