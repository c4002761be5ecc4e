"""A command imports Transformers' classes without what only training needs, and gets that where it asks for it.

Tests of: models.head_start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import import_utils

from shoal.models import head_start

HEAVY = ("torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp", "scipy", "sklearn")
SPARED = """
import importlib.util, json, sys
from shoal.models import head_start
from shoal.models.head_start import StandIn, spare_imports
spare_imports()
"""
LOADED = """
import shoal.loader
import torch
"""
END = "\nprint(json.dumps(seen))"
EACH = """
import os, traceback
seen = []
for code in {codes!r}:
    reader, writer = os.pipe()
    if not os.fork():
        try:
            exec(code, found := dict(globals()))
            os.write(writer, json.dumps(found["seen"]).encode())
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.close(writer)
    seen.append(json.loads(os.read(reader, 65536) or "null"))
    os.wait()
"""
"""Several codes, each in a copy of one process that has imported the classes and nothing else."""


def seen(code: str, before: str = "", **variables: str) -> object:
    """What a fresh process prints that has imported the classes as commands do, after some code."""
    environment = {key: value for key, value in os.environ.items() if key != "WORLD_SIZE"} | variables
    ended = subprocess.run(
        [sys.executable, "-c", SPARED + before + LOADED + code + END], capture_output=True, text=True, env=environment
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.slow
def test_processes_that_share_a_model_import_what_they_did() -> None:
    code = "seen = ['torch.distributed.tensor' in sys.modules, isinstance(sys.modules['torch._dynamo'], StandIn)]"
    assert seen(code, WORLD_SIZE="2") == [True, False]


def test_cycles_are_looked_for_seldom_until_the_first_load_has_ended() -> None:
    code = """
import gc
seen = [before[0] * 100 < gc.get_threshold()[0], gc.isenabled()]
with head_start.HeadStart([]):
    pass
seen.append(gc.get_threshold() == before)
gc.set_threshold(500)
with head_start.HeadStart([]):
    pass
seen.append(gc.get_threshold()[0])
"""
    started = SPARED.replace("spare_imports()", "import gc\nbefore = gc.get_threshold()\nspare_imports()\nspare_imports()")
    ended = subprocess.run([sys.executable, "-c", started + code + END], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == [True, True, True, 500]


CLEAN = f"seen = [[name for name in {HEAVY} if name in sys.modules], isinstance(sys.modules['torch._dynamo'], StandIn)]"


def test_exported_names_are_found_by_the_last_lines() -> None:
    fetch = import_utils.fetch__all__
    assert fetch.__name__ == "fetch__all__"  # of a process that is told nothing
    read: list[int] = []

    def counted(text: str) -> list[str]:
        read.append(len(text))
        return list(fetch(text))

    files = sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py"))
    texts = [file.read_text(encoding="utf-8") for file in files]
    texts += [
        "",
        "x = 1",
        '__all__ = ["a"]',
        '__all__ = ["a"]\nx\n__all__ = [\n    "b",\n]\n',
        'x\x0c__all__ = ["a"]\n',
        "# __all__",
    ]
    assert len(texts) > 300
    found = head_start.from_last_lines(counted)
    assert [found(text) for text in texts] == [fetch(text) for text in texts]
    assert sum(read) * 10 < sum(map(len, texts))


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


READ_QUICKLY = """
import transformers.utils.import_utils as utils
seen = [utils.fetch__all__.__name__]
"""
"""The names that files export are found by their last lines (`test_exported_names_are_found_by_the_last_lines`)."""
ASKED_WITHOUT_IMPORT = """
spec = importlib.util.find_spec("torch._dynamo")
seen = [spec.origin.endswith("__init__.py"), isinstance(torch._dynamo, StandIn)]
"""
PART_OF_IT = """
import torch._dynamo._trace_wrapped_higher_order_op as part
torch._dynamo.config.suppress_errors = True
seen = [torch._dynamo._trace_wrapped_higher_order_op is part, torch._dynamo.config.suppress_errors]
"""
MARKED = """
from torch._compile import _disable_dynamo
operations = []

def backend(graph, inputs):
    operations.extend(getattr(node.target, "__name__", node.target) for node in graph.graph.nodes if node.op.startswith("call_"))
    return graph.forward

@torch.compiler.disable
def by_the_user(x):
    return x.sin()

@_disable_dynamo
def by_torch(x):
    return x.exp()

