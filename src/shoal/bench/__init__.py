"""The measurements of `shoal bench`: timing in turns, greedy identity and costs.

The figures of docs/measurements/performance.md come from here.
"""
