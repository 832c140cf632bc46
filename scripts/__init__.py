"""What make calls: run as `python -m scripts.NAME` from the root, or by their names."""
