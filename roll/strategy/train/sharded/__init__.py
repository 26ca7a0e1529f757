"""A trainer over many devices: FSDP2 around the model's own code, every rank a process.

No config can choose it yet: it computes log-probs and updates, and is not started, saved or published by any worker.
"""
