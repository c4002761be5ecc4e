"""`shoal bench` with OpenVINO GenAI as a baseline, plain, in the target's number format; needs the package `openvino-genai`.

optimum-cli export openvino --model MODEL --task text-generation-with-past --weight-format fp32 EXPORT
python benchmarks/beside_openvino.py EXPORT --model MODEL --batch-sizes 1,8      # EXPORT, then options of `shoal bench`
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from engines.openvino_engine import OpenVinoEngine, OpenVinoSampling
from shoal.api import Shoal
from shoal.bench.decoding_methods import BASELINES, cut_at_eos
from shoal.bench.work import Run, Work, timed
from shoal.cli import run
from shoal.errors import RequestError


class Baseline:
    """A baseline for `shoal.bench.decoding_methods.BASELINES`; the user has a row when all are done.

    Args:
        export: the target's export.
    """

    def __init__(self, export: Path) -> None:
        self.export, self.engine = export, None

    def __call__(self, pair: Shoal, work: Work) -> Run:
        """Runs all rows; the first call loads the export."""
        self.engine = self.engine or self._load(str(pair.target.dtype).removeprefix("torch."))
        sampling = OpenVinoSampling(work.max_new_tokens, work.temperature, work.seed, eos=work.eos)
        with timed(pair.target.device) as watch:
            rows = self.engine.generate(work.prompts, work.n, sampling)
        ids = cut_at_eos(rows, work.eos)
        return Run(watch.seconds, (watch.seconds,) * len(ids), ids)

    def _load(self, dtype: str) -> OpenVinoEngine:
        try:
            return OpenVinoEngine(str(self.export), dtype, torch.get_num_threads())
        except ImportError:
            raise RequestError("openvino-genai is not installed: pip install '.[peers]'") from None
        except KeyError as error:
            raise RequestError(f"OpenVINO is not measured in {error}") from None


def main(arguments: list[str]) -> int:
    """Runs `shoal bench` on the arguments after the first, which is the export."""
    if not arguments or not Path(arguments[0], "openvino_model.xml").exists():
        print("error: give a directory that optimum-cli exported, then options of shoal bench", file=sys.stderr)
        return 2
    BASELINES["openvino"] = Baseline(Path(arguments[0]))
    return run(["bench", "--baselines", "hf,openvino", *arguments[1:]])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
