"""The programming problems in Python, generated from templates with a seed.

The bundled pair was trained on their training split; evaluation and benchmarks use the held-out
splits. No dependencies.
"""
