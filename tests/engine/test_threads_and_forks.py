"""One `Shoal` in several threads, beside an event loop, and in a process that was forked from one that computed.

Tests of: api, engine.stream, native.build, constraints.grammar_sources, constraints.grammar.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import pytest

from shoal.api import Shoal
from shoal.loader import load
from shoal.testing import tiny_model, tiny_tokenizer

SEEDS = range(4)
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "lookahead": 3, "temperature": 0.9, "top_p": 0.95}


def pair(**options: Any) -> Shoal:
    return load(
        tiny_model("llama"), tiny_model("llama", seed=1, layers=1), tokenizer=tiny_tokenizer(), max_batch=8, **options
    )


def texts(shoal: Shoal, seed: int) -> list[tuple[int, ...]]:
    result = shoal.generate("the text" * (1 + seed % 3), 3, seed=seed, **OPTIONS)
    return [sample.token_ids for sample in result[0].samples]


def in_threads(work: Callable[[int], None]) -> None:
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in SEEDS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
        assert not thread.is_alive()
    assert not errors, errors


@pytest.mark.slow(but=["kernels"])
@pytest.mark.parametrize(
    "options", [{}, {"compile": "off"}, {"prefix_memory": 2**22}], ids=["kernels", "modules", "prefixes"]
)
def test_threads_get_what_they_would_get_alone(options: dict[str, Any]) -> None:
    shoal = pair(**options)
    alone = {seed: texts(shoal, seed) for seed in SEEDS}
    found: dict[int, list[Any]] = {seed: [] for seed in SEEDS}
    start = threading.Barrier(len(SEEDS))

    def work(seed: int) -> None:
        start.wait(100)
        for _ in range(2):
            found[seed].append(texts(shoal, seed))

    in_threads(work)
    assert found == {seed: [alone[seed]] * 2 for seed in SEEDS}


def test_a_stream_may_be_left_and_closed_by_another_thread() -> None:
    shoal = pair()
    stream = shoal.stream("the text", 3, seed=0, **OPTIONS)
    next(stream)
    closer = threading.Thread(target=stream.close)
    closer.start()
    closer.join(100)
    samples = stream.result()[0].samples
    assert {sample.finish_reason for sample in samples} == {"cancelled"}
    assert all(0 < len(sample.token_ids) < OPTIONS["max_new_tokens"] for sample in samples)
    whole = texts(shoal, 0)
    assert [ids[: len(sample.token_ids)] for ids, sample in zip(whole, samples, strict=True)] == [
        sample.token_ids for sample in samples
    ]


@pytest.mark.slow
def test_a_stream_that_another_thread_closes_while_a_round_runs() -> None:
    """The round is finished, and no row is computed after it; a row may have come to its own end before."""
    shoal, ended, options = pair(), [], OPTIONS | {"max_new_tokens": 100}
    for seed in range(8):
        whole = shoal.generate("the text", 3, seed=seed, **options)[0].samples
        stream = shoal.stream("the text", 3, seed=seed, **options)
        began = threading.Event()

        def read(stream: Any = stream, began: threading.Event = began) -> None:
            for _ in stream:
                began.set()
            ended.append(stream)

        reader = threading.Thread(target=read)
        reader.start()
        assert began.wait(100)
        stream.close()
        reader.join(100)
        assert ended[-1] is stream, "the reader failed"
        for sample, alone in zip(stream.result()[0].samples, whole, strict=True):
            assert sample.token_ids == alone.token_ids[: len(sample.token_ids)]
            if sample.finish_reason != "cancelled":
                assert (sample.finish_reason, sample.token_ids) == (alone.finish_reason, alone.token_ids)


def test_an_event_loop_and_a_thread() -> None:
    shoal = pair()
    alone = {seed: texts(shoal, seed) for seed in SEEDS}

    async def streamed(seed: int) -> list[tuple[int, ...]]:
        stream = shoal.stream("the text" * (1 + seed % 3), 3, seed=seed, **OPTIONS)
        async for _ in stream:
            pass
        return [sample.token_ids for sample in stream.result()[0].samples]

    async def both() -> None:
        beside = asyncio.get_running_loop().run_in_executor(None, texts, shoal, 3)
        found = await asyncio.gather(*map(streamed, (0, 1, 2)))
        assert dict(enumerate(found)) == {seed: alone[seed] for seed in (0, 1, 2)}
        assert await beside == alone[3]

    asyncio.run(both())


FORKED = """
    import asyncio, os, sys, torch
    torch.set_num_threads(2)
    import shoal
    from shoal.testing import tiny_model, tiny_tokenizer
    model = tiny_model("llama", vocab_size=20_000)  # wide enough for kernels to take both threads
    grammar = shoal.Grammar("regex", "[a-z]{3,9}")
    options = dict(seed=1, max_new_tokens=3, lookahead=2, top_p=0.9)

    def texts(pair, **more):
        assert float(torch.ones(2**20).exp().min()) > 2  # PyTorch's own threads, too
        found = pair.generate("the text", 8, **options, **more)[0].samples
        return [sample.token_ids for sample in found]

    async def streamed(pair):
        stream = pair.stream("the text", 8, **options)
        async for _ in stream:
            pass
        return [sample.token_ids for sample in stream.result()[0].samples]

    for compile in ("auto", "off"):
        pair = shoal.load(model, "ngram", tokenizer=tiny_tokenizer(), max_batch=8, compile=compile)
        before = texts(pair), texts(pair, grammar=grammar), asyncio.run(streamed(pair))
        child = os.fork()
        if child == 0:
            try:
                after = texts(pair), texts(pair, grammar=grammar), asyncio.run(streamed(pair))
                os._exit(0 if after == before else 3)
            except BaseException as error:
                print(compile, repr(error), file=sys.stderr, flush=True)
                os._exit(4)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert texts(pair) == before[0]
        assert torch.get_num_threads() == 2
        if code:
            sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_of_a_process_that_computed_goes_on() -> None:
    """By kernels and by modules. Threads of OpenMP, llguidance and ours end with a fork; a child that waited for them would wait
    for ever."""
    pytest.importorskip("llguidance")
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", textwrap.dedent(FORKED)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
