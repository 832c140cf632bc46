"""transport/embedded."""
