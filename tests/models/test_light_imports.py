"""A command imports Transformers' classes without what only training needs, and gets that where it asks for it.

Tests of: models.head_start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

HEAVY = ("torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp", "scipy", "sklearn")
START = """
import json, sys
from shoal.models.head_start import StandIn, spare_imports
spare_imports()
import shoal.loader
import torch
"""
END = "\nprint(json.dumps(seen))"


def seen(code: str, **variables: str) -> object:
    """What a fresh process prints that has imported the classes as commands do."""
    environment = {key: value for key, value in os.environ.items() if key != "WORLD_SIZE"} | variables
    ended = subprocess.run([sys.executable, "-c", START + code + END], capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def test_classes_are_imported_without_the_compiler_and_its_company() -> None:
    code = f"seen = [[name for name in {HEAVY} if name in sys.modules], isinstance(sys.modules['torch._dynamo'], StandIn)]"
    assert seen(code) == [[], True]


def test_processes_that_share_a_model_import_what_they_did() -> None:
    code = "seen = ['torch.distributed.tensor' in sys.modules, isinstance(sys.modules['torch._dynamo'], StandIn)]"
    assert seen(code, WORLD_SIZE="2") == [True, False]


COMPILED = """
calls = []

def backend(graph, inputs):
    calls.append(len(inputs))
    return graph.forward

value = torch.compile(lambda x: x * 2, backend=backend)(torch.ones(3)).tolist()
seen = [calls, value, isinstance(torch._dynamo, StandIn)]
"""
NAMED = """
import torch._dynamo.utils as first
from torch._dynamo import exc, utils
import transformers.utils
seen = [first is utils is torch._dynamo.utils, exc.counters is first.counters,
    isinstance(torch._dynamo, StandIn), transformers.utils.is_torch_distributed_available()]
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [(COMPILED, [[1], [2.0] * 3, False]), (NAMED, [True, True, False, True])],
    ids=["compile", "by name"],
)
def test_the_compiler_is_there_for_who_asks(code: str, expected: list[object]) -> None:
    assert seen(code) == expected
