"""What tests need and other projects' tests may use: stores made to measure, and a writer that behaves like a broker.

sample_message.py      one message to be written, with everything that a record can say of it
sample_store.py        a whole store at once: any messages, or millions of equally shaped ones (uniform_records.py)
appender.py            a writer beside which readers are tried, also as a process of its own
appender_settings.py   how it behaves and how it dies
appender_messages.py   what it appends
appender_files.py      how its bytes reach the files, and its recovery
appender_log.py        what it wrote, for who judges a reader
follower.py            a reader beside the appender, and the judge of what it read
row_twin.py            the rows of a store, read slowly and plainly, one message at a time
arrow_rows.py          what a reader gave, made comparable with those
strategies.py          messages for hypothesis, odd ones above all
disk_effects.py        what a disk was told to do, one value for each system call
crash_disk.py          a disk that remembers that, and shows what a crash at any moment could have left
crash_image.py         what a crash may leave: the model, and how it becomes a folder again
failing_disk.py        a disk that is full, or broken, at one moment
mutations.py           seeded damage to a copy of a store

May import everything of the engine, hypothesis and random. Nothing of the engine imports it.
"""
