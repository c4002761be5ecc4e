"""The slot-based ragged KV cache."""

from shoal.cache.plan import Plan
from shoal.cache.slots import SlotCache

__all__ = ["Plan", "SlotCache"]
