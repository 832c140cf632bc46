"""The progress of a run for people: a live view in a terminal, plain lines elsewhere."""
