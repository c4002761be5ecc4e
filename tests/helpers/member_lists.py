"""Completions of members, without a language server."""

from __future__ import annotations

from collections.abc import Collection

asked: list[tuple[str, str]] = []


def analyser(before: str, behind: str) -> Collection[str]:
    """After a name that ends with a: b and ba; after one that ends with b: aa; else it knows nothing."""
    asked.append((before, behind))
    return {"a": ("b", "ba"), "b": ("aa",)}.get(before[-2:-1], ())


def passes(text: str, end: bool) -> bool:
    """By the definition, over the whole text: each name after a dot is one of those known, or at the text's end begins one."""
    for at in range(len(text)):
        if text[at] == "." and (names := analyser(text[: at + 1], "")):
            rest = text[at + 1 :]
            name = rest[: next((i for i, c in enumerate(rest) if c not in "ab"), len(rest))]
            open_ = len(name) == len(rest) and not end
            if not (any(known.startswith(name) for known in names) if open_ else name in names):
                return False
    return True
