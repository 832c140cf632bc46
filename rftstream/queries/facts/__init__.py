"""What the records of a log say, one row a record, in an SQLite file that audits and traces ask.

Rows are raw: twins, strangers and what cannot be read have rows, too, and a row depends on its record alone. What
changes afterwards (the version in force, committed positions, deleted records) is looked up by whoever asks.

- `tables`    the schema, and the names behind the numbers of groups and rollouts
- `writer`    turns records into rows
- `database`  opens a file, and reads the log on into it
"""
