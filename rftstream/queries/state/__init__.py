"""Where a run stands: its progress, its workers, what waits, and who may do what."""
