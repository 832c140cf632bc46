"""Makes runs: new ones, and ones from another run."""
