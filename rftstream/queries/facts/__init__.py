"""The facts of a log: an SQLite file with one row for each record, which audits and traces query.

Rows are raw: twins, foreign records and unreadable ones have rows, too, and a row depends on its record alone. Facts
that change later (the version in force, committed positions, deleted records) are looked up by the caller.

- `tables`    the schema, and the names behind the numbers of groups and rollouts
- `writer`    turns records into rows
- `database`  opens a file, and reads the log on into it
"""
