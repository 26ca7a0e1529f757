"""AutoDeviceMapping (arXiv 2506.06122): which role runs on which devices, and whether it fits."""
