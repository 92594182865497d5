"""Which messages somebody wants: SQL92 over their properties, as RocketMQ's filter module decides it.

Layer "filter": numpy, pyarrow and the words below (errors, units). It sees texts and columns, no file and no record.
`sql92_filter` is the way in; the rest is its lexer, parser and tree, the grammars of Java's numbers, and two
evaluators that know nothing of each other: over whole columns, and row by row as its slow twin.
"""
