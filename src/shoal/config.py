"""The options that a caller may set: frozen, checked when made, unknown names rejected.

Three classes for three subjects: `Sampling` (with its `Grammar`) for the choice of a token,
`Limits` for the end of a row, `Speculation` for the draft length. `shoal.types.arguments`
sorts keyword arguments into them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from shoal.errors import RequestError
from shoal.values import Parameter, declared, is_int, is_list, is_number, require, take_plain

MOST_NODES = 63
"""The most nodes of a draft tree that branches: a column sees a word of 64 bits, the root takes
one."""
GRAMMARS = ("json_schema", "json_object", "regex", "lark")
GUIDES_PROMPTS = {"guide": "negative_prompt", "expert": "positive_prompt"}
"""The field of `Sampling` that each of the two reads in place of the prompt."""
BLANKS = ("bounded", "compact", "any")


@dataclass(frozen=True)
class Grammar:
    """The language of a row's new text; it needs llguidance (`pip install '.[grammar]'`).

    A token that leads out of the language has probability zero. An EOS has probability zero except
    at the end of a complete text. The probabilities that remain are renormalised. The result is the
    declared distribution p of the row (lossless grade L-masked), for plain decoding too. A row that
    is ended by its limits may be incomplete.

    Attributes:
        kind: "json_schema", "json_object" (any JSON object), "regex" (of the whole text; Rust's
            syntax) or "lark" (a grammar in Lark's syntax, as llguidance reads it).
        text: the schema (a mapping is taken as well), the expression or the grammar; empty for
            "json_object".
        whitespace: the blanks that JSON may hold between its symbols. "bounded": nothing, a space,
            or a line break with up to 20 blanks, so that a model cannot go on with blanks for ever;
            "compact": nothing; "any": all that JSON allows. A schema's own `x-guidance` options
            about whitespace take precedence.
        before: a regular expression (Rust's syntax) of the text before the text of the grammar,
            such as reasoning.
        between: the separator between two texts of the grammar; empty = there is only one text.
        behind: the text behind the last text of the grammar. For a regular expression `before`,
            `between` and `behind` are empty: the expression covers the whole text by itself.
        opening: the text before the first text of the grammar, behind `before`.
        instead: another grammar, whose texts may stand in the place of this one's.
        again: the text between a text of this grammar, or of those in its place, and another one;
            empty = there is only one.
        thought: the marks around any text before the text of the grammar, literally, where they are
            special tokens, which `before` cannot hold: the text before it (empty: the prompt ends
            with it), the text behind it, and the text before an answer without it (empty: there is
            none, and the thought may be left out). None = there is no thought.
    """

    kind: str
    text: str = ""
    whitespace: str = "bounded"
    before: str = ""
    between: str = ""
    behind: str = ""
    opening: str = ""
    instead: Grammar | None = None
    again: str = ""
    thought: tuple[str, str, str] | None = None

    def __post_init__(self) -> None:
        require(
            self.kind in GRAMMARS, "kind of a grammar", f"one of {', '.join(GRAMMARS)}", self.kind
        )
        if isinstance(self.text, Mapping):
            object.__setattr__(self, "text", json.dumps(self.text))
        require(isinstance(self.text, str), "text of a grammar", "a string", self.text)
        if self.kind == "json_object":
            require(not self.text, "text of a json_object grammar", "empty", self.text)
        else:
            require(
                bool(self.text.strip()), f"text of a {self.kind} grammar", "not empty", self.text
            )
        require(
            self.whitespace in BLANKS,
            "whitespace of a grammar",
            f"one of {', '.join(BLANKS)}",
            self.whitespace,
        )
        takes = self.kind.startswith("json") or self.whitespace == "bounded"
        require(takes, f"whitespace of a {self.kind} grammar", "left as it is", self.whitespace)
        for name in ("before", "between", "behind"):
            given = getattr(self, name)
            fits = isinstance(given, str) and not (given and self.kind == "regex")
            require(
                fits,
                f"{name} of a {self.kind} grammar",
                "empty" if self.kind == "regex" else "a string",
                given,
            )


@dataclass(frozen=True)
class Sampling:
    """The choice of a row's next token from the target's logits.

    The order of the steps is Transformers': guidance, logit_bias, penalties (repetition, presence,
    frequency), no_repeat_ngram, bad_words, min_new_tokens, `processors`, grammar, temperature,
    top_k, top_p, min_p, typical_p. `temperature=0` is greedy: the highest score after the
    history-dependent steps, lowest id on a tie. The declared target distribution **p** of the
    losslessness claim is the result of all these steps.

    Attributes:
        temperature: >= 0; 0 means greedy.
        top_k: keep the k highest scores (ties kept); 0 = off.
        top_p: keep the smallest set with at least this mass, in (0, 1]; 1 = off.
        min_p: drop tokens below min_p times the highest probability, in [0, 1]; 0 = off.
        typical_p: locally typical sampling mass (Meister et al. 2022), in (0, 1]; 1 = off.
        guidance: the strength by which scores are led away from a second model, `load(guide=...)`:
            log p + guidance * (log p - log p of the guide); negative = towards it; 0 = off
            (`shoal.sampling.guidance`).
        plausibility: with guidance, keep tokens whose p is at least this times the highest p, both
            before guidance, in [0, 1]; 0 = off.
        posterior: with guidance, samples are led by the posterior of the expert's class after the
            whole new text instead of by the next token alone; its log-odds per token times this,
            >= 0; 0 = off (`shoal.sampling.guidance`).
        negative_prompt: with guidance, the token ids that the guide reads in place of the prompt;
            empty = the prompt. (A text goes to `generate(negative_prompt=...)`.)
        positive_prompt: the same for the expert.
        repetition_penalty: > 0; scores of tokens in prompt or output divided (positive) or
            multiplied (negative).
        presence_penalty: subtracted once from every token in the output so far (OpenAI's
            definition).
        frequency_penalty: subtracted once per occurrence in the output so far.
        logit_bias: token id -> value added to its score.
        bad_words: token id sequences that may not appear.
        min_new_tokens: EOS is impossible before this many new tokens.
        no_repeat_ngram: no n-gram of this size appears twice in prompt + output; 0 = off.
        processors: Transformers `LogitsProcessor`s, each called with the exact ids before each
            position, int64 [1, length], and scores [1, vocab]. They must be pure functions of
            these: they are called for rejected drafts too, so a processor that remembers calls, or
            is random, gives wrong samples. Each is tried on the prompt first, and refused by name.
        grammar: the new text's language.
        seed: any integer; None = fresh entropy. The samples depend on the seed, the prompt's ids,
            the row's index, and the number of earlier copies of this prompt with this seed in the
            call. They do not depend on the prompt's place in the list or on other prompts.
    """

    temperature: float = declared(1.0, "0 = greedy.", least=0, api="temperature")
    top_k: int = declared(
        0, "The k most probable tokens; 0 = off.", least=0, whole=True, api="top_k", off=-1
    )
    top_p: float = declared(
        1.0, "Smallest set of tokens with this mass; 1 = off.", above=0, most=1, api="top_p"
    )
    min_p: float = declared(
        0.0,
        "Tokens with at least this times the probability of the best one; 0 = off.",
        least=0,
        most=1,
        api="min_p",
    )
    typical_p: float = declared(
        1.0, "Locally typical sampling with this mass; 1 = off.", above=0, most=1, api="typical_p"
    )
    guidance: float = declared(
        0.0, "Strength by which scores are led away from the guide model; 0 = off.", api="guidance"
    )
    plausibility: float = declared(
        0.0,
        "With guidance, tokens with at least this times the probability of the model's best one; "
        "0 = off.",
        least=0,
        most=1,
        api="plausibility",
    )
    posterior: float = declared(
        0.0,
        "With guidance, lead by the posterior of the expert's class after the whole new text, its "
        "log-odds per token times this; 0 = by the next token alone.",
        least=0,
        api="posterior",
    )
    repetition_penalty: float = declared(
        1.0,
        "Scores of tokens that have occurred are divided by it; 1 = off.",
        above=0,
        api="repetition_penalty",
    )
    presence_penalty: float = declared(
        0.0,
        "Taken once from the score of each token of the output; 0 = off.",
        api="presence_penalty",
    )
    frequency_penalty: float = declared(
        0.0,
        "Taken from the score of a token as often as it is in the output; 0 = off.",
        api="frequency_penalty",
    )
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[Sequence[int]] = ()
    negative_prompt: Sequence[int] = ()
    positive_prompt: Sequence[int] = ()
    min_new_tokens: int = declared(
        0,
        "No end-of-text token before that many tokens; 0 = off.",
        least=0,
        whole=True,
        api="min_tokens",
    )
    no_repeat_ngram: int = declared(
        0, "No n-gram of this size appears twice; 0 = off.", least=0, whole=True
    )
    processors: Sequence[Any] = ()
    grammar: Grammar | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        take_plain(self, *(f.name for f in fields(self) if f.name not in ("processors", "grammar")))
        if isinstance(self.processors, Iterator):
            object.__setattr__(self, "processors", list(self.processors))
        for name, parameter in PARAMETERS.items():
            require(
                parameter.allows(getattr(self, name)), name, parameter.range, getattr(self, name)
            )
        require(self.seed is None or is_int(self.seed), "seed", "an integer or None", self.seed)
        require(
            isinstance(self.logit_bias, Mapping)
            and all(
                is_int(token) and token >= 0 and is_number(bias)
                for token, bias in self.logit_bias.items()
            ),
            "logit_bias",
            "a mapping of token id to a finite number",
            self.logit_bias,
        )
        require(
            is_list(self.bad_words)
            and all(
                is_list(word) and len(word) > 0 and all(map(is_int, word))
                for word in self.bad_words
            ),
            "bad_words",
            "a list of non-empty token id lists",
            self.bad_words,
        )
        for name in GUIDES_PROMPTS.values():
            ids = getattr(self, name)
            valid = is_list(ids) and all(is_int(token) and token >= 0 for token in ids)
            require(valid, name, "a list of token ids", ids)
        require(
            is_list(self.processors) and all(map(callable, self.processors)),
            "processors",
            "a list of callables",
            self.processors,
        )
        require(
            self.grammar is None or isinstance(self.grammar, Grammar),
            "grammar",
            "a Grammar or None",
            self.grammar,
        )

    @property
    def greedy(self) -> bool:
        """True when the row takes the highest score instead of sampling."""
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """True when top_k, top_p, min_p or typical_p leaves tokens out."""
        return bool(self.top_k or self.top_p < 1 or self.min_p or self.typical_p < 1)

    @property
    def reads_history(self) -> bool:
        """True when some step depends on the tokens before the position, not only on its scores."""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.bad_words
            or self.min_new_tokens
            or self.no_repeat_ngram
            or self.processors
            or self.grammar
        )


PARAMETERS: dict[str, Parameter] = {
    one.name: one.metadata["parameter"] for one in fields(Sampling) if "parameter" in one.metadata
}
"""The numbers among the fields of `Sampling`. Help, requests and checks read this mapping, so that
one line declares a parameter."""


@dataclass(frozen=True)
class Limits:
    """The ends of a row; the earliest end wins, also inside a block of accepted tokens.

    Attributes:
        max_new_tokens: >= 1 tokens after the prompt.
        stop: strings that end a row; text, ids and logprobs are cut before the string. A string may
            be, or contain, special tokens, although the text is shown without them.
        eos: token ids that end a row; None = the model's own, () = none. The EOS token itself stays
            in `token_ids`.
        time_budget: seconds from submission. Rows that are unfinished then are returned as they
            are, marked "time"; rows that never ran are returned empty, marked "not started". With
            more rows than slots every prompt gets its first sample before any gets its second.
            Samples that finish in time are conditioned on that: short samples are over-represented
            among them (docs/reference/evaluation.md).
    """

    max_new_tokens: int = 128
    stop: Sequence[str] = ()
    eos: Sequence[int] | None = None
    time_budget: float | None = None

    def __post_init__(self) -> None:
        take_plain(self)
        require(
            is_int(self.max_new_tokens) and self.max_new_tokens >= 1,
            "max_new_tokens",
            "an integer >= 1",
            self.max_new_tokens,
        )
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        require(
            is_list(self.stop) and all(isinstance(s, str) and s for s in self.stop),
            "stop",
            "non-empty strings",
            self.stop,
        )
        if is_int(self.eos):
            object.__setattr__(self, "eos", (self.eos,))
        eos_are_ids = self.eos is None or (
            is_list(self.eos) and all(is_int(t) and t >= 0 for t in self.eos)
        )
        require(eos_are_ids, "eos", "token ids >= 0", self.eos)
        require(
            self.time_budget is None or (is_number(self.time_budget) and self.time_budget > 0),
            "time_budget",
            "seconds > 0 or None",
            self.time_budget,
        )


LOSSY_RULES = {
    "typical": "rule typical is lossy: sampled tokens do not have the target's distribution "
    "(greedy ones are the target's)"
}
"""The acceptance rules that change the distribution, each with the sentence that every output
reports."""


def require_lossless(rule: str, feature: str) -> None:
    """Raises RequestError for a lossy rule.

    Args:
        rule: the acceptance rule.
        feature: the feature that needs the target's distribution.
    """
    if rule in LOSSY_RULES:
        raise RequestError(f"{feature} needs the target's distribution, and {LOSSY_RULES[rule]}")


@dataclass(frozen=True)
class Speculation:
    """The draft length and the acceptance rule.

    Attributes:
        lookahead: "auto" (by measured costs), a draft length (int; 0 = plain decoding), "off",
            "bass" (Algorithm 1), "heuristic" (two more or one less), "fixed:K", or an object with
            `next_length()` and `update(drafted, accepted)` (see `shoal.lookahead`).
        rule: "rejection": accepts the most drafts; "coupled": the tokens of a seed are those of
            plain decoding, whatever the draft lengths (see `shoal.sampling.acceptance.Coupled`);
            "auto": coupled if a seed asks for the same tokens again; "typical": lossy, see
            `LOSSY_RULES`.
    """

    lookahead: Any = "auto"
    rule: str = "auto"

    def __post_init__(self) -> None:
        take_plain(self)
        known = "'auto', 'rejection', 'coupled' or 'typical'"
        require(
            self.rule in ("auto", "rejection", "coupled", *LOSSY_RULES), "rule", known, self.rule
        )
        if is_int(self.lookahead):
            require(self.lookahead >= 0, "lookahead", ">= 0", self.lookahead)
