"""OpenVINO GenAI's continuous batching, plain or with a draft model: the class that `shoal bench --baselines openvino` uses."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

from engines.tasks import Answer, Setup, Task, convert

SOURCE = Path(__file__).parents[2] / "src/shoal/bench/openvino.py"


def _module() -> ModuleType:
    """shoal.bench.openvino from its file: shoal may not be installed here."""
    spec = importlib.util.spec_from_file_location("openvino_of_shoal", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for it there
    spec.loader.exec_module(module)
    return module


def _weights(setup: Setup) -> list[str]:
    """The format of the weights, and options of it: groups as those of the GGUF files."""
    forms = {"int8": ["int8"], "Q8_0": ["int8"], "Q4_0": ["int4", "--group-size", "32", "--sym", "--ratio", "1.0"]}
    return forms.get(setup.dtype, ["fp32"])


def _export(setup: Setup, model: str) -> Path:
    return Path(setup.cache) / f"{Path(model).name}-openvino-{_weights(setup)[0]}"


def prepare(setup: Setup) -> None:
    """Exports both models, weights in float32 (the arithmetic is chosen when they are loaded) or int8."""
    import openvino_genai  # noqa: F401 - says what is missing before minutes of exporting
    import optimum.intel  # noqa: F401

    for model in filter(None, (setup.target, setup.draft)):
        command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "--model", model]
        command += ["--task", "text-generation-with-past", "--weight-format", *_weights(setup)]
        convert(_export(setup, model), partial(_run, command))


def _run(command: list[str], out: Path) -> None:
    subprocess.run([*command, str(out)], check=True, stdout=sys.stderr)


class Engine:
    """See `engines.tasks.Engine`."""

    def __init__(self, setup: Setup) -> None:
        self.module, self.drafted = _module(), setup.drafted
        draft = str(_export(setup, setup.draft)) if setup.draft is not None and setup.drafted else None
        dtype = setup.dtype if setup.dtype in self.module.PRECISIONS else "int8"
        self.engine = self.module.OpenVinoEngine(str(_export(setup, setup.target)), dtype, setup.threads, draft)
        self.version = self.engine.version
        self.settings = {name: str(value) for name, value in self.engine.properties.items()}

    def generate(self, task: Task) -> Answer:
        """One call."""
        sampling = self.module.OpenVinoSampling(task.new_tokens, task.temperature, task.seed, task.top_p, self.drafted)
        return Answer(self.engine.generate(task.prompts, task.n, sampling))
