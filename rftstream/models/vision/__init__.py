"""Models that are shown images: how images are stored, how they stand in prompts, and which inputs a model gets for
them."""
