"""How a run comes to be: new, or made of another run."""
