"""Settings, parts and runs: what there is, what it means, and what may be typed."""
