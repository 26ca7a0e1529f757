"""Training strategies: one narrow protocol, and ways to be parallel behind it."""
