"""Mathematical answers: cut into tokens, read as trees, evaluated."""
