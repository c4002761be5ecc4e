"""The training of draft models and heads for any target."""
