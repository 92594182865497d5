"""For people who look: what a store holds, in a few numbers, and what of it is damaged.

Reads by whole columns and from few records. Modules may import the layers below: words, format, disk, log, commit,
group, delivery. No threads.
"""
