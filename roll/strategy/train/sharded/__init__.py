"""A trainer over several devices: FSDP2 around the model's own code, one process per rank."""
