"""All or nothing: how what many tasks staged becomes part of the store, once, whoever dies in between.

commits.py    the door: commit what was staged, or give it up
staging.py    staged files: encoded records of one task, whole and checked when they are read
intents.py    the promise that staged files will be appended, and how far that got
finishing.py  an intent rolled forward: by its owner, or by whoever finds it after the owner died
ledger.py     which batch of a query came last, and what a further one means
sweeping.py   what is left of tasks and batches that came to nothing
keys.py       whose a commit is, and how its files are named
side_file.py  the small JSON files in which all of this is kept

May import words, format, disk and log. All files are below `rmq/` in the store's folder, which a broker ignores.
"""
