"""Pipelines: each a loop that reads like the dataflow it runs."""
