"""One-sentence summaries of papers, for `shoal eval summarize`: abstracts of ACLSum with what each paper's authors did.

    pip download --no-deps aclsum && unzip -q aclsum-*.whl 'aclsum/dataset/*.jsonl' -d build
    python benchmarks/summaries.py build/aclsum/dataset/test.jsonl build/summaries.jsonl

ACLSum (Takeshita et al. 2024, arXiv 2403.05303) has papers of the ACL Anthology with three sentences that annotators wrote of each:
its challenge, its approach and its outcome. The package `aclsum` ships them, so that nothing has to be downloaded from a hub. The
reference is the sentence on the approach, which says most of what one sentence of an abstract would.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.durable import write_synced


def documents(papers: Path, aspect: str) -> Iterator[Mapping[str, Any]]:
    """Yields each paper's abstract with the sentence on an aspect, as `shoal eval summarize` reads them."""
    for line in papers.read_text("utf-8").splitlines():
        paper = json.loads(line)
        text = " ".join(paper["sentences"]["abstract"])
        for sign in ".,;:?!)%":  # the set has its sentences in words
            text = text.replace(f" {sign}", sign)
        yield {"id": paper["id"], "document": text.replace("( ", "("), "summary": paper["summary"][aspect]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("papers", type=Path, help="train.jsonl, val.jsonl or test.jsonl of the package's folder `dataset`")
    parser.add_argument("output", type=Path)
    parser.add_argument("--aspect", choices=("challenge", "approach", "outcome"), default="approach")
    asked = parser.parse_args()
    lines = [json.dumps(one, ensure_ascii=False) for one in documents(asked.papers, asked.aspect)]
    asked.output.parent.mkdir(parents=True, exist_ok=True)
    write_synced(asked.output, "\n".join(lines) + "\n")
    print(f"{len(lines)} documents in {asked.output}")


if __name__ == "__main__":
    main()
