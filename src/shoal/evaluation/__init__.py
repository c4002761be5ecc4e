"""The quality within a time budget: sampling by every method, execution, metrics and report.

No serving, no training, no command line.
"""
