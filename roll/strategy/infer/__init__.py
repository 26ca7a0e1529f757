"""Inference half of the Parallel Strategy (arXiv 2506.06122): one narrow protocol, and the engines that implement it."""
