"""The data that a run learns from.

    tasksets         ordered problems to sample rollouts for
    demonstrations   chats to imitate, and preference pairs

Both read the same files (`tasksets.rows`, `tasksets.arrow`). To add a source of problems: see `tasksets`.
"""
