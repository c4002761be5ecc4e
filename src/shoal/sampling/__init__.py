"""Logits -> p or q, the uniforms by which tokens are drawn, and the acceptance rules.

Pure functions on tensors: no model, no cache, no engine.
"""
