"""Feedback from annotators, and the changes that their judgements make to groups."""
