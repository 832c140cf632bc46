"""The catalog: one SQLite file with the history of every group and rollout of a run. It answers in milliseconds.

    RUN/index/studio.sqlite3     (for a run without a folder here, under $XDG_CACHE_HOME: queries/facts/database.py)

It is made from the log in order: from record headers, and from the bodies of outcomes; texts of rollouts and
evaluations follow. It can be deleted at any time. A damaged catalog, or one of another run, is made anew. It is never
in a place where the run writes. Bodies (turns, tokens, verdicts) are not in it, but their places on the log are.

- `database`  opens the file, and has the schema
- `writer`    turns records into rows
- `texts`     reads what rollouts and samples of evaluations said
- `updating`  reads the log on from where the catalog ends
- `run_index` answers questions about an open run, up to date for each
- `moments`   a moment of the past that is asked about, `as_of`
- `counts`    counts of a run: fates of groups and rollouts, waiting ones, rates
- `listing`   rollouts by what they said and how they fared, a page of them at a time
- `samples`   samples of evaluations, of one version or of two beside each other
- `problems`  problems, also those whose reference answer may be wrong
- `finding`   groups, rollouts, batches and dead letters, a page of them at a time
"""
