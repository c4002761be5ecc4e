"""The Constraint protocol, grammars, and what schemas need to become grammars.

A constraint sees token ids, never logits or models.
"""
