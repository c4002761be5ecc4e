"""A hook that lets a process compute that was forked from a process that had computed.

Examples are a worker of gunicorn with --preload, and a worker of a DataLoader. A child has none of
its parent's threads, and OpenMP of gcc waits for them for ever. So the child computes on one
thread.
"""

from __future__ import annotations

import os
from functools import cache

import torch


@cache
def expect_forks() -> None:
    """Prepares the process, once, for children that are forked from now on."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_compute_alone)


def _compute_alone() -> None:
    torch.set_num_threads(1)
