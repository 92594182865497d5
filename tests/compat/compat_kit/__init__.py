"""A real RocketMQ for tests, with helpers. `conftest.py` makes the kit importable under this name.

build.py     jars and classes of one version, made at first use
network.py   a network in which RocketMQ starts
rocketmq.py  a broker, a client and the store classes as objects
deliveries.py  what Java consumers get from a live cluster, with bodies and times
rows.py      messages as rows that can be compared, from any reader
lookups.py   look-ups by key, id and time that can be compared
our_stores.py  stores that we write
kinds.py     every kind of record that a broker and its client write
their_lives.py  a broker that writes them all, and its store in every state
coverage_table.py  how many messages of each kind were compared
damages.py   damage to a store's files
"""
