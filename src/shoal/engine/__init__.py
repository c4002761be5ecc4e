"""The loop and its stages: `engine.step()` names them in order, and each other module is one of
them.

Nothing here knows how a pass is computed, nor what kind of drafter proposes.
"""
