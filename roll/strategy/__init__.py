"""How a role computes: training strategies and inference strategies."""
