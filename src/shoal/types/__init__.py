"""Plain data: requests and their rows and samples, what flows between the stages of a round, the
schedule.

No model, no cache and no stage of the engine is imported here.
"""
