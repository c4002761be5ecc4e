"""The JSON schemas of an evaluation set: the accepted schemas, and the fit of their samples.

The layouts and six of the measures are those of JSONSchemaBench (Geng et al., arXiv 2501.10868).
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal

import torch

from shoal.api import Shoal
from shoal.config import Grammar
from shoal.constraints.compiler import grammars_of
from shoal.constraints.grammar import GrammarConstraint
from shoal.constraints.grammar_sources import llguidance_or_refuse, source_of
from shoal.errors import RequestError
from shoal.evaluation.problems import records

Verdict = Literal["valid", "invalid", "cut"]
"""The text ended by itself and fits; ended and does not; was cut by its limits."""
SHOWN = 2000
"""The number of characters of a schema that the prompt shows."""


@dataclass(frozen=True)
class Schema:
    """A schema of the set.

    Attributes:
        group: the directory or file that it comes from.
        tests: documents with True if they fit the schema.
    """

    name: str
    group: str
    schema: Any
    tests: tuple[tuple[Any, bool], ...] = ()


@dataclass(frozen=True)
class TriedSchema:
    """A schema after its samples.

    Attributes:
        refused: the reason that it was not accepted; "" if it was.
        verdicts: the verdicts on the samples.
        tokens: the number of tokens of the samples.
        compile_seconds: the seconds until there was a grammar.
        mask_seconds: the seconds of all masks of the samples, one after the other.
        strict: the tests' documents that fit the schema and that the grammar does not take.
        lax: the documents that do not fit and that it takes.
        tests: the number of the tests.
    """

    name: str
    group: str
    refused: str = ""
    verdicts: tuple[Verdict, ...] = ()
    tokens: int = 0
    compile_seconds: float = 0.0
    mask_seconds: float = 0.0
    strict: tuple[Any, ...] = ()
    lax: tuple[Any, ...] = ()
    tests: int = 0

    @property
    def covered(self) -> bool:
        """True if all its samples are valid."""
        return bool(self.verdicts) and all(verdict == "valid" for verdict in self.verdicts)


# ── the set ───────────────────────────────────────────────────────────────────────────────────────


def read_schemas(folder: Path) -> list[Schema]:
    """Reads the schemas in a directory and its subdirectories.

    A `.json` file is a schema, or an object with "schema" (and "tests"). The lines of a `.jsonl`
    file have it as "json_schema", an object or its text, "unique_id" and "tests". A test has "data"
    and "valid".

    Raises:
        RequestError: there is no such directory, nothing in it, or something else.
    """
    if not folder.is_dir():
        raise RequestError(f"{str(folder)!r} is no directory: --data takes one with schemas")
    schemas = [schema for file in sorted(folder.rglob("*.json*")) for schema in _read(file, folder)]
    if not schemas:
        raise RequestError(f"{str(folder)!r} has no .json or .jsonl files")
    return schemas


def _read(file: Path, folder: Path) -> Iterator[Schema]:
    where = file.relative_to(folder)
    if file.suffix == ".jsonl":
        for place, record in records(file):
            if "json_schema" not in record:
                raise RequestError(
                    f"{place}: expected the field 'json_schema'; the record has only "
                    f"{', '.join(record)}"
                )
            given = record["json_schema"]
            schema = _parsed(given, place) if isinstance(given, str) else given
            name = str(record.get("unique_id", place))
            yield Schema(name, str(where.with_suffix("")), schema, _tests(record, place))
    elif file.suffix == ".json":
        try:
            schema = _parsed(file.read_text(encoding="utf-8"), str(file))
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"cannot read {file}: {error}") from error
        holds = isinstance(schema, dict) and {"schema"} <= set(schema) <= {
            "schema",
            "tests",
            "meta",
        }
        group = folder.resolve().name if where.parent == Path() else str(where.parent)
        own, tests = (schema["schema"], _tests(schema, str(file))) if holds else (schema, ())
        yield Schema(str(where.with_suffix("")), group, own, tests)


def _tests(record: Mapping[str, Any], where: str) -> tuple[tuple[Any, bool], ...]:
    try:
        return tuple((one["data"], bool(one["valid"])) for one in record.get("tests") or ())
    except (TypeError, KeyError) as error:
        raise RequestError(f"{where}: a test needs 'data' and 'valid'") from error


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise RequestError(f"{where} is no JSON: {error}") from error


# ── samples ───────────────────────────────────────────────────────────────────────────────────────


def tried(
    pair: Shoal, schemas: Sequence[Schema], n: int, options: Mapping[str, Any]
) -> Iterator[TriedSchema]:
    """Draws n samples under each schema; jsonschema validates them.

    Args:
        options: the options of `Shoal.generate`.

    Raises:
        RequestError: without a tokenizer, llguidance or jsonschema.
    """
    if pair.tokenizer is None:
        raise RequestError("an evaluation needs a tokenizer, and this model has none")
    _validator()
    grammars = grammars_of(pair.tokenizer, pair.target.vocab_size)
    for one in schemas:
        started = time.perf_counter()
        try:
            grammar = Grammar("json_schema", json.dumps(one.schema))
            constraint = grammars.constraint(grammar)
            seconds = time.perf_counter() - started
            result = pair.generate(prompt_of(one), n, grammar=grammar, **options)
        except RequestError as error:
            if error.result is not None:  # of a row, not of the schema
                raise
            yield TriedSchema(one.name, one.group, refused=str(error))
            continue
        samples = result[0].samples
        verdicts = tuple(
            verdict(sample.text, sample.finish_reason == "eos", one.schema) for sample in samples
        )
        masks = sum(mask_seconds(constraint, sample.token_ids, pair) for sample in samples)
        strict, lax = wrong_tests(grammar, one.tests)
        yield TriedSchema(
            one.name,
            one.group,
            "",
            verdicts=verdicts,
            tokens=sum(len(s.token_ids) for s in samples),
            compile_seconds=seconds,
            mask_seconds=masks,
            strict=strict,
            lax=lax,
            tests=len(one.tests),
        )


def prompt_of(one: Schema) -> str:
    """Returns the prompt of a schema: its beginning, and the name of the document that fits it."""
    return f"# A JSON document that fits the schema {json.dumps(one.schema)[:SHOWN]}\ndocument = "


def mask_seconds(constraint: GrammarConstraint, tokens: Sequence[int], pair: Shoal) -> float:
    """Returns the seconds of the masks before each of a sample's tokens, one after the other."""
    state, cpu, total = constraint.begin(None), torch.device("cpu"), 0.0  # type: ignore[arg-type]
    for token in tokens:
        started = time.perf_counter()
        constraint.mask([state], pair.target.vocab_size, cpu)
        total += time.perf_counter() - started
        state = constraint.advance(state, token)
    return total


