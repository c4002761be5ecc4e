"""Models and how a pass is computed: loading, the runner, attention, the cache, compiled passes.

Nothing here knows of rounds, drafts or acceptance.
"""
