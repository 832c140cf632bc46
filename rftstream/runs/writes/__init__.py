"""What people and programs write to a run, each thing once."""
