"""The catalog: what happened to every group and rollout of a run, in one SQLite file that answers in milliseconds.

    RUN/index/studio.sqlite3     (for a run without a folder here, under $XDG_CACHE_HOME: queries/facts/database.py)

It is made from the log by position: record headers, and the bodies of outcomes. It can be deleted at any time, what is
damaged or of another run is made anew, and it is never written where the run writes. Bodies (turns, tokens, verdicts)
are not in it; the catalog says where they stand on the log.

- `database`  opens the file, and has the schema
- `writer`    turns records into rows
- `updating`  reads the log on from where the catalog ends
- `moments`   a moment of the past that is asked about, `as_of`
- `counts`    counts of a run: what became of groups and rollouts, what waits, rates
- `finding`   groups, rollouts, problems, batches and dead letters, a page of them at a time
"""
