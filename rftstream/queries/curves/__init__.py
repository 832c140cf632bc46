"""The learning of a run: its history, its curves, and signs of problems."""
