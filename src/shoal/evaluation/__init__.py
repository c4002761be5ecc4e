"""Quality within a time budget: problems, their programs executed in a sandbox, and what the verdicts come to."""