@torch.compiler.allow_in_graph
def in_graph(x):
    return x.tan()

by_the_user(torch.zeros(2)), by_torch(torch.zeros(2)), in_graph(torch.zeros(2))
assert isinstance(torch._dynamo, StandIn)
value = torch.compile(lambda x: by_torch(by_the_user(in_graph(x) * 2) * 3), backend=backend)(torch.zeros(2)).tolist()
seen = [operations, value]
"""
"""What is marked before the compiler is there is marked for it: two functions break the graph, one is a node of it."""


ASKED: list[tuple[str, list[object]]] = [
    (CLEAN, [[], True]),
    (COMPILED, [[1], [2.0] * 3, False]),
    (NAMED, [True, True, False, True]),
    (ASKED_WITHOUT_IMPORT, [True, True]),
    (PART_OF_IT, [True, True]),
    (MARKED, [["in_graph", "mul", "mul"], [1.0, 1.0]]),
    (READ_QUICKLY, ["<lambda>"]),
]


FAILING = """
class Failing:
    left = [{error}]

    def find_spec(self, name, path, target=None):
        if name == {name!r} and self.left:
            raise self.left.pop()

sys.meta_path.insert(0, Failing())
"""
CLASSES = """
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
logits = LlamaForCausalLM(config)(torch.tensor([[1, 2]])).logits
"""


@pytest.mark.slow
def test_a_torch_whose_part_needs_more_keeps_its_compiler() -> None:
    """Another release of torch may fail in another way than by an ImportError where the part comes without the rest."""
    failing = FAILING.format(name="torch._dynamo._trace_wrapped_higher_order_op", error="RuntimeError('needs more')")
    code = CLASSES + "seen = [isinstance(torch._dynamo, StandIn), list(logits.shape)]"
    assert seen(code, before=failing) == [False, [1, 2, 8]]


FIRST = """
failed = False
try:
    import transformers.modeling_utils
except ImportError as error:
    failed = str(error) == "not yet"
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("transformers.modeling_flash_attention_utils", True),
        ("transformers.masking_utils", False),
    ],
)
def test_an_import_that_fails_leaves_true_answers_and_can_be_repeated(name: str, needed: bool) -> None:
    failing = FAILING.format(name=name, error="ImportError('not yet')")
    code = CLASSES + "import transformers.utils\nseen = [failed, transformers.utils.is_torch_distributed_available()]"
    assert seen(code, before=failing + FIRST) == [needed, True]


@pytest.mark.slow
def test_transformers_of_another_release_may_lack_a_question() -> None:
    before = "head_start.QUESTIONS += ('is_absent_available',)\n"
    assert seen(CLASSES + "seen = list(logits.shape)", before=before) == [1, 2, 8]


REMOTE = """
import torch
import torch._dynamo
from transformers import LlamaForCausalLM

torch._dynamo.config.suppress_errors = False


@torch.compile(backend="eager")
def doubled(x):
    return x + x


class OwnForCausalLM(LlamaForCausalLM):
    def forward(self, *arguments, **options):
        output = super().forward(*arguments, **options)
        output.logits = doubled(output.logits)
        return output
"""


OF_A_REPOSITORY = """
from transformers import AutoModelForCausalLM, LlamaForCausalLM
before = isinstance(torch._dynamo, StandIn)
read = AutoModelForCausalLM.from_pretrained({place!r}, trust_remote_code=True).eval()
after = isinstance(torch._dynamo, StandIn)
stock = LlamaForCausalLM.from_pretrained({place!r}).eval()
tokens = torch.tensor([[1, 2]])
seen = [before, after, type(read).__name__, torch.allclose(read(tokens).logits, 2 * stock(tokens).logits)]
"""


@pytest.mark.slow
def test_classes_are_imported_without_the_compiler_which_is_there_for_who_asks(tmp_path: Path) -> None:
    """And for code of a model's repository."""
    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    config.auto_map = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    (tmp_path / "modeling_own.py").write_text(REMOTE)
    assert "auto_map" in (tmp_path / "config.json").read_text()
    asked = [*ASKED, (OF_A_REPOSITORY.format(place=str(tmp_path)), [True, False, "OwnForCausalLM", True])]
    found = seen(EACH.format(codes=[code for code, _ in asked]), HF_MODULES_CACHE=str(tmp_path / "modules"))
    assert found == [expected for _, expected in asked]
