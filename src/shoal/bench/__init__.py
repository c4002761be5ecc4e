"""Measuring: interleaved timing, greedy identity, costs, and the figures of docs/measurements.md (`python -m shoal.bench`)."""
