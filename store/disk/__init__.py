"""The disk: the only place that opens, maps, lists or asks about files. May import words; imports no format.

files.py    folders and files, read by position
window.py   a stretch of a file as one array of bytes, mapped or copied
guard.py    keeps a process alive when a mapped file shrinks under it
mounts.py   which file systems must not be mapped
"""
