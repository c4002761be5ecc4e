"""The exit codes of commands, with their meaning."""

EXIT_FAILURE, EXIT_REQUEST, EXIT_INTERRUPTED = 1, 2, 130
"""Our failure; the request or the model is wrong; Ctrl-C."""
