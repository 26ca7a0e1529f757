"""The learning core a second time, from the papers: float64, one token after another, no tensors, no autograd.

Every function is the formula of the paper its docstring names, written to be compared with on paper rather than to be
fast. Nothing here imports `roll`. A step is a list of `RefSample`; what is per token is a list of lists beside it.
"""
