"""Shoal inside other libraries: the decoding method of Transformers' `generate`.

Nothing else in the package may import it, except `shoal/__init__.py`, which exports its functions.
"""
