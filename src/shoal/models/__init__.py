"""The models and their passes: loading, the runner, attention, the cache, compiled passes.

No module here knows of rounds, drafts or acceptance.
"""
