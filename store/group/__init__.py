"""The consumer group: who of several queries reads which queues, and how far the group has come.

group_name.py      which names a group may have
allocation.py      which member gets which queues, by the option's strategy; answers of users' callables are checked
strategies.py      RocketMQ's strategies, answer by answer
hash_ring.py       the ring of consistent hashing
message_queue.py   a queue as RocketMQ's clients name it, and the order of queues and members
start_position.py  where a group begins in a queue that it has no offset of
in_flight.py       up to where everything is finished, of messages that are at work
lock_table.py      whose a queue is for the next minute, for consumption in order
pull_status.py     what a broker answers to a pull, and where to pull next
pull_limits.py     how much a broker gives to one pull
pull_hold.py       how long a broker holds a pull that finds nothing
offset_memory.py   offsets of a consumer that are not written yet
arrival_wait.py    how to wait for news of a store

Those are pure: no files, and time is an argument. And on the disk:

group_paths.py     where a group's side files lie, and the group's turn
offset_file.py     config/consumerOffset.json: how far every group has come
published.py       when a group's offsets were last published
resets.py          offsets that a group was told to go to
member_file.py     who is a member
lease.py           a member's sign of life
liveness.py        whether others live
membership.py      joining a group, and knowing who else is in it
claims.py          whose each queue is
assignment.py      which queues a query has now, and its right to say how far it came
beginnings.py      where a group begins, by the facts of a store
query_group.py     all of this for one streaming query
last_words.py      what a query finished last, published for it
lag.py             how far groups are behind
admin.py           what administrators ask of groups
pull_reader.py     units of a queue as a pull meets them
pull.py            one pull
pull_consumer.py   the consumer that pulls

May import words, format, disk, log and commit.
"""
