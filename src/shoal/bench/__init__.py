"""Measuring: interleaved timing, greedy identity, costs, and the figures of
docs/measurements/performance.md (`shoal bench`)."""
