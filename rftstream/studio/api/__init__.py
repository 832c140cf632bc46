"""The interface for programs, /api/v1. `routes` defines it."""
