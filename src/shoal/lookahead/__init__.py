"""Draft lengths: controllers that see counts and costs, and never tensors.

Its modules import neither torch nor the engine nor a drafter.
"""
