"""A trainer over many devices: FSDP2 around the model's own code, every rank a process."""
