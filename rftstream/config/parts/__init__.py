"""The parts that a run file names: tables, lookup, and what others may know of a part."""
