"""The commands that a sandbox runs, their bounds and their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MIB = 2**20


@dataclass(frozen=True)
class Bounds:
    """The bounds of a program.

    Processor time and file size are bounded per process, everything else in total.

    Attributes:
        cpu_seconds: the processor time of one process.
        wall_seconds: the seconds from start to end.
        memory_bytes: the private memory, of one process and in total.
        file_bytes: the size of one file.
        workdir_bytes: the total size of the files in its directory.
        workdir_files: the number of files in its directory.
        processes: the number of processes and threads at the same time.
        output_bytes: the bytes of standard output and standard error together.
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
    """A command to run in the working directory.

    Its program is an absolute path, or "./name" in that directory.

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
    """The end of the last step.

    Attributes:
        step: the step's number, from 0; a step is started only if the one before ended with exit
            code 0.
        reason: "exit", or the exceeded bound: "time", "memory", "output", "processes", "files";
            "setup": the command could not be started; "stopped": the sandbox was closed.
        returncode: the exit code, or minus the signal that ended it; None if it was killed.
        stdout: its standard output, up to the bound, without the path of the working directory.
        stderr: its standard error, likewise.
        seconds: the wall time.
        earlier_stderr: the standard error of the steps before it.
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
