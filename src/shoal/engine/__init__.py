"""The loop and its stages: `engine.step()` names them in order, one module for each.

The engine does not depend on how a pass is computed, nor on the kind of drafter.
"""
