"""The integrations of shoal in other libraries.

They are the decoding method of Transformers' `generate`, and rollouts for TRL. Nothing else in the
package may import it, except `shoal/__init__.py`, which exports its functions.
"""
