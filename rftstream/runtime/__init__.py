"""The only service loop, what drives it, and what starts and watches the processes."""
