"""When a message comes again: delay levels, the timer, retries and dead letters.

What is due is read here and made into records; they go into the store as any batch does, by `store/commit/`. Modules
may import the layers below: words, format, disk, log, commit, group. No threads.
"""
