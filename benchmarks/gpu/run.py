"""Checks the kernels on this machine's GPU, then measures, and ends with a table: target, measured, verdict.

With --quick: correctness, and rounds of 8 rows; with --stages those that are named, so that a machine that is lent for minutes does
a part in one command. Uses the Python that runs it, installs nothing and needs no network. Every stage has a time limit; one that
fails or is stopped does not keep the next ones from running. Where correctness was not shown, the figures are marked.

Writes three files, DATE-DEVICE-gpu.json, .md and .log (without a card DATE-DEVICE-pretended-gpu), rewritten after each stage,
and traces of rounds, into $RESULTS (default: benchmarks/results; where that may not be, because the tree is no commit, into a
temporary folder). Exit codes: 0 all stages passed, 1 not all, 3 no CUDA device, 4 packages are missing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from requirements import MEASURING, PROJECT, SERVING, absent, project_bounds, unmet
from stages import Outcome, Stage, run
from verdict import markdown, verdicts

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NO_PACKAGES = 4
PYTHON = sys.executable
TESTS = ("pytest", "hypothesis")
SECONDS, QUICK_SECONDS = 1370.0, 540.0
"""The most for all stages; starting and writing come on top."""
PATIENCE = 3
"""How many times as long stages may take where a CPU does their work, unless `--patience` says otherwise."""
TRIALS = ("cpu", "pretend")
"""Devices on which a run says nothing but that its stages run."""
SHORT = ("--rounds", "2", "--rows", "2", "--prompt-tokens", "9")
SANITIZER = "compute-sanitizer"
SANITIZED = "heads_of_real_models or with_the_right_kernel or draws_what or next_block"
"""The cases that run under NVIDIA's memory checker, by which each launch takes many times as long."""
SHOWN = 40
"""Last lines of a stage's output that the run itself shows; the log has all."""


def _pytest(*arguments: str, workers: str = "auto") -> tuple[str, ...]:
    """In parallel where pytest-xdist is there; by settings of its own, as the project's ask for a newer pytest."""
    from importlib.util import find_spec

    parallel = ("-n", workers, "--dist", "worksteal") if find_spec("xdist") else ()
    options = ("-c", str(HERE / "pytest.ini"), "--rootdir", str(ROOT), "-p", "no:cacheprovider")
    return PYTHON, "-m", "pytest", *options, *parallel, *arguments


def _script(name: str, device: str, *arguments: str) -> tuple[str, ...]:
    return PYTHON, str(HERE / f"{name}.py"), "--device", device, "--results", "{results}", *arguments


def _bench(batch: int, on: dict[str, str], tokens: int, repeats: int) -> tuple[str, ...]:
    return (
        PYTHON, "-m", "shoal", "bench", "--shape", on["shape"], "--acceptance", "0.8", "--dtype", on["dtype"],
        "--device", on["device"], "--batch-sizes", str(batch), "--lookahead", "off,fixed:6,auto", "--baselines", "hf",
        "--temperature", "0.8", "--max-new-tokens", str(tokens), "--repeats", str(repeats), "--wait", "5",
        "--output", "{results}/bench.json",
    )  # fmt: skip


