"""Consumer groups: members, claims, rebalances, committed offsets, and pulls.

These modules are pure, and get the time as an argument:

pull_limits.py     the limits of one pull, and how long a pull waits for messages

These modules read or write files:

group_files.py     the paths of a group's side files, the group's lock, the time of the last commit
member_lease.py    member files, leases, failure detection
membership.py      how a query joins and leaves a group
claims.py          which member owns which queue
assignment.py      the queues of one member, and its right to commit offsets in them
handover.py        how a query releases queues to other members between two triggers
offset_file.py     the committed offsets: config/consumerOffset.json
start_offsets.py   the offset at which a group starts to read a queue
resets.py          resets and suspended queues
group_session.py   puts the modules above together for one streaming query
final_commit.py    commits a query's offsets on its behalf, after its end or after a batch
read_rights.py     whether a store's configuration lets a group read
lag.py             the lag of groups
admin.py           administration: lists groups and members, shows offsets and lag, resets offsets
pull_reader.py     reads the consume-queue entries for a pull
pull.py            one pull

They may import the layers below: words, format, filter, rebalance, contract, disk, log and transaction.
"""
