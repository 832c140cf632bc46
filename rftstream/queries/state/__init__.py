"""The state of a run: its progress, its workers, waiting records, and rights."""
