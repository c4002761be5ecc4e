"""What is lost or doubled when processes are killed, disks are full or slow, and clocks jump: nothing, or the exit code is 1.

    python benchmarks/chaos.py                # 40 requests of the bundled pair, once in peace and once under each trouble
    python benchmarks/chaos.py --planted      # the same with planted faults, each of which must be found
    python benchmarks/chaos.py --only "slow disk" --json FILE

Under each trouble `shoal batch` is started again until every line is answered: there must be one answer for each, with the texts
of the run in peace, and no other line in the file. Four clients ask `shoal serve`, as a whole and as streams, on connections that
they keep, and ask again what was broken off: each request must get one whole answer with those texts, what a broken one had must
begin them, and the server's counts and log must not have it twice.

`killed`: SIGKILL soon after some answer; on Ray, of a worker that answers lines, or of a replica. `full disk`: no file can grow
beyond a size (RLIMIT_FSIZE). For a batch it is raised from run to run, and each run must end by itself with an error. A server's
log, its file of earlier answers and its caches meet it, and all requests are answered; then another one starts on the full disk.
`slow disk`: each open, read, write and sync of the files in their folder takes from 10 to 200 ms (slow_disk.c). Programs and
weights are not slow: they change nothing. `clock jumps`: `time.time` is off by up to an hour at every call, forward and back;
`time.monotonic` and `time.perf_counter` leap forward by up to ten minutes at one of 100 calls, as they do for a process that was
paused. They decide when a request's time is over (an hour here), when idle connections are closed and when a file is synced. A text
that its time has cut must say so, and begin the right one. Waits inside C libraries and Ray's own processes go by the machine's
clocks. `everything`: all of these together, without Ray.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

import chaos_batches
import chaos_planted
import chaos_servers
import command
from chaos_troubles import Outcome, Texts, Trouble, lines, texts
from provenance import require_place, write_results
from shoal.bench.machine import machine

COLUMNS = ("killed at work", "ended by an error", "leaps, slow calls", "cut by time", "asked again", "seconds")


def subjects(
    requests: int, folder: Path, chance: random.Random
) -> Iterator[tuple[str, dict[str, Trouble], dict[str, str], Callable[..., Outcome]]]:
    """Name, troubles, faults to plant, and what tries a trouble."""
    asked, source = lines(requests), folder / "requests.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in asked), encoding="utf-8")
    expected: Texts = {entry["id"]: texts(entry) for entry in chaos_batches.peace(source, folder)}

    def tries(what: Callable[..., Outcome], given: object) -> Callable[..., Outcome]:
        return lambda trouble, place, planted: what(trouble, given, place, expected, chance, planted)

    yield "batch", chaos_batches.TROUBLES, chaos_planted.BATCHES, tries(chaos_batches.tried, source)
    yield "server", chaos_servers.TROUBLES, chaos_planted.SERVERS, tries(chaos_servers.tried, asked)


def outcomes(requests: int, chance: random.Random, planted: bool, chosen: Callable[[str], bool]) -> dict[str, Outcome]:
    """Of each subject under each trouble, and with each fault if they are planted."""
    console, found = Console(width=120), dict[str, Outcome]()
    with TemporaryDirectory() as folder:
        for subject, troubles, faults, tried in subjects(requests, Path(folder), chance):
            for trouble in (one for one in troubles if chosen(f"{subject}, {one}")):
                for fault, program in (faults if planted else {"": ""}).items():
                    name = ", ".join(filter(None, (subject, trouble, fault)))
                    console.print(f"{name} ...")
                    missing, place = troubles[trouble].missing, Path(folder, name.replace(", ", "-").replace(" ", "-"))
                    found[name] = Outcome(skipped=missing) if missing else tried(troubles[trouble], place, program)
                    console.print("  " + (missing or f"{found[name].seconds:.0f} s, {len(found[name].faults)} faults"))
    return found


def shown(found: dict[str, Outcome]) -> Table:
    """A row for each."""
    table = Table("trouble", "processes", *COLUMNS, "lost, doubled or other")
    for name, seen in found.items():
        counts = (seen.runs, seen.killed, seen.refused, seen.met, seen.cut, seen.again, round(seen.seconds))
        said = "\n".join(fault[:300] for fault in seen.faults[:5])
        table.add_row(name, *map(str, counts), f"skipped: {seen.skipped}" if seen.skipped else said or "nothing")
    return table


def main(
    requests: Annotated[int, typer.Option(min=4)] = 40,
    seed: Annotated[int, typer.Option(help="of the moments at which processes are killed")] = 0,
    only: Annotated[str, typer.Option(help="troubles whose name has this")] = "",
    planted: Annotated[bool, typer.Option("--planted", help="plant faults; exit code 1 unless each is found")] = False,
    to: Annotated[Path | None, typer.Option("--json", help="write the figures")] = None,
) -> None:
    """Prints a table."""
    require_place(to)
    found = outcomes(requests, random.Random(seed), planted, lambda name: only in name)
    Console(width=160).print(shown(found))
    if to is not None:
        figures = {name: asdict(outcome) for name, outcome in found.items()}
        about = {"machine": machine(torch.device("cpu")), "requests": requests, "seed": seed, "planted": planted}
        write_results(to, {**about, "troubles": figures})
    if any(bool(seen.faults) != planted for seen in found.values() if not seen.skipped):
        raise typer.Exit(1)


if __name__ == "__main__":
    command.run(main)
