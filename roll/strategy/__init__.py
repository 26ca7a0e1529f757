"""Parallel Strategy (arXiv 2506.06122): how the workers of a role compute. Training strategies and inference
strategies."""
