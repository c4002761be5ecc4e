"""The Drafter protocol and every drafter.

A drafter sees rows and uniforms, never the engine or the target; what it needs to remember is its
own.
"""
