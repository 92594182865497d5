"""System calls: the only layer that opens, maps, lists, locks or changes files.

These modules may import `errors` and `model`, but not `format`.

kernel_errors.py   converts errors of the kernel to errors of this project
files.py           lists folders and reads files by position
mapped_window.py   a range of a file as one array of bytes, mapped or copied; the guard against SIGBUS
write.py           every change of a file's bytes or of a name, and when the change is durable
system_calls.py    the system calls that write.py uses, and that a disk for tests replaces
ownership.py       owner, group and mode of new files, so that the store's owner can write them
locks.py           locks that exclude other processes, threads and Java, and checks for such locks
host.py            identifies this machine, boot and process; the type of a file system
clock.py           the wall clock and random bits
"""
