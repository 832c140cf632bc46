"""Decisions of operators and rewards: recomputed, compared, and previewed."""
