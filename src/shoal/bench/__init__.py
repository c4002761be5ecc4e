"""Measuring: interleaved timing, greedy identity, costs, and the figures of docs/performance.md (`shoal bench`)."""
