"""The parts that a run file names: their tables, their lookup, and the properties that they declare."""
