"""Everything of ours that reaches into private parts of kafka-python. Each part says what happens without it."""
