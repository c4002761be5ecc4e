"""The checks of `clients.py` for frameworks that bring their own prompts, schemas or evaluation. Imports nothing of shoal's."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import client_requests as shared
from client_requests import CHAT, FORCED, JSON_SCHEMA, KEY, PROMPT, SCHEMA, TOOL, Checks, is_person, refused, same


def person_model() -> Any:
    """The schema as a class of pydantic's, which every client has."""
    from pydantic import BaseModel, ConfigDict, Field

    class Person(BaseModel):
        """A person."""

        model_config = ConfigDict(extra="forbid")
        name: str = Field(max_length=8)
        age: int = Field(ge=0, le=99)

    return Person


def of_pydantic_ai(url: str) -> Checks:
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    Person, provider = person_model(), OpenAIProvider(base_url=f"{url}/v1", api_key=KEY)

    def agent(kind: Any = OpenAIChatModel, output: Any = str, **settings: Any) -> Any:
        model = kind(shared.MODEL, provider=provider)
        return Agent(model, output_type=output, model_settings={"max_tokens": 12, "seed": 1, **settings}, retries=0)

    def chat() -> None:
        assert agent().run_sync("Hi").output

    def responses() -> None:
        def said() -> Any:
            return agent(OpenAIResponsesModel, temperature=0.0).run_sync("Hi").output

        same([said() for _ in range(2)])
        seeded: dict[str, Any] = {"max_tokens": 80, "extra_body": {"seed": 1}}
        found = agent(OpenAIResponsesModel, NativeOutput(Person), **seeded).run_sync("Ada, 36")
        is_person(found.output.model_dump())

    def stream() -> None:
        pieces = list(agent().run_stream_sync("Hi").stream_text(delta=True, debounce_by=None))
        assert len(pieces) > 1, pieces
        assert "".join(pieces) == agent().run_sync("Hi").output

    def logprobs() -> None:
        details = agent(openai_logprobs=True).run_sync("Hi").response.provider_details
        assert details["logprobs"], details

    def stop() -> None:
        assert "\n" not in agent(max_tokens=40, stop_sequences=["\n"]).run_sync("Hi").output

    def person(output: Any) -> Callable[[], None]:
        return lambda: is_person(agent(output=output, max_tokens=80).run_sync("Ada, 36").output.model_dump())

    return {
        "completion": None, "chat": chat, "responses": responses, "stream": stream, "n": None, "logprobs": logprobs,
        "stop": stop, "tools": person(ToolOutput(Person, name="person")), "JSON schema": person(NativeOutput(Person)),
        "seed": lambda: same([agent(temperature=1.0, seed=5).run_sync("Hi").output for _ in range(2)]),
        "refusal of embeddings": None,
    }  # fmt: skip


def of_haystack(url: str) -> Checks:
    from haystack.components.embedders import OpenAITextEmbedder
    from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import Tool
    from haystack.utils import Secret

    common: dict[str, Any] = {
        "api_base_url": f"{url}/v1", "api_key": Secret.from_token(KEY), "model": shared.MODEL, "max_retries": 0,
    }  # fmt: skip

    def replies(streaming_callback: Any = None, tools: Any = None, **options: Any) -> Any:
        generator = OpenAIChatGenerator(**common, generation_kwargs={"max_tokens": 12, "seed": 1, **options})
        return generator.run([ChatMessage.from_user("Hi")], streaming_callback=streaming_callback, tools=tools)["replies"]

    def responses() -> None:
        generator = OpenAIResponsesChatGenerator(
            **common, generation_kwargs={"max_output_tokens": 12, "extra_body": {"seed": 1}}
        )
        [reply] = generator.run([ChatMessage.from_user("Hi")])["replies"]
        assert reply.text == replies()[0].text

    def chat() -> None:
        assert replies()[0].text

    def stream() -> None:
        pieces: list[str] = []
        [reply] = replies(lambda chunk: pieces.append(chunk.content))
        assert len(pieces) > 1, pieces
        assert "".join(pieces) == reply.text == replies()[0].text

    def several() -> None:
        assert len({reply.text for reply in replies(n=4, temperature=1.2)}) > 1

    def logprobs() -> None:
        assert replies(logprobs=True)[0].meta["logprobs"]["content"]

    def stop() -> None:
        assert "\n" not in replies(stop=["\n"], max_tokens=40)[0].text

    def tools() -> None:
        tool = Tool("person", "Notes a person.", SCHEMA, lambda name, age: None)
        [call] = replies(tools=[tool], tool_choice=FORCED, max_tokens=80)[0].tool_calls
        is_person(call.arguments)

    def schema() -> None:
        is_person(json.loads(replies(response_format=person_model(), max_tokens=80)[0].text))

    return {
        "completion": None, "chat": chat, "responses": responses, "stream": stream, "n": several, "logprobs": logprobs,
        "stop": stop, "tools": tools, "JSON schema": schema,
        "seed": lambda: same([replies(temperature=1.0, seed=5)[0].text for _ in range(2)]),
        "refusal of embeddings": lambda: refused(lambda: OpenAITextEmbedder(**common).run("x")),
    }  # fmt: skip


