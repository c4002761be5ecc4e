"""The model class `shoal` of lm-eval.

`python -m shoal.integrations.lm_eval --model shoal --model_args pretrained=DIR,draft=DIR` runs it.
lm-eval (0.4.9 or later) finds model classes by import alone, so this module registers the class and
then runs lm-eval's own command line. In Python: `lm_eval.simple_evaluate(model=ShoalLM(pair),
tasks=[...])`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import (
    handle_stop_sequences,
    maybe_truncate,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from shoal.api import Shoal
from shoal.drafting.draft import BUNDLED
from shoal.drafting.pair_loading import Source
from shoal.engine.stream import Stream
from shoal.errors import RequestError
from shoal.integrations.loglikelihoods import loglikelihoods
from shoal.loader import load
from shoal.sampling.acceptance import RULES
from shoal.types.arguments import split_options
from shoal.types.requests import Request, occurrences

IGNORED = ("do_sample", "use_cache", "pad_token_id", "early_stopping", "length_penalty")
"""The options of tasks that have no effect.

Temperature 0 is greedy, there is always a cache, and the last two are about beams.
"""
ALONE = ("num_beams", "num_return_sequences")
"""The options of tasks that have no effect if they are 1."""


WITHOUT_EFFECT = {"batch_size", "max_batch_size"}
"""The settings that lm-eval gives to every model, and that this one has no use for."""


@dataclass(frozen=True)
class TextSettings:
    """The settings of lm-eval for the texts of requests, by its names.

    Attributes:
        max_length: the most tokens of prompt and answer together; None = the target's context.
        max_gen_toks: the most new tokens of requests that do not say so.
        add_bos_token: texts begin with the tokenizer's special tokens; None = as the tokenizer does
            by itself.
        prefix_token_id: the token before texts without a context; None = BOS, or EOS if there is
            none.
        truncation_side: the side at which prompts that are too long lose tokens: "left", "middle"
            or "right".
        think_end_token: the answer begins behind it.
        chat_template_args: the arguments of the tokenizer's chat template; None = none.
        enable_thinking: one of these arguments; None = as the template has it.
    """

    max_length: int | None = None
    max_gen_toks: int = 256
    add_bos_token: bool | None = None
    prefix_token_id: int | None = None
    truncation_side: str = "left"
    think_end_token: str | None = None
    chat_template_args: Mapping[str, Any] | None = None
    enable_thinking: bool | None = None


@register_model("shoal")
class ShoalLM(TemplateLM):
    """A pair under evaluation.

    Its answers are the target's, whatever drafts.

    lm-eval's own `batch_size` and `max_batch_size` have no effect: all requests are given at once,
    and `max_batch` is the number of rows decoded together.

    Args:
        pretrained: the target as `shoal.load` takes it ("bundled" or None = the bundled pair), or a
            pair that `shoal.load` returned.
        draft: see `shoal.load`.
        lookahead: see `Speculation`.
        seed: the seed of requests that sample and give none. Equal requests (`repeats`) get
            different samples.
        options: the fields of `TextSettings` by name; and the options of `shoal.load` (dtype,
            device, max_batch, quantize, ...), for a target that is not loaded yet.

    Raises:
        RequestError: see `shoal.load`; or options of requests that shoal does not have, by name.
    """

    def __init__(
        self,
        pretrained: Source | Shoal | None = None,
        draft: Any = None,
        *,
        lookahead: Any = "auto",
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        own = {field.name for field in fields(TextSettings)}
        others = {key: value for key, value in options.items() if key not in own | WITHOUT_EFFECT}
        self.pair = _loaded(pretrained, draft, others)
        if self.pair.tokenizer is None:
            raise RequestError(
                "lm-eval asks for texts, and this target has no tokenizer: give one to shoal.load"
            )
        self.tokenizer = self.pair.tokenizer
        self.texts = TextSettings(**{key: value for key, value in options.items() if key in own})
        context = self.pair.target.context
        self.max_length = min(self.texts.max_length or context, context)
        self._lookahead, self._seed = lookahead, seed

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The id of the token before texts without a context."""
        named = (
            self.texts.prefix_token_id,
            self.tokenizer.bos_token_id,
            self.tokenizer.eos_token_id,
        )
        return next(token for token in named if token is not None)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """Returns the entries that lm-eval writes beside its results."""
        return {"shoal_loaded": self.pair.loaded}

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Returns the prompt of a conversation.

        Without `add_generation_prompt` its last message is continued.
        """
        thinks = self.texts.enable_thinking
        own = {} if thinks is None else {"enable_thinking": thinks}
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **{**(self.texts.chat_template_args or {}), **own},
        )

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Returns a text's ids.

        A text that begins with BOS already, as a chat template's does, gets no special tokens.
        """
        if not string:
            return []
        special = self.texts.add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and string.startswith(
            self.tokenizer.decode([self.prefix_token_id])
        ):
            special = False
        return list(
            self.tokenizer(
                string, **({} if special is None else {"add_special_tokens": special})
            ).input_ids
        )

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Computes log-likelihoods of continuations; too long contexts lose their first tokens."""
        pairs = []
        for _, before, after in requests:
            if len(after) > self.max_length:
                raise RequestError(
                    f"a continuation has {len(after)} tokens, and {self.max_length} are possible"
                )
            pairs.append((before[-(self.max_length + 1 - len(after)) :], after))
        with tqdm(total=len(pairs), disable=disable_tqdm, desc="Log-likelihoods") as bar:
            results = loglikelihoods(self.pair.target, pairs, bar.update)
        for (key, _, _), answer in zip(requests, results, strict=True):
            if key is not None:  # windows of a text have none
                self.cache_hook.add_partial("loglikelihood", key, answer)
        return results

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Computes log-likelihoods of texts in windows of `max_length`, each token once."""
        windows = [
            [
                make_disjoint_window(window)
                for window in get_rolling_token_windows(
                    self.tok_encode(request.args[0]),
                    self.prefix_token_id,
                    self.max_length,
                    context_len=1,
                )
            ]
            for request in requests
        ]
        flat = [(None, before, after) for of_one in windows for before, after in of_one]
        scores = iter(self._loglikelihood_tokens(flat, disable_tqdm))
        totals = [math.fsum(next(scores)[0] for _ in of_one) for of_one in windows]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Generates a text per request by its own sampling parameters, all in one batch."""
        asked: dict[Any, list[int]] = {}
        for i, request in enumerate(requests):
            text, given = request.args
            asked.setdefault((text, repr(sorted(given.items()))), []).append(i)
        groups = [self._request(len(same), *requests[same[0]].args) for same in asked.values()]
        # equal prompts with other options get noise of their own
        numbers = occurrences(group.prompt_ids for group in groups)
        numbered = [
            replace(group, occurrence=number) for group, number in zip(groups, numbers, strict=True)
        ]
        # a seed's texts, whatever is drafted
        engine = self.pair.engine(self._lookahead, self.pair.rule or RULES["coupled"]())
        result = Stream(engine, numbered, text=False).run(progress=not disable_tqdm)
        texts = [""] * len(requests)
        for same, output in zip(asked.values(), result, strict=True):
            for i, sample in zip(same, output.samples, strict=True):
                texts[i] = postprocess_generated_text(
                    sample.text, _ends(requests[i].args[1]), self.texts.think_end_token
                )
                self.cache_hook.add_partial("generate_until", requests[i].args, texts[i])
        return texts

    def _request(self, n: int, text: str, given: Mapping[str, Any]) -> Request:
        """Makes a request for n samples of one prompt."""
        own = {name: value for name, value in given.items() if value is not None}
        until = _ends(own)
        options = dict(normalize_gen_kwargs(own, default_max_gen_toks=self.texts.max_gen_toks))
        if (
            self.texts.think_end_token
        ):  # a text that ends an answer may stand in the thoughts before it
            until = []
        most = options.pop("max_gen_toks")
        ids, most = maybe_truncate(
            self.tok_encode(text) or [self.prefix_token_id],
            most,
            self.max_length,
            min_gen_toks=min(self.texts.max_gen_toks, self.max_length // 2),
            side=self.texts.truncation_side,
            shrink_gen_toks=most >= self.max_length,  # which would leave no token of the prompt
        )
        passed = {"until", "stop", *IGNORED, *(name for name in ALONE if options.get(name) == 1)}
        named = {name: value for name, value in options.items() if name not in passed}
        named = (
            {"temperature": 0.0, "seed": self._seed}
            | named
            | {"max_new_tokens": most, "stop": until}
        )
        sampling, limits, _ = split_options(named)
        return Request(tuple(ids), n, sampling, limits, prompt=text)


def _ends(given: Mapping[str, Any]) -> list[str]:
    """Returns the texts that end an answer, by either of their names."""
    named = [handle_stop_sequences(given.get(name), None) for name in ("until", "stop")]
    return [stop for stops in named for stop in stops if stop]


def _loaded(pretrained: Source | Shoal | None, draft: Any, options: Mapping[str, Any]) -> Shoal:
    if not isinstance(pretrained, Shoal):
        given = {name: value for name, value in options.items() if value is not None}
        return load(None if pretrained == BUNDLED else pretrained, draft, **given)
    if draft is not None or any(value is not None for value in options.values()):
        raise RequestError(
            "this pair is loaded already: its drafter and options are those that shoal.load was "
            "given"
        )
    return pretrained


def main() -> Any:
    """Runs lm-eval's command line, which then knows `--model shoal`."""
    from lm_eval.__main__ import cli_evaluate

    return cli_evaluate()


if __name__ == "__main__":
    main()
