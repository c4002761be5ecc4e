"""The slot-based ragged KV cache."""

from shoal.models.cache.pass_plan import Plan
from shoal.models.cache.slots import SlotCache

__all__ = ["Plan", "SlotCache"]
