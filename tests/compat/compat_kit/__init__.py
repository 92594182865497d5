"""A real RocketMQ for tests, and what tests ask of it. `conftest.py` makes it importable under this name.

build.py     jars and classes of one version, made at first use
network.py   a network in which RocketMQ starts
rocketmq.py  a broker, a client and the store classes as objects
rows.py      messages as rows that can be compared, whoever read them
"""
