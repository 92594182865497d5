"""What tests need and other projects' tests may use: stores made to measure, and a writer that behaves like a broker.

sample_message.py   one message to be written, with everything that a record can say of it
sample_store.py     a whole store at once: any messages, or millions of equally shaped ones
appender.py         a writer beside which readers are tried, also as a process of its own
appender_messages.py, appender_files.py   its parts: what it appends, and how bytes reach the files
appender_log.py     what the appender wrote, for who judges a reader
follower.py         a reader beside the appender, and the judge of what it read
row_twin.py         the rows of a store, read slowly and plainly, one message at a time
strategies.py       messages for hypothesis, odd ones above all
mutations.py        seeded damage to a copy of a store

May import everything of the engine, hypothesis and random. Nothing of the engine imports it.
"""
