"""Demonstrations and preference pairs: read from files (`rows`), and turned into tokens (`tokens`)."""
