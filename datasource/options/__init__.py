"""What a user asks for, parsed and checked, without Spark and without looking at the place.

option_table.py, option_parsers.py        the declaration of each option, and the parsers of their texts
read_options.py, group_options.py         the checked options of a query
subscription.py, filters.py, schema.py    topics and queues, filters, columns
write_options.py, sink_schema.py          the checked options of a write, and the columns that can be written
"""
