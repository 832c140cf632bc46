"""The interface for programs, /api/v1: `routes` has all of it."""
