"""The Constraint protocol, grammars as constraints, and the preparation of JSON schemas.

A constraint sees token ids, never logits or models.
"""
