"""Small programming problems with tests, made by rules: what the bundled pair is trained on, and evaluations and benchmarks ask.

No model and no engine is imported here.
"""
