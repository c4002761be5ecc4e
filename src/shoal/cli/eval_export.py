"""`shoal eval --export FORMAT:FILE`: the samples of an evaluation as files for other evaluators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.console import stderr
from shoal.cli.files import require_writable, write_whole
from shoal.errors import RequestError

if TYPE_CHECKING:
    from shoal.cli.eval_set import EvalSet
    from shoal.evaluation.exports import ExportFormat
    from shoal.evaluation.run import Evaluation

EXPORT_HELP = (
    "Write the samples for another evaluator: evalplus:FILE.jsonl, or bigcode:FILE.json for the "
    "BigCode evaluation harness. "
    "Repeatable; of batched speculation, unless --methods leaves it out."
)


@dataclass(frozen=True)
class Export:
    """A file to write."""

    format: ExportFormat
    file: Path

    def write(self, evaluation: Evaluation, eval_set: EvalSet) -> None:
        """Writes the samples of a complete evaluation, and names the evaluator's command.

        Raises:
            RequestError: the file cannot be written.
        """
        from shoal.evaluation.exports import programs_of
        from shoal.evaluation.sampling import METHODS

        config = evaluation.config
        method = max(config.methods, key=METHODS.index)  # batched, or the method closest to it
        programs = programs_of(eval_set.problems, evaluation.samples.entries, method, config.n)
        write_whole(self.file, self.format.render(eval_set.name, programs))
        said = (
            f"{method} samples for {self.format.tool}: "
            f"{self.format.hint(eval_set.name, str(self.file), programs)}"
        )
        stderr().print(said, markup=False, soft_wrap=True)


def read_exports(texts: Sequence[str], eval_set: EvalSet) -> list[Export]:
    """Reads the --export options of a command line.

    Raises:
        RequestError: a format is unknown, a file cannot be written or would not be read by the
            evaluator, or the format does not fit the set.
    """
    from shoal.evaluation.exports import FORMATS

    exports: list[Export] = []
    for text in texts:
        name, _, file = text.partition(":")
        if name not in FORMATS or not file:
            raise RequestError(
                f"--export must be FORMAT:FILE with a format of {', '.join(FORMATS)}; got {text!r}"
            )
        found, path = FORMATS[name], Path(file)
        if path.suffix != found.suffix:
            raise RequestError(
                f"{found.tool} reads {found.suffix} files: --export {name}:FILE{found.suffix}; "
                f"got {text!r}"
            )
        if path in (other.file for other in exports):
            raise RequestError(f"two exports would be written to {file!r}")
        found.check(eval_set.name, eval_set.problems)
        require_writable(path)
        exports.append(Export(found, path))
    return exports
