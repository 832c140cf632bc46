"""backends/deepspeed."""