def of_dspy(url: str) -> Checks:
    import dspy

    class Served(dspy.LM):  # type: ignore[misc]
        """dspy sends a schema to models that it knows."""

        supports_response_schema = True

        @property
        def supported_params(self) -> set[str]:
            return super().supported_params | {"response_format"}

    def model(kind: Any = "chat", **options: Any) -> Any:
        common = {"api_base": f"{url}/v1", "api_key": KEY, "cache": False, "num_retries": 0, "max_tokens": 12, "seed": 1}
        return Served(f"openai/{shared.MODEL}", model_type=kind, **{**common, **options})

    def asked(**options: Any) -> Any:
        return model(**options)(messages=CHAT)

    def completion() -> None:
        assert model("text")(PROMPT)[0]

    def chat() -> None:
        assert asked()[0]

    def responses() -> None:
        assert model("responses", seed=None)("Hi")[0]["text"]

    def several() -> None:  # a request per answer, so that a seed makes them equal
        assert len(set(asked(n=4, temperature=1.2, seed=None))) > 1

    def logprobs() -> None:
        assert asked(logprobs=True)[0]["logprobs"]

    def stop() -> None:
        assert "\n" not in asked(stop=["\n"], max_tokens=40)[0]

    def tools() -> None:
        [call] = asked(tools=[TOOL], tool_choice=FORCED, max_tokens=80)[0]["tool_calls"]
        is_person(json.loads(call.function.arguments))

    def schema() -> None:
        class Describe(dspy.Signature):  # type: ignore[misc]
            """Describes a person."""

            text: str = dspy.InputField()
            grown_up: bool = dspy.OutputField()
            group: Literal["child", "adult", "old"] = dspy.OutputField()

        with dspy.context(lm=model(max_tokens=80), adapter=dspy.JSONAdapter()):
            found = dspy.Predict(Describe)(text="Ada, 36")
        assert found.grown_up in (True, False)
        assert found.group in ("child", "adult", "old")
        is_person(json.loads(asked(response_format=JSON_SCHEMA, max_tokens=80)[0]))

    return {
        "completion": completion, "chat": chat, "responses": responses, "stream": None, "n": several, "logprobs": logprobs,
        "stop": stop, "tools": tools, "JSON schema": schema,
        "seed": lambda: same([asked(temperature=1.0, seed=5)[0] for _ in range(2)]), "refusal of embeddings": None,
    }  # fmt: skip


def of_outlines(url: str) -> Checks:
    """Its class for vLLM's server, whose `structured_outputs` shoal has too."""
    import openai
    import outlines

    model = outlines.from_vllm(openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0), shared.MODEL)

    def asked(kind: Any = None, **options: Any) -> Any:
        return model("Hi", kind, **{"max_tokens": 12, "seed": 1, **options})

    def chat() -> None:
        assert asked()

    def stream() -> None:
        assert "".join(model.stream("Hi", max_tokens=12, seed=1)) == asked()

    def several() -> None:
        assert len(set(asked(n=4, temperature=1.2))) > 1

    def stop() -> None:
        assert "\n" not in asked(stop=["\n"], max_tokens=40)

    def schema() -> None:
        is_person(json.loads(asked(person_model(), max_tokens=80)))
        assert asked(Literal["yes", "no"]) in ("yes", "no")
        assert asked(outlines.regex("[a-f]{3}")).strip("abcdef") == ""

    return {
        "completion": None, "chat": chat, "responses": None, "stream": stream, "n": several, "logprobs": None, "stop": stop,
        "tools": None, "JSON schema": schema,
        "seed": lambda: same([asked(temperature=1.0, seed=5) for _ in range(2)]), "refusal of embeddings": None,
    }  # fmt: skip


def of_evalplus(url: str) -> Checks:
    """Its code generation with a problem of our own: it sends neither seeds nor stop strings."""
    problem = {
        "task_id": "HumanEval/0", "prompt": "def add(a, b):\n", "entry_point": "add", "canonical_solution": "    return a + b\n",
        "contract": "", "base_input": [[1, 2]], "plus_input": [], "atol": 0,
    }  # fmt: skip

    def generated(**options: Any) -> Sequence[str]:
        with TemporaryDirectory() as place:
            file = Path(place) / "problems.jsonl"
            file.write_text(json.dumps(problem) + "\n", "utf-8")
            os.environ["HUMANEVAL_OVERRIDE_PATH"] = str(file)  # read when the module of its data is imported
            from evalplus.codegen import run_codegen
            from evalplus.data import humaneval

            humaneval.HUMANEVAL_OVERRIDE_PATH = str(file)
            samples = run_codegen(
                shared.MODEL, "humaneval", root=place, backend="openai", base_url=f"{url}/v1", **options
            ).replace(".jsonl", ".raw.jsonl")
            return [json.loads(line)["solution"] for line in Path(samples).read_text("utf-8").splitlines()]

    def several() -> None:
        texts = generated(n_samples=6, bs=4, temperature=0.8)
        assert len(texts) == 6
        assert len(set(texts)) > 1

    return {
        **dict.fromkeys(("completion", "responses", "stream", "logprobs", "stop", "tools", "JSON schema", "seed")),
        "chat": lambda: same([generated(greedy=True)[0] for _ in range(2)]), "n": several, "refusal of embeddings": None,
    }  # fmt: skip
