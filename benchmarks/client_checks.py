"""The checks of `clients.py`, in the environment of the clients: `client_checks.py CLIENT URL`. Imports nothing of shoal's.

A check raises where the answer is not what the client's user expects.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import client_requests as shared
from client_frameworks import of_dspy, of_evalplus, of_haystack, of_outlines, of_pydantic_ai
from client_requests import CHAT, FORCED, JSON_SCHEMA, KEY, PROMPT, SCHEMA, TOOL, Checks, is_person, refused, same


def of_openai(url: str) -> Checks:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)

    def complete(**options: Any) -> Any:
        return client.completions.create(model=shared.MODEL, prompt=PROMPT, **{"max_tokens": 12, "seed": 1, **options})

    def chat(**options: Any) -> Any:
        return client.chat.completions.create(model=shared.MODEL, messages=CHAT, **{"max_tokens": 12, "seed": 1, **options})

    def completion() -> None:
        assert complete().choices[0].text

    def chats() -> None:
        assert chat().choices[0].message.content

    def stream() -> None:
        pieces = [chunk.choices[0].text for chunk in complete(stream=True) if chunk.choices]
        assert len(pieces) > 1, pieces
        assert "".join(pieces) == complete().choices[0].text

    def several() -> None:
        assert len({choice.text for choice in complete(n=4, temperature=1.2).choices}) > 1

    def logprobs() -> None:
        items = chat(logprobs=True, top_logprobs=2).choices[0].logprobs.content
        assert items
        assert all(item.logprob <= 0 and len(item.top_logprobs) == 2 for item in items)

    def stop() -> None:
        answer = complete(stop=["\n"], max_tokens=40).choices[0]
        assert answer.finish_reason == "stop"
        assert "\n" not in answer.text

    def tools() -> None:
        [call] = chat(tools=[TOOL], tool_choice=FORCED, max_tokens=80).choices[0].message.tool_calls
        assert call.function.name == "person"
        is_person(json.loads(call.function.arguments))

    def schema() -> None:
        is_person(json.loads(chat(response_format=JSON_SCHEMA, max_tokens=80).choices[0].message.content))

    def responses() -> None:
        asked: dict[str, Any] = {"model": shared.MODEL, "input": CHAT, "extra_body": {"seed": 5}}
        answer = client.responses.create(**asked, max_output_tokens=12)
        assert answer.output_text == chat(seed=5).choices[0].message.content
        events = list(client.responses.create(**asked, max_output_tokens=12, stream=True))
        assert events[-1].type == f"response.{answer.status}"
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == answer.output_text
        flat = {"type": "function", **TOOL["function"]}
        [call] = client.responses.create(**asked, tools=[flat], tool_choice={"type": "function", "name": "person"}).output
        is_person(json.loads(call.arguments))
        kind = {"type": "json_schema", "name": "person", "strict": True, "schema": SCHEMA}
        is_person(json.loads(client.responses.create(**asked, text={"format": kind}).output_text))

    return {
        "completion": completion, "chat": chats, "responses": responses, "stream": stream,
        "n": several, "logprobs": logprobs, "stop": stop, "tools": tools,
        "JSON schema": schema, "seed": lambda: same([complete(temperature=1.0, seed=5).choices[0].text for _ in range(2)]),
        "refusal of embeddings": lambda: refused(lambda: client.embeddings.create(model=shared.MODEL, input="x")),
    }  # fmt: skip


def of_langchain(url: str) -> Checks:
    from langchain_core.messages import HumanMessage
    from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

    common: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": KEY, "model": shared.MODEL, "max_retries": 0}

    def chat(**options: Any) -> Any:
        return ChatOpenAI(**common, **{"max_tokens": 12, "seed": 1, **options})

    def completion() -> None:
        assert OpenAI(**common, max_tokens=12, seed=1).invoke(PROMPT)

    def chats() -> None:
        assert chat().invoke("Hi").content

    def stream() -> None:
        pieces = [chunk.content for chunk in chat(streaming=True).stream("Hi")]
        assert "".join(pieces) == chat().invoke("Hi").content

    def several() -> None:
        [generations] = chat(n=4, temperature=1.2).generate([[HumanMessage("Hi")]]).generations
        assert len(generations) == 4

    def logprobs() -> None:
        assert chat(logprobs=True).invoke("Hi").response_metadata["logprobs"]["content"]

    def stop() -> None:
        assert "\n" not in chat(max_tokens=40).invoke("Hi", stop=["\n"]).content

    def tools() -> None:
        [call] = chat(max_tokens=80).bind_tools([TOOL], tool_choice="person").invoke("Ada, 36").tool_calls
        is_person(call["args"])

    def schema() -> None:
        named = {"title": "person", "description": "A person.", **SCHEMA}
        is_person(chat(max_tokens=80).with_structured_output(named, method="json_schema").invoke("Ada, 36"))

    def embeddings() -> None:
        OpenAIEmbeddings(**common, check_embedding_ctx_length=False).embed_query("x")

    def responses() -> None:
        model = ChatOpenAI(**common, use_responses_api=True, max_tokens=80, extra_body={"seed": 1})
        assert (
            "".join(chunk.text for chunk in model.stream("Hi"))
            == model.invoke("Hi").text
            == chat(max_tokens=80).invoke("Hi").text
        )
        [call] = model.bind_tools([TOOL], tool_choice="person").invoke("Ada, 36").tool_calls
        is_person(call["args"])

    return {
        "completion": completion, "chat": chats, "responses": responses, "stream": stream, "n": several,
        "logprobs": logprobs, "stop": stop, "tools": tools, "JSON schema": schema,
        "seed": lambda: same([chat(seed=5, temperature=1.0).invoke("Hi").content for _ in range(2)]),
        "refusal of embeddings": lambda: refused(embeddings),
    }  # fmt: skip


def of_llama_index(url: str) -> Checks:
    from llama_index.core.base.llms.types import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    def model(**options: Any) -> Any:
        common = {"api_base": f"{url}/v1", "api_key": KEY, "model": shared.MODEL, "max_retries": 0, "max_tokens": 12}
        extra = {"seed": 1, **options.pop("more", {})}
        return OpenAILike(**{**common, "additional_kwargs": extra, **options})

    def chat(**options: Any) -> Any:
        return model(is_chat_model=True, **options)

    said = [ChatMessage(role="user", content="Hi")]

    def completion() -> None:
        assert model().complete(PROMPT).text

    def chats() -> None:
        assert chat().chat(said).message.content

    def stream() -> None:
        whole = "".join(piece.delta or "" for piece in chat().stream_chat(said))
        assert whole == chat().chat(said).message.content

    def logprobs() -> None:
        assert chat(more={"logprobs": True}).chat(said).raw.choices[0].logprobs.content

    def stop() -> None:
        assert "\n" not in model(max_tokens=40, more={"stop": ["\n"]}).complete(PROMPT).text

    def tools() -> None:
        def person(name: str, age: int) -> str:
            """Notes a person."""
            return name

        asked = chat(is_function_calling_model=True, max_tokens=80)
        answer = asked.chat_with_tools([FunctionTool.from_defaults(person)], "Ada, 36", tool_required=True)
        [call] = asked.get_tool_calls_from_response(answer)
        assert call.tool_name == "person", call

    def schema() -> None:
        is_person(json.loads(chat(max_tokens=80, more={"response_format": JSON_SCHEMA}).chat(said).message.content))

    return {
        "completion": completion, "chat": chats, "responses": None, "stream": stream, "n": None, "logprobs": logprobs,
        "stop": stop, "tools": tools,
        "JSON schema": schema, "seed": lambda: same([model(temperature=1.0).complete(PROMPT).text for _ in range(2)]),
        "refusal of embeddings": None,
    }  # fmt: skip


def of_instructor(url: str) -> Checks:
    import instructor
    import openai
    from pydantic import BaseModel, ConfigDict, Field

    class Person(BaseModel):
        model_config = ConfigDict(extra="forbid")  # otherwise the schema allows any number of further fields
        name: str = Field(max_length=8)
        age: int = Field(ge=0, le=99)

    def extract(mode: Any, seed: int = 1, temperature: float = 1.0) -> Any:
        client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0), mode=mode)
        return client.chat.completions.create(
            model=shared.MODEL,
            messages=CHAT,
            response_model=Person,
            max_retries=0,
            max_tokens=80,
            seed=seed,
            temperature=temperature,
        )

    def seed() -> None:
        same([extract(instructor.Mode.JSON_SCHEMA, seed=5).model_dump() for _ in range(2)])

    def responses() -> None:
        client = instructor.from_openai(
            openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0), mode=instructor.Mode.RESPONSES_TOOLS
        )
        person = client.responses.create(
            model=shared.MODEL,
            input="Ada, 36",
            response_model=Person,
            max_retries=0,
            max_output_tokens=80,
            extra_body={"seed": 1},
        )
        is_person(person.model_dump())

    def by(mode: Any) -> Callable[[], None]:
        return lambda: is_person(extract(mode).model_dump())

    return {
        "completion": None, "chat": by(instructor.Mode.JSON_SCHEMA), "responses": responses, "stream": None, "n": None,
        "logprobs": None, "stop": None,
        "tools": by(instructor.Mode.TOOLS), "JSON schema": by(instructor.Mode.JSON_SCHEMA),
        "seed": seed, "refusal of embeddings": None,
    }  # fmt: skip


def of_llm(url: str) -> Checks:
    import llm

    listed = [
        {
            "model_id": "chat",
            "model_name": shared.MODEL,
            "api_base": f"{url}/v1",
            "supports_schema": True,
            "supports_tools": True,
        },
        {"model_id": "text", "model_name": shared.MODEL, "api_base": f"{url}/v1", "completion": True},
    ]
    directory = Path(llm.user_dir())
    (directory / "extra-openai-models.yaml").write_text(json.dumps(listed), "utf-8")

    def prompted(model: str, stream: bool = False, **options: Any) -> Any:
        asked = llm.get_model(model)
        return asked.prompt(PROMPT, stream=stream, key=KEY, **{"max_tokens": 12, "seed": 1, **options})

    def stream() -> None:
        pieces = list(prompted("chat", stream=True))
        assert "".join(pieces) == prompted("chat").text()

    def stop() -> None:
        assert "\n" not in prompted("chat", stop="\n", max_tokens=40).text()

    def logprobs() -> None:
        response = prompted("text", logprobs=2)
        assert response.text()
        assert response.response_json["choices"][0]["logprobs"]["token_logprobs"], response.response_json

    def schema() -> None:
        is_person(json.loads(prompted("chat", schema=SCHEMA, max_tokens=80).text()))

    def some(model: str) -> Callable[[], None]:
        return lambda: same([prompted(model).text() for _ in range(2)])

    return {
        "completion": some("text"), "chat": some("chat"), "responses": None, "stream": stream, "n": None, "logprobs": logprobs,
        "stop": stop,
        "tools": None, "JSON schema": schema,
        "seed": lambda: same([prompted("chat", temperature=1.0, seed=5).text() for _ in range(2)]), "refusal of embeddings": None,
    }  # fmt: skip


def of_litellm(url: str) -> Checks:
    import litellm

    common: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": KEY, "max_retries": 0}

    def chat(**options: Any) -> Any:
        asked = {"max_tokens": 12, "seed": 1, **options}
        return litellm.completion(model=f"openai/{shared.MODEL}", messages=CHAT, **common, **asked)

    def completion() -> None:
        asked = {"prompt": PROMPT, "max_tokens": 12, **common}
        assert litellm.text_completion(model=f"text-completion-openai/{shared.MODEL}", **asked).choices[0].text

    def chats() -> None:
        assert chat().choices[0].message.content

    def stream() -> None:
        whole = "".join(chunk.choices[0].delta.content or "" for chunk in chat(stream=True))
        assert whole == chat().choices[0].message.content

    def several() -> None:
        assert len(chat(n=4).choices) == 4

    def logprobs() -> None:
        assert chat(logprobs=True).choices[0].logprobs.content

    def stop() -> None:
        assert "\n" not in chat(stop=["\n"], max_tokens=40).choices[0].message.content

    def tools() -> None:
        [call] = chat(tools=[TOOL], tool_choice=FORCED, max_tokens=80).choices[0].message.tool_calls
        is_person(json.loads(call.function.arguments))

    def schema() -> None:
        is_person(json.loads(chat(response_format=JSON_SCHEMA, max_tokens=80).choices[0].message.content))

    def embeddings() -> None:
        litellm.embedding(model=f"openai/{shared.MODEL}", input=["x"], **common)

    def responses() -> None:
        asked = {
            "model": f"openai/{shared.MODEL}",
            "input": "Hi",
            "max_output_tokens": 12,
            "extra_body": {"seed": 1},
            **common,
        }
        [item] = litellm.responses(**asked).output
        events = list(litellm.responses(**asked, stream=True))
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == item.content[0].text
        assert item.content[0].text

    return {
        "completion": completion, "chat": chats, "responses": responses, "stream": stream, "n": several, "logprobs": logprobs,
        "stop": stop, "tools": tools,
        "JSON schema": schema, "seed": lambda: same([chat(temperature=1.0).choices[0].message.content for _ in range(2)]),
        "refusal of embeddings": lambda: refused(embeddings),
    }  # fmt: skip


def of_lm_eval(url: str) -> Checks:
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

    given: dict[str, Any] = {"model": shared.MODEL, "num_concurrent": 1, "max_retries": 1}
    texts = LocalCompletionsAPI(base_url=f"{url}/v1/completions", tokenizer_backend="remote", **given)
    chats = LocalChatCompletion(base_url=f"{url}/v1/chat/completions", tokenizer_backend=None, **given)

    def asked(model: Any, kind: str, *arguments: Any) -> Any:
        return getattr(model, kind)([Instance(request_type=kind, doc={}, arguments=arguments, idx=0)], True)[0]

    def generated(model: Any, prompt: Any, **options: Any) -> str:
        return asked(model, "generate_until", prompt, {"until": ["\n\n"], "max_gen_toks": 16, **options})

    def completion() -> None:
        assert generated(texts, PROMPT)

    def chat() -> None:
        from lm_eval.models.api_models import JsonChatStr

        assert generated(chats, JsonChatStr(json.dumps(CHAT)))

    def logprobs() -> None:
        score, greedy = asked(texts, "loglikelihood", PROMPT, " a + b\n")
        assert math.isfinite(score), score
        assert score < 0, score
        assert greedy in (True, False)

    def stop() -> None:
        assert "\n" not in generated(texts, PROMPT, until=["\n"])

    return {
        "completion": completion, "chat": chat, "responses": None, "stream": None, "n": None, "logprobs": logprobs,
        "stop": stop, "tools": None,
        "JSON schema": None, "seed": lambda: same([generated(texts, PROMPT, temperature=1.0) for _ in range(2)]),
        "refusal of embeddings": None,
    }  # fmt: skip


CLIENTS: dict[str, tuple[str, Callable[[str], Checks]]] = {
    "openai": ("openai", of_openai),
    "langchain-openai": ("langchain-openai", of_langchain),
    "llama-index": ("llama-index-llms-openai-like", of_llama_index),
    "instructor": ("instructor", of_instructor),
    "llm": ("llm", of_llm),
    "litellm": ("litellm", of_litellm),
    "lm-eval": ("lm-eval", of_lm_eval),
    "pydantic-ai": ("pydantic-ai-slim", of_pydantic_ai),
    "haystack": ("haystack-ai", of_haystack),
    "dspy": ("dspy", of_dspy),
    "outlines": ("outlines", of_outlines),
    "evalplus": ("evalplus", of_evalplus),
}
"""By name: the distribution, and its checks."""


def word_of(check: Callable[[], None] | None) -> str:
    """ "yes", "-" or the fault in one line."""
    if check is None:
        return "-"
    try:
        check()
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return "yes"


def main(client: str, url: str) -> None:
    distribution, checks = CLIENTS[client]
    report: dict[str, Any] = {"client": client, "version": None, "found": {}}
    try:
        report["version"] = metadata.version(distribution)
        report["found"] = {feature: word_of(check) for feature, check in checks(url).items()}
    except metadata.PackageNotFoundError:
        pass
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
