"""Decisions of operators and rewards: computed again, compared, and tried."""
