"""Atomic commits: either all rows that the tasks of a batch staged enter the store, exactly once, or none does.

| module | contents |
| --- | --- |
| `sink` | argument checks, encoding of rows, and the two halves of a sink: stage and commit |
| `commit` | the commit of staging files, or their abort |
| `staging`, `encoded_slices` | staging files: encoded records of one task, verified when they are read |
| `intents` | intents: durable promises to append staging files, and their progress |
| `roll_forward` | completion of an intent, by its owner or, after the owner has died, by the next writer |
| `ledger` | the last batch of each query, keys of commits, small JSON files |
| `staging_cleanup` | removal of orphaned staging files |

All files of this package are in the folder `rmq/` of the store, which a broker ignores. Its modules may import words,
format, disk and log.
"""
