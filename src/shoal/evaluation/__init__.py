"""Quality within a time budget: sampling by every method, execution in a sandbox, metrics and
report.

No serving, no training, no command line.
"""
