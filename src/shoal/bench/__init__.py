"""Measuring: timing in turns, greedy identity and costs (`shoal bench`).

The figures of docs/measurements/performance.md come from here.
"""
