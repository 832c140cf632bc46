"""Training what a run recorded again: to see that it gives the same weights (`again`), or what else it gives."""
