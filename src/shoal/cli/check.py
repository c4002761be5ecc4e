"""`shoal check`: can this pair be used here, and does it pay?"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from shoal.cli import examine
from shoal.cli.findings import Finding, overall
from shoal.cli.options import (
    SPEED,
    AttentionOption,
    DeviceOption,
    DraftOption,
    DraftRevisionOption,
    DtypeOption,
    JsonOption,
    LocalOption,
    ModelOption,
    NewTokensOption,
    QuantizeOption,
    RevisionOption,
    SamplesOption,
    Source,
    StrictOption,
    TrustOption,
)
from shoal.cli.views import Status, stdout
from shoal.config import require_text

EXIT_FAILED_CHECK = 2
INDENT = 24  # columns before a figure
PROMPTS = (
    'def is_palindrome(text):\n    """Return True if text reads the same backwards."""\n',
    "import json\nimport sys\n\n\ndef main():\n",
    "class Stack:\n    def __init__(self):\n",
)
STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}


def check(
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt", "-p", metavar="TEXT", help="Text to measure acceptance on; repeatable. Without any, some code."
        ),
    ] = None,
    model: ModelOption = None,
    draft: DraftOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    revision: RevisionOption = None,
    draft_revision: DraftRevisionOption = None,
    local_files_only: LocalOption = False,
    trust_remote_code: TrustOption = False,
    n: SamplesOption = 8,
    max_new_tokens: NewTokensOption = 64,
    k: Annotated[
        int, typer.Option("--k", "-k", min=1, help="Draft length at which acceptance is measured.", rich_help_panel=SPEED)
    ] = 4,
    attention: AttentionOption = "auto",
    quantize: QuantizeOption = "off",
    strict: StrictOption = False,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each draft length.", rich_help_panel=SPEED)] = 3,
    json_output: JsonOption = False,
) -> int:
    """Examine a model or a pair: does it load, fit, agree, and pay?

    Every check says ok, warn or fail with a figure and, where needed, what to do; exit code 2 if one failed.
    """
    for text in prompt or []:
        require_text(text, "the prompt")
    source = Source(
        model, draft, dtype, device, revision, draft_revision, attention, max(16, n), trust_remote_code, local_files_only,
        quantize=quantize, strict=strict,
    )  # fmt: skip
    console = stdout()
    findings = []
    with Status() as status:
        for finding in examinations(source, list(prompt or PROMPTS), (n, max_new_tokens, k, repeats), status.say):
            findings.append(finding)
            if not json_output:
                status.clear()
                show(console, finding)
    if json_output:
        print(json.dumps({"verdict": overall(findings), "checks": [finding.to_dict() for finding in findings]}))
    else:
        console.print(Text(f"verdict: {overall(findings)}", style=STYLES[overall(findings)]))
    return EXIT_FAILED_CHECK if overall(findings) == "fail" else 0


def examinations(
    source: Source, prompts: list[str], work: tuple[int, int, int, int], say: Callable[[str], None]
) -> Iterator[Finding]:
    """All findings in order; those about drafting only for a pair that fits."""
    say("loading ...")
    model, findings = examine.load(source)
    yield from findings
    if model is None:
        return
    case = examine.Case(model, prompts, *work, say=say)
    yield examine.self_check(model.target, "target")
    if model.draft_model is not None:
        yield examine.self_check(model.draft_model, "drafter")
    room = examine.context(case)
    yield room
    yield examine.number_format(model.target)
    yield examine.memory(case)
    if model.draft_model is None or room.verdict == "fail":
        return
    for examination in (examine.acceptance, examine.costs, examine.prediction, examine.identity):
        yield examination(case)


def show(console: Console, finding: Finding) -> None:
    """Verdict, name and figure; the advice under the figure."""
    style = STYLES[finding.verdict]
    room = max(20, console.width - INDENT)
    first, *more = textwrap.wrap(finding.figure, room)
    console.print(Text.assemble((f"{finding.verdict:5}", style), (f"{finding.name:{INDENT - 5}}", "bold"), first))
    for line in more:
        console.print(" " * INDENT + line, markup=False)
    for line in textwrap.wrap(f"-> {finding.advice}", room) if finding.advice else []:
        console.print(" " * INDENT + line, style=style, markup=False)
