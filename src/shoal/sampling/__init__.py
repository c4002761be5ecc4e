"""The sampling of tokens: p and q from logits, the uniforms of the draws, and the acceptance rules.

Pure functions on tensors: no model, no cache, no engine.
"""
