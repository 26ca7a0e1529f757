"""How bytes move between roles."""
