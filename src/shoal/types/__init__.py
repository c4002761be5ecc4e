"""Plain data: requests with their rows and samples, the data between the stages of a round, the
schedule.

This package imports no model, no cache and no stage of the engine.
"""
