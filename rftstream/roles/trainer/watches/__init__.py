"""The trainer's checks: mismatch with the sampler, steps without signal, and held-out demonstrations."""
