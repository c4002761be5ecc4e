"""Quality within a time budget: sampling by every method, sandboxed execution, metrics and report.

No serving, no training, no command line.
"""
