"""The three service loops, and what they write with: `single`, `concurrent`, `source`."""
