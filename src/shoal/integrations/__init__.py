"""Shoal inside other libraries.

An edge like the others: nothing in the package imports it.
"""
