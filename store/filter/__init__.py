"""Message filters: tag expressions, SQL92 over properties, and lookups by key or id.

This is the layer "filter": it imports numpy, pyarrow and the layers below it. Filters are applied to the tags codes of
consume-queue entries and to columns of messages; they never open files. Readers call `row_filter`, which compiles both
kinds of expression. The modules for SQL92 are `sql92_lexer` (tokens and the syntax tree), `sql92_parser`,
`sql92_filter` (the evaluator) and `sql92_values` (the columns of texts and numbers that the evaluator works on).
"""