def _sanitizer(gpu: bool) -> Stage:
    """The memory checker, over memory that no allocator keeps back; alone, as it follows one process."""
    cases = [str(ROOT / "tests" / "gpu" / name) for name in ("fused_cases.py", "layers_cases.py", "steps_cases.py")]
    command = _pytest(*cases, "-k", SANITIZED if gpu else "poison", workers="0")
    variables = {"SHOAL_TEST_DEVICE": "cuda", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if gpu else {"TRITON_INTERPRET": "1"}
    checked = (SANITIZER, "--tool", "memcheck", "--error-exitcode", "9", *command) if gpu else command
    return Stage(
        "sanitizer", "the kernels under the memory checker", 120, checked, needs=(*TESTS, "triton", SANITIZER)[: 4 if gpu else 3],
        variables=variables,
    )  # fmt: skip


def _more(device: str) -> list[Stage]:
    """Rounds of another shape, of longer contexts and of weights of one byte; a served load; the memory checker."""
    gpu = device not in TRIALS
    at, shape = (device, "7.8b/310m") if gpu else ("cpu", "tiny")
    own = ("--ways", "captured") if gpu else SHORT
    of = {
        "rounds-8b": ("rounds of a Llama 3 8B", ("--shape", "8b/1.24b" if gpu else shape)),
        "rounds-long": (
            "rounds of long contexts",
            ("--shape", shape, "--lookaheads", "off,fixed:4,fixed:8", *(("--prompt-tokens", "2048") if gpu else ())),
        ),
        "rounds-int8": ("rounds of int8 weights", ("--shape", shape, "--quantize", "target=int8,draft=int8")),
        "rounds-fp8": (
            "rounds of fp8 weights",
            ("--shape", shape, "--quantize", "target=fp8,draft=fp8" if gpu else "draft=int8"),
        ),
    }
    few = () if gpu else ("--clients", "2", "--requests", "1", "--tokens", "8", "--prompt-tokens", "9")
    served = _script("served", at, "--shape", shape, *few)
    return [
        *(Stage(name, what, 60, _script("rounds", at, *own, *options)) for name, (what, options) in of.items()),
        Stage("served", "a served load of 16 streams", 90, served, needs=SERVING),
        _sanitizer(gpu),
    ]


def stages(device: str) -> list[Stage]:
    """What is run, in this order. On a CPU, and on the pretended GPU of the tests, the same with tiny shapes, to try the stages
    out: their figures say nothing. Kernels, and what another command computes, stay on the CPU where the GPU is pretended."""
    gpu, pretended = device not in TRIALS, device == "pretend"
    at = "cpu" if pretended else device
    on = {"device": at, "shape": "7.8b/310m" if gpu else "tiny", "dtype": "bfloat16" if gpu else "float32"}
    variables = {"SHOAL_TEST_DEVICE": device} if gpu else {"TRITON_INTERPRET": "1"}
    rounds = {"SHOAL_TEST_DEVICE": device} if pretended else variables
    few = () if gpu else ("-k", "poison or refused")
    contexts = ("--contexts", "short=1024,long=4000") if gpu else ("--contexts", "short=24,long=40", "--repeats", "2")
    tokens, repeats = (128, 2) if gpu else (8, 1)
    kernels = [
        str(ROOT / "tests" / "gpu" / name)
        for name in ("fused_cases.py", "layers_cases.py", "layer_models_cases.py", "steps_cases.py")
    ]
    return [
        Stage("check", "the device, and whether anything can be captured", 40, _script("check", device), True, True),
        Stage(
            "kernels", "the kernels against float64", 170, _pytest(*kernels, *few, workers="8"),
            True, True, True, (*TESTS, "triton"), variables,
        ),
        Stage(
            "captured", "captured rounds against ordinary passes", 150,
            _pytest(str(ROOT / "tests" / "gpu" / "captured_cases.py"), *(() if gpu else ("-k", "gpt2")), workers="4"),
            True, True, True, TESTS, rounds,
        ),
        Stage("identity", "greedy tokens of whole runs", 75, _script("identity", device), True, True, True),
        Stage(
            "rounds", "rounds in four ways under the profiler", 90,
            _script("rounds", device, "--shape", on["shape"], *(() if gpu else SHORT)), quick=True,
        ),
        Stage("attention", "attention of one layer at real shapes", 60, _script("attention", at), variables=variables),
        Stage(
            "products", "products and small kernels at real shapes", 85,
            _script("products", at, *(() if gpu else ("--repeats", "1"))), variables=variables,
        ),
        Stage("passes", "passes against the floor", 60, _script("passes", at, "--shape", on["shape"], *contexts)),
        *(
            Stage(f"bench-{batch}", f"speculative against plain decoding, batch {batch}", limit, _bench(batch, on, tokens, repeats))
            for batch, limit in ((8, 75), (1, 55), (32, 60))
        ),
        *_more(device),
    ]  # fmt: skip


def chosen(every: Sequence[Stage], names: str | None, quick: bool) -> list[Stage]:
    """The stages of a run, in their order.

    Raises:
        SystemExit: a name is none of theirs.
    """
    if names is None:
        return [stage for stage in every if stage.quick or not quick]
    wanted = names.split(",")
    unknown = set(wanted) - {stage.name for stage in every}
    if unknown:
        raise SystemExit(f"benchmarks/gpu/run.sh: no stage {', '.join(sorted(unknown))}: {', '.join(s.name for s in every)}")
    return [stage for stage in every if stage.name in wanted]


def require_packages() -> list[str]:
    """Names everything that is not as wanted, at once; returns what is not there. Exits if shoal cannot be imported without it."""
    bounds = project_bounds(PROJECT.read_text(encoding="utf-8"))
    problems = unmet({**bounds, **MEASURING})
    for name, problem in problems.items():
        print(f"benchmarks/gpu/run.sh: {name}: {problem}", file=sys.stderr)
    missing = absent(problems)
    if set(missing) & set(bounds):
        print("benchmarks/gpu/run.sh: nothing was measured: this Python lacks what is named above", file=sys.stderr)
        raise SystemExit(NO_PACKAGES)
    return missing if shutil.which(SANITIZER) else [*missing, SANITIZER]


def place_for_results(asked: str | None) -> Path:
    """The folder of the results; a temporary one where nobody asked for another and benchmarks/results may not have them."""
    from provenance import require_place
    from shoal.errors import RequestError

    place = Path(asked or ROOT / "benchmarks" / "results")
    try:
        require_place(place)
    except RequestError as error:
        if asked:
            raise SystemExit(f"benchmarks/gpu/run.sh: {error}") from error
        place = Path(tempfile.mkdtemp(prefix="shoal-gpu-"))
        print(f"benchmarks/gpu/run.sh: {error}; results go to {place}", file=sys.stderr)
    place.mkdir(parents=True, exist_ok=True)
    return place


def write(outcomes: Sequence[Outcome], machine: dict[str, Any], place: Path) -> str:
    """Writes everything so far; returns the verdict as a page."""
    from provenance import write_results

    trial = bool(machine["trial"])
    table = verdicts(outcomes, trial=trial)
    page = markdown(table, outcomes, machine)
    stem = "-".join([machine["date"], *machine["device"].split(), "pretended-gpu" if trial else "gpu"])
    told = [
        {"stage": o.stage.name, "what": o.stage.what, "result": o.result, "seconds": o.seconds, "reports": o.reports}
        for o in outcomes
    ]
    verdict = [{**vars(line), "verdict": line.word} for line in table]
    log = "\n".join(f"── {o.stage.name}: {o.result}\n{o.output}" for o in outcomes).replace(str(ROOT), ".")
    report = {"measurement": "gpu", "machine": machine, "verdict": verdict, "stages": told}
    write_results(place / f"{stem}.json", report, pages={".md": page, ".log": log})
    return page


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="correctness, and decoding at 8 rows")
    parser.add_argument("--device", default="cuda", help="cpu and pretend try the stages out on tiny shapes (default: cuda)")
    parser.add_argument("--stages", help="NAME,...: only these stages (default: all)")
    parser.add_argument(
        "--patience", type=float, help=f"stages may take this many times their limits (default: 1; {PATIENCE} off a GPU)"
    )
    options = parser.parse_args(arguments)
    started = time.monotonic()
    missing = require_packages()
    import torch

    if options.device not in TRIALS and not torch.cuda.is_available():
        print("benchmarks/gpu/run.sh: torch finds no CUDA device: nothing was measured", file=sys.stderr)
        return 3
    from shoal.bench.machine import machine

    trial = options.device in TRIALS
    where = {**machine(torch.device("cpu" if trial else options.device)), "trial": trial}
    place = place_for_results(os.environ.get("RESULTS"))
    print(f"{where['device']}, torch {where['torch']}, transformers {where['transformers']}, commit {where['commit']}")
    patience = options.patience or (PATIENCE if trial else 1)
    every = [replace(stage, limit=patience * stage.limit) for stage in stages(options.device)]
    selected = chosen(every, options.stages, options.quick)
    outcomes, page = [], ""
    with tempfile.TemporaryDirectory(prefix="shoal-stages-") as folder:
        seconds = (QUICK_SECONDS if options.quick else SECONDS) * patience
        for outcome in run(selected, Path(folder), missing, seconds=seconds):
            outcomes.append(outcome)
            for trace in Path(folder, outcome.stage.name).glob("*-trace.json.gz"):
                shutil.copy(trace, place / f"{outcome.stage.name}-{trace.name}")
            print("\n".join(outcome.output.splitlines()[-SHOWN:]))
            print(f"   {outcome.stage.name}: {outcome.result}, {outcome.seconds:.0f} s", flush=True)
            page = write(outcomes, where, place)
    print(f"\n{page}\nwritten to {place}, {time.monotonic() - started:.0f} s in all")
    return 0 if all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
