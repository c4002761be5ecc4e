"""The Drafter protocol and every drafter.

A drafter sees rows and uniforms, never the engine or the target; it keeps its own state.
"""
