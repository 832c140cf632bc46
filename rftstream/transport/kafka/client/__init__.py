"""All code that uses private parts of kafka-python. Each part tells what happens without it."""
