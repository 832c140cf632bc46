"""Conservation, counted from the log: everything that was admitted has become something, once."""
