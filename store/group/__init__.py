"""The consumer group: who of several queries reads which queues, and how far the group has come.

group_name.py      which names a group may have
allocation.py      which member gets which queues, by the option's strategy; answers of users' callables are checked
strategies.py      RocketMQ's strategies, answer by answer
hash_ring.py       the ring of consistent hashing
message_queue.py   a queue as RocketMQ's clients name it, and the order of queues and members
start_position.py  where a group begins in a queue that it has no offset of
in_flight.py       up to where everything is finished, of messages that are at work
lock_table.py      whose a queue is for the next minute, for consumption in order

May import words, format, disk, log and commit. The modules named above are pure: no files, and time is an argument.
"""
