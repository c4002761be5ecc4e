"""The map of the modules in docs/explanation/modules.md, from their docstrings.

`python scripts/module_map.py` writes the part of the page below its mark anew.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "shoal"
PAGE = ROOT / "docs" / "explanation" / "modules.md"
MARK = "<!-- Below: scripts/module_map.py -->\n"


def rooms() -> list[str]:
    """The rooms and single modules in the order of DESIGN's map, lowest first."""
    map_of_rooms = (ROOT / "DESIGN.md").read_text(encoding="utf-8").partition("## The map")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", map_of_rooms, flags=re.MULTILINE)
    return [name.rstrip("/") for row in rows for name in re.findall(r"`([\w./]+)`", row)]


def first_words(file: Path) -> str:
    """The first paragraph of a module's docstring, in one line."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split())


def lines_of(room: Path) -> Iterator[str]:
    """A line for each module of a room, those of its parts below the part's own line."""
    yield from (f"- `{file.name}`: {first_words(file)}" for file in sorted(room.glob("*.py")) if file.stem != "__init__")
    for part in sorted(path.parent for path in room.glob("*/__init__.py")):
        yield f"- `{part.name}/`: {first_words(part / '__init__.py')}"
        yield from (f"  {line}" for line in lines_of(part))


def render() -> str:
    """The part of the page below its mark."""
    single = [PACKAGE / name for name in rooms() if name.endswith(".py")]
    parts = ["## Single modules\n\n" + "\n".join(f"- `{file.name}`: {first_words(file)}" for file in single)]
    for room in (PACKAGE / name for name in rooms() if not name.endswith(".py")):
        parts.append(f"## `{room.name}/`\n\n{first_words(room / '__init__.py')}\n\n" + "\n".join(lines_of(room)))
    return "\n" + "\n\n".join(parts) + "\n"


def page() -> str:
    """The whole page as it should be."""
    return PAGE.read_text(encoding="utf-8").partition(MARK)[0] + MARK + render()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
