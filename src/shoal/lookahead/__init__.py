"""Draft lengths: controllers that see counts and costs, and never tensors.

Nothing here imports torch, the engine or a drafter.
"""
