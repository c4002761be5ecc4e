"""The instructions that the processor has."""

from __future__ import annotations

from pathlib import Path

import torch


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """Returns the CPU flags in lower case.

    The flags are torch's own where this version can tell them, else those that Linux lists, else
    none.
    """
    query = getattr(torch.cpu, "get_capabilities", None)
    if query is not None:
        return {name for name, value in query().items() if value is True}
    return _listed(cpuinfo)


def instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Returns all instructions that torch or Linux know of the processor, spelt alike.

    A compiler may use instructions that one of the two leaves out.
    """
    return frozenset(flag.replace("_", "") for flag in cpu_flags(cpuinfo) | _listed(cpuinfo))


def _listed(cpuinfo: Path) -> set[str]:
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    return {
        flag
        for line in lines
        if line.lower().startswith(("flags", "features"))
        for flag in line.lower().split()
    }
