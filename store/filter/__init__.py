"""Which messages somebody wants: tags, and SQL92 over properties as RocketMQ's filter module decides it.

Layer "filter": numpy, pyarrow and the layers below. It sees texts, units' hashes and columns, no file.
`row_filter` is what a reader asks; `tag_expression` and `sql92_filter` compile the two kinds of expression. The other
`sql92_` modules are the lexer, the parser and its tree, the grammars of Java's numbers, and two evaluators that know
nothing of each other: over whole columns, and row by row as its slow twin.
"""
