"""The repository form of `custom_generate`: Transformers loads this file by path and passes it every
argument of `generate`."""

from shoal.integrations.repository import generate

__all__ = ["generate"]
