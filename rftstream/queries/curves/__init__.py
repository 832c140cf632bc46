"""How a run learns: its history, its curves, and what is wrong with them."""
