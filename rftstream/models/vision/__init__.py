"""Models that are shown images: how images are stored, how they stand in prompts, and what a model gets for them."""
