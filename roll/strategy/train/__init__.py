"""Training half of the Parallel Strategy (arXiv 2506.06122): one narrow protocol, implemented by `single` (one device)
and `sharded` (a mesh of ranks)."""
