"""Attention over rows of unequal lengths, a method per module: functions of tensors and masks.

No Transformers here (`shoal.models.bridge`), and nothing that outlives a pass.
"""
