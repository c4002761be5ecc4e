"""The runs whose tokens and counts tests/data/frozen.json keeps."""

from __future__ import annotations

import json

import frozen

KEPT = json.loads(frozen.FILE.read_text(encoding="utf-8"))
