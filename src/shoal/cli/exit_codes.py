"""The exit codes of commands, with their meaning."""

EXIT_FAILURE, EXIT_REQUEST, EXIT_INTERRUPTED = 1, 2, 130
"""The exit codes for our failure, for a wrong request or model, and for Ctrl-C."""
