"""Reference: the existing settings, parts and runs, their meaning, and the completion of what a user types."""
