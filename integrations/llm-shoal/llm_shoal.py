"""The models of shoal in `llm`: the bundled pair as `shoal`, and pairs that `llm shoal add` has noted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import llm
from pydantic import Field

BUNDLED = "shoal"
SEPARATOR = "\n\n--- sample {} of {} ---\n"


def noted() -> Path:
    """Where the pairs are noted: JSON, by model id the arguments of `shoal.load`."""
    return llm.user_dir() / "shoal.json"


def pairs() -> dict[str, dict[str, Any]]:
    """All pairs, by model id. Raises click.ClickException: the file is no JSON object of objects."""
    if not noted().exists():
        return {BUNDLED: {}}
    try:
        return {BUNDLED: {}} | {name: dict(given) for name, given in json.loads(noted().read_text("utf-8")).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise click.ClickException(f"{noted()} is not what `llm shoal add` writes: {error}") from error


@llm.hookimpl
def register_models(register: Any) -> None:
    for name, given in pairs().items():
        register(ShoalModel(name, given))


@llm.hookimpl
def register_commands(cli: Any) -> None:
    @cli.group(name="shoal")
    def group() -> None:
        """Pairs of models for shoal."""

    @group.command(name="add")
    @click.argument("name")
    @click.option("--target", required=True, help="Hub id or directory.")
    @click.option("--draft", help="Draft model, or a drafter without one (ngram, suffix, ...). Without it, plain decoding.")
    @click.option("--dtype", default="auto", show_default=True)
    @click.option("--device", default="auto", show_default=True)
    def add(name: str, target: str, draft: str | None, dtype: str, device: str) -> None:
        """Note a pair as the model NAME."""
        known = {model: given for model, given in pairs().items() if model != BUNDLED}
        if name == BUNDLED:
            raise click.ClickException(f"{BUNDLED} is the bundled pair: choose another name")
        known[name] = {"target": target, "draft": draft, "dtype": dtype, "device": device}
        noted().write_text(json.dumps(known, indent=1) + "\n", "utf-8")

    @group.command(name="list")
    def show() -> None:
        """The pairs that are noted."""
        for name, given in pairs().items():
            click.echo(
                f"{name}: {given.get('target', 'bundled')}, draft {given.get('draft', 'bundled' if not given else None)}"
            )


class ShoalModel(llm.Model):
    """A pair, loaded when it is first asked.

    Args:
        model_id: by which it is asked for. given: arguments of `shoal.load`.
    """

    can_stream = True
    supports_schema = True

    class Options(llm.Options):
        n: int = Field(default=1, ge=1, description="Samples; more than one are shown best first, when all are done.")
        max_tokens: int = Field(default=256, ge=1, description="Tokens per sample at most.")
        temperature: float | None = Field(default=None, ge=0, description="0 = greedy.")
        top_p: float | None = Field(default=None, gt=0, le=1, description="Smallest set of tokens with this mass.")
        top_k: int | None = Field(default=None, ge=0, description="The k most probable tokens; 0 = off.")
        min_p: float | None = Field(
            default=None, ge=0, le=1, description="Tokens at least so probable as the best one times this."
        )
        repetition_penalty: float | None = Field(default=None, gt=0, description="Over 1, tokens of the text become rarer.")
        presence_penalty: float | None = Field(default=None, description="Taken from the logits of tokens that occurred.")
        frequency_penalty: float | None = Field(default=None, description="Taken from them per occurrence.")
        seed: int | None = Field(default=None, description="The same seed gives the same samples.")
        stop: str | None = Field(default=None, description="A string that ends a sample.")
        lookahead: str | None = Field(default=None, description="Draft length: auto, off or a number.")

    def __init__(self, model_id: str, given: dict[str, Any]) -> None:
        self.model_id, self._given, self._pair = model_id, given, None

    @property
    def pair(self) -> Any:
        """What `shoal.load` returns."""
        if self._pair is None:
            import shoal  # takes a second or two: not before it is needed
            from shoal.cli.options import PairNames
            from shoal.models.sources import quieten_transformers

            quieten_transformers(PairNames(self._given.get("target"), self._given.get("draft")).models)
            self._pair = shoal.load(**self._given)
        return self._pair

    def execute(self, prompt: Any, stream: bool, response: Any, conversation: Any) -> Iterator[str]:
        import shoal

        options = {name: value for name, value in prompt.options.model_dump().items() if value is not None}
        n, most, lookahead = options.pop("n"), options.pop("max_tokens"), options.pop("lookahead", "auto")
        if prompt.schema is not None:
            options["grammar"] = shoal.Grammar("json_schema", prompt.schema)
        lookahead = int(lookahead) if lookahead.isdecimal() else lookahead
        try:
            text = self.prompt_text(prompt, conversation)
            running = self.pair.stream(text, n, max_new_tokens=most, lookahead=lookahead, **options)
            for increment in running:
                if n == 1:
                    yield increment.text
            [output] = running.result()
        except shoal.ShoalError as error:
            raise llm.ModelError(str(error)) from error
        failed = next((sample.error for sample in output.samples if sample.error), None)
        if failed:
            raise llm.ModelError(failed)
        if n > 1:
            yield from self._ranked(output)
        response.set_usage(input=len(output.prompt_ids), output=sum(len(sample.token_ids) for sample in output.samples))
        response.response_json = {
            "samples": [{"text": sample.text, "finish_reason": sample.finish_reason} for sample in output.ranked]
        }

    def _ranked(self, output: Any) -> Iterator[str]:
        for number, sample in enumerate(output.ranked, 1):
            yield SEPARATOR.format(number, len(output.samples)).lstrip("\n" if number == 1 else "") + sample.text

    def prompt_text(self, prompt: Any, conversation: Any) -> str | list[int]:
        """By the tokenizer's chat template; without one the texts one after the other, for a model that continues them."""
        turns = [{"role": "system", "content": prompt.system}] if prompt.system else []
        for earlier in conversation.responses if conversation is not None else ():
            turns += [{"role": "user", "content": earlier.prompt.prompt}, {"role": "assistant", "content": earlier.text()}]
        turns.append({"role": "user", "content": prompt.prompt})
        tokenizer = self.pair.tokenizer
        if tokenizer.chat_template is None:
            return "".join(turn["content"] for turn in turns)
        return list(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))
