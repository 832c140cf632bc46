"""An explorer's saved state of unfinished rollouts, and how a successor continues from it."""
