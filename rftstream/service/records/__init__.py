"""Which records are in force, what they amount to, and what of the log was lost or moved."""
