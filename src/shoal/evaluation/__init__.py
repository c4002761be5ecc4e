"""The quality within a time budget: sampling by every method, execution, metrics, report."""
