"""The roles: what the controller calls and where it computes."""
