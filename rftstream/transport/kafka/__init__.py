"""transport/kafka."""
