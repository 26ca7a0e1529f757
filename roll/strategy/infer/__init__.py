"""Inference strategies: one narrow protocol, and the engines behind it."""
