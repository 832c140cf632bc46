"""What an explorer saves of unfinished rollouts, and how a successor goes on from it."""
