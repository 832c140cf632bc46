"""Feedback of people: questions, votes, judgements, and what follows from them."""
