"""What the trainer looks out for: mismatch with the sampler, steps without signal, and held-out demonstrations."""
