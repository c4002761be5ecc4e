"""The slot-based ragged KV cache."""

from shoal.cache.plan import Plan, Prefix
from shoal.cache.slots import SlotCache

__all__ = ["Plan", "Prefix", "SlotCache"]
