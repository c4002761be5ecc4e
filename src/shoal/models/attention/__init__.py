"""The attention over rows of unequal lengths, functions of tensors and masks.

The package does not import Transformers (`shoal.models.bridge` does), and keeps nothing that
outlives a pass.
"""
