"""From any record to all that belongs to it, up and down the chain."""
