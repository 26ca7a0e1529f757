"""The version of ROLL. The distribution is named `roll-rl`, because `roll` is another project on the package index."""

__version__ = "0.1.0"
