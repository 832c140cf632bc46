"""transport/memory."""