def wrong_tests(
    grammar: Grammar, tests: Sequence[tuple[Any, bool]]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns the documents that a grammar wrongly refuses, and those that it wrongly takes.

    A document is written as `json.dumps` writes it, byte by byte: no tokenizer's choice matters.
    """
    library, source = llguidance_or_refuse(), source_of(grammar)
    alphabet = library.LLTokenizer("byte")
    wrong: dict[bool, list[Any]] = {True: [], False: []}
    for data, fits in tests:
        text = json.dumps(data, ensure_ascii=False).encode()
        matcher = library.LLMatcher(alphabet, source, log_level=0)
        taken = matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()
        if taken != fits:
            wrong[fits].append(data)
    return tuple(wrong[True]), tuple(wrong[False])


def verdict(text: str, ended: bool, schema: Any) -> Verdict:
    """Returns the verdict on one sample; formats are checked.

    Nothing is fetched: a text that has to fit a schema of another address is invalid.
    """
    if not ended:
        return "cut"
    library, formats = _validator()
    # The schemas of the drafts.
    from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped, unused-ignore]
    from referencing.exceptions import Unresolvable

    kind = library.validators.validator_for(schema, default=library.Draft202012Validator)
    try:
        kind.check_schema(schema)
        kind(schema, registry=REGISTRY, format_checker=formats).validate(json.loads(text))
    except (ValueError, library.ValidationError, library.SchemaError, Unresolvable):
        return "invalid"
    return "valid"


@cache
def _validator() -> tuple[Any, Any]:
    """Returns jsonschema and its checker of formats.

    The checker by itself knows neither date-times nor the times of today's drafts.
    """
    try:
        import jsonschema  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise RequestError(
            "documents are validated by the jsonschema package: pip install '.[eval]'"
        ) from None
    made = jsonschema.FormatChecker()
    made.checks("date-time", ValueError)(_is_moment)
    made.checks("time", ValueError)(lambda text: datetime.time.fromisoformat(text) is not None)
    return jsonschema, made


def _is_moment(text: str) -> bool:
    """Returns True for a date with a time and its zone. Python before 3.11 does not read Z."""
    return datetime.datetime.fromisoformat(text.replace("Z", "+00:00")).tzinfo is not None


# ── summary ───────────────────────────────────────────────────────────────────────────────────────


def summary(schemas: Sequence[TriedSchema]) -> dict[str, Any]:
    """Summarizes the schemas by group and together.

    Returns:
        "declared": the share that is accepted; "empirical": the share whose samples are all valid;
        "compliance": the same share of the accepted ones; verdicts of samples; "tests": those of
        accepted schemas, and the documents that the grammar wrongly refuses ("strict") or takes
        ("lax"); times in milliseconds, medians over schemas.
    """
    groups = list(dict.fromkeys(one.group for one in schemas))
    by_group = {group: _summed([one for one in schemas if one.group == group]) for group in groups}
    return {
        "all": _summed(schemas),
        "groups": by_group,
        "schemas": [asdict(one) for one in schemas],
    }


def _summed(schemas: Sequence[TriedSchema]) -> dict[str, Any]:
    taken = [one for one in schemas if not one.refused]
    verdicts = [verdict for one in taken for verdict in one.verdicts]
    masks = [1000 * one.mask_seconds / one.tokens for one in taken if one.tokens]
    return {
        "schemas": len(schemas),
        "declared": len(taken) / len(schemas),
        "empirical": mean(one.covered for one in schemas),
        "compliance": mean(one.covered for one in taken) if taken else None,
        "samples": {name: verdicts.count(name) for name in ("valid", "invalid", "cut")},
        "tests": {
            "right": sum(one.tests - len(one.strict) - len(one.lax) for one in taken),
            "strict": sum(len(one.strict) for one in taken),
            "lax": sum(len(one.lax) for one in taken),
        },
        "compile_ms": median(1000 * one.compile_seconds for one in taken) if taken else None,
        "mask_ms_per_token": median(masks) if masks else None,
    }
