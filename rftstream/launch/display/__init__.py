"""The progress of a run as people see it: a live view in a terminal, plain lines elsewhere."""
