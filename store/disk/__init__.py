"""The disk: the only place that opens, maps, lists, locks or changes files. May import words; imports no format.

files.py          folders and files, read by position
window.py         a stretch of a file as one array of bytes, mapped or copied
guard.py          keeps a process alive when a mapped file shrinks under it
mounts.py         which file systems must not be mapped
ownership.py      whose a new file is: the owner of the store can still write it
changing.py       the only door by which bytes are changed, made durable and taken away
system_calls.py   the calls behind that door, where a disk for tests listens
file_lock.py      a lock that excludes other processes, threads and Java
lock_probe.py     whether somebody holds such a lock, asked without taking it
host.py           what tells this machine, boot and process from others
"""
