"""Demonstrations and preference pairs: read from files (`rows`), and converted to tokens (`tokens`)."""
