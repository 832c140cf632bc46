"""Which records are in force, their summaries, and records that were lost or whose positions have moved."""
