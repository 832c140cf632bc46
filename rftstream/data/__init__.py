"""The data that a run learns from.

    tasksets         ordered problems to sample rollouts for
    demonstrations   chats to imitate, and preference pairs

Both read the same kinds of files (`tasksets.rows`, `tasksets.arrow`). `tasksets` explains how to add a source of
problems.
"""
