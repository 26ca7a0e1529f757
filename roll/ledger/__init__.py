"""The ledger: an append-only, checksummed log of what happened to every sample, and an SQLite index of it."""
