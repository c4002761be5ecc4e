"""The commands that a sandbox runs, their bounds and their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MIB = 2**20


@dataclass(frozen=True)
class Bounds:
    """What a program may use. Processor time and file size are bounded per process, everything else
    in total.

    Attributes:
        cpu_seconds: processor time of one process.
        wall_seconds: from start to end.
        memory_bytes: private memory, of one process and in total.
        file_bytes: of one file.
        workdir_bytes, workdir_files: total size and number of the files in its directory.
        processes: processes and threads at the same time.
        output_bytes: standard output and standard error together.
    """

    cpu_seconds: int = 10
    wall_seconds: float = 120.0
    memory_bytes: int = 1024 * MIB
    file_bytes: int = 64 * MIB
    workdir_bytes: int = 256 * MIB
    workdir_files: int = 10_000
    processes: int = 128
    output_bytes: int = MIB


@dataclass(frozen=True)
class Step:
    """A command to run in the working directory; its program is an absolute path, or "./name" in
    that directory.

    Attributes:
        environment: variables besides PATH, HOME, TMPDIR and LANG.
        readable: paths that it may read besides the system's and the installation of its program.
    """

    command: Sequence[str]
    bounds: Bounds = field(default_factory=Bounds)
    environment: Mapping[str, str] = field(default_factory=dict)
    readable: Sequence[str] = ()


@dataclass(frozen=True)
class StepResult:
    """How the last step ended.

    Attributes:
        step: its number, from 0; a step is started only if the one before ended with exit code 0.
        reason: "exit", or the exceeded bound: "time", "memory", "output", "processes", "files";
            "setup": the command could not be started; "stopped": the sandbox was closed.
        returncode: exit code, or minus the signal that ended it; None if it was killed.
        stdout, stderr: what it wrote, up to the bound, without the path of the working directory.
        seconds: wall time.
        earlier_stderr: what the steps before it wrote to standard error.
    """

    step: int
    reason: str
    returncode: int | None
    stdout: str
    stderr: str
    seconds: float
    earlier_stderr: str = ""

    @property
    def succeeded(self) -> bool:
        """True if it exited with code 0."""
        return self.reason == "exit" and self.returncode == 0
