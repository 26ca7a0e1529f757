"""Which role runs where, and whether it fits."""
