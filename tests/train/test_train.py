"""The training code at small sizes, and the pair that it shipped.

Tests of: stored_problems, train.own_samples, drafting.distillation, train.loop, and of training/pair.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaConfig

from continuations import sample
from measure_pair import SHIPPED, LoadedPair, first_function, is_valid, passes, text_figures
from pair_corpus import CorpusSize, build_corpus, fill_in_middle, pack
from pair_models import build
from pair_tokenizer import END, FIM_MIDDLE, FIM_PREFIX, FIM_SUFFIX, SPECIAL, save_tokenizer, train_tokenizer
from problems.generator import generate, split_of, templates
from shoal.drafting.distillation import acceptance, distillation_loss, next_token_loss
from shoal.errors import RequestError
from shoal.evaluation.tasks import function_problems
from shoal.stored_problems import Draw, stored_problems
from shoal.train.loop import Schedule, Trainer, orthogonalise
from shoal.train.own_samples import Windows, is_held_out, stdlib_files, stored_prompts
from store_problems import DRAWS, drawn

SPLITS = ("train", "constants", "templates")
SMALL = CorpusSize(problems=40, stdlib_characters=20_000, held_out_problems=10, held_out_characters=5_000)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer((p.document for p in generate(0, 200, "train")), vocabulary=512)


def tiny_run(checkpoint: Path) -> Trainer:
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=512, num_key_value_heads=1, tie_word_embeddings=True, **shape)
    return Trainer(build(config, seed=0), next_token_loss, checkpoint)


def test_problems_and_corpus_repeat_for_a_seed_and_differ_between_seeds():
    assert generate(3, 20, "train") == generate(3, 20, "train") != generate(4, 20, "train")
    assert build_corpus(SMALL, seed=1) == build_corpus(SMALL, seed=1)


@pytest.mark.slow(but=["prompts"])
@pytest.mark.parametrize("draw", DRAWS)
def test_stored_problems_are_the_generator_s(draw: Draw) -> None:
    fields = "name", "prompt", "solution", "tests", "function", "document"
    stored, made = (
        [[getattr(one, field) for field in fields] for one in some] for some in (stored_problems(draw), drawn(draw))
    )
    assert stored == made


def test_a_larger_draw_has_further_problems_or_is_refused() -> None:
    prompts, further = ([one.prompt for one in stored_problems(draw)] for draw in ("prompts", "corpus"))
    assert [stored_prompts(count) for count in (3, 2401, 10**5)] == [prompts[:3], [*prompts, further[0]], prompts + further]
    assert len(function_problems(1996)) == 1996
    with pytest.raises(RequestError, match="has 1996 problems, and 1997 were asked for"):
        function_problems(1997)


def test_splits_share_no_template_no_constants_and_no_file():
    made = {split: generate(1, 300, split) for split in SPLITS}
    assert all(p.split == split for split, problems in made.items() for p in problems)
    trained = {p.template for p in made["train"]}
    assert not trained & {p.template for p in made["templates"]}
    exact = {(p.template, p.constants) for p in made["train"]}
    assert not exact & {(p.template, p.constants) for p in made["constants"]}
    assert {split_of("ints.count.above", (k,)) for k in range(200)} == {"train", "constants"}
    held_out = [is_held_out(file) for file in stdlib_files()]
    assert 0 < sum(held_out) < len(held_out) / 5
    assert not any("test" in file.parts for file in stdlib_files())


@pytest.mark.parametrize("split", SPLITS)
def test_solutions_pass_their_tests(split):
    for problem in generate(2, 150, split):
        exec(problem.document, {})
        assert is_valid(problem.function)
        assert len(problem.tests) >= 1


def test_every_template_makes_a_problem():
    keys = [template.key for template in templates()]
    assert len(set(keys)) == len(keys) >= 60
    assert {p.template for p in generate(5, 5000, "train") + generate(5, 600, "templates")} == set(keys)


def test_fill_in_middle_only_moves_text():
    document = generate(0, 1, "train")[0].document
    moved = fill_in_middle(document, random.Random(0))
    prefix, rest = moved.removeprefix(FIM_PREFIX).split(FIM_SUFFIX)
    suffix, middle = rest.split(FIM_MIDDLE)
    assert prefix + middle + suffix == document


def test_special_tokens_come_first_and_digits_and_line_ends_stand_alone(tokenizer):
    assert [tokenizer.token_to_id(token) for token in SPECIAL] == [0, 1, 2, 3, 4]
    assert tokenizer.encode(f"a{END}").ids[-1] == 0
    pieces = [tokenizer.decode([token]) for token in tokenizer.encode("x = 1234\n    return").ids]
    assert pieces[2:6] == [" 1", "2", "3", "4"]
    assert pieces[6:8] == ["\n", "    "]


@settings(deadline=None, max_examples=200)
@given(text=st.text())
def test_tokenizer_gives_back_any_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_saved_tokenizer_gives_back_text_and_adds_nothing(tokenizer, tmp_path):
    save_tokenizer(tokenizer, tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "def f(x):\r\n\treturn x , 'é🙂' .\n\n\n"
    assert loaded.decode(loaded(text).input_ids) == text
    assert loaded("").input_ids == []
    assert (loaded.eos_token_id, loaded.pad_token_id, loaded.bos_token_id) == (0, 4, None)


def test_windows_are_the_same_at_every_visit_and_cover_an_epoch():
    tokens = np.arange(100, dtype=np.uint16)
    windows = Windows(tokens, length=10, batch=2, seed=0)
    first = [windows[step] for step in range(6)]
    assert sorted(np.concatenate(first[:5]).flatten().tolist()) == list(range(100))
    assert (windows[0] == first[0]).all()


def test_resumed_training_equals_one_run(tokenizer, tmp_path):
    tokens = pack([p.document for p in generate(0, 30, "train")], tokenizer)
    windows = Windows(tokens, length=32, batch=2, seed=0)
    schedule = Schedule(steps=4, warmup=2)
    whole = tiny_run(tmp_path / "whole.pt")
    whole.train(windows, schedule)
    first = tiny_run(tmp_path / "parts.pt")
    for step in range(2):
        first.advance(torch.from_numpy(windows[step]), schedule.factor(step))
    first.save()
    second = tiny_run(tmp_path / "parts.pt")
    second.train(windows, schedule)
    assert second.step == 4
    for name, tensor in second.model.state_dict().items():
        assert torch.equal(tensor, whole.model.state_dict()[name]), name


def test_training_lowers_the_loss(tokenizer, tmp_path):
    tokens = pack([p.document for p in generate(0, 30, "train")], tokenizer)
    run = tiny_run(tmp_path / "run.pt")
    batch = torch.from_numpy(Windows(tokens, 32, 4, 0)[0])
    losses = [run.advance(batch, 1.0) for _ in range(8)]
    assert losses[-1] < losses[0] - 0.3


def test_schedule_warms_up_and_decays_to_zero():
    schedule = Schedule(steps=100, warmup=10, decay=0.5)
    assert schedule.factor(0) == 0.1
    assert schedule.factor(30) == 1.0
    assert schedule.factor(75) == pytest.approx(0.5)
    assert schedule.factor(100) == 0


def test_orthogonalise_brings_singular_values_near_one():
    torch.manual_seed(0)
    for shape in ((2, 8, 20), (2, 20, 8)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
        assert values.min() > 0.5
        assert values.max() < 1.5


def test_distillation_from_itself_leaves_only_the_label_term(tmp_path):
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    assert acceptance(p.log(), q.log()).item() == pytest.approx(0.6)  # the overlap of the distributions
    assert acceptance(p.log(), p.log(), 0.2).item() == pytest.approx(1.0)
    run = tiny_run(tmp_path / "run.pt")
    tokens = torch.randint(0, 512, (2, 9))
    loss = distillation_loss(run.model)(run.model, tokens)
    assert loss.item() == pytest.approx(0.05 * next_token_loss(run.model, tokens).item(), rel=1e-3)


def test_report_tests_a_function_by_parsing_and_by_its_tests():
    problem = generate(0, 1, "train")[0]
    assert first_function(problem.document + "\nx = 1\n") == problem.function + "\n\n"
    assert passes(problem.function, problem)
    assert not passes(problem.prompt + "    return object()\n", problem)
    assert not is_valid(problem.prompt + "    return (\n")


def test_shipped_pair_is_small_and_shares_a_tokenizer():
    size = sum(file.stat().st_size for file in SHIPPED.rglob("*") if file.is_file())
    assert size <= 25 * 2**20
    same = [(SHIPPED / name / "tokenizer.json").read_bytes() for name in ("target", "drafter")]
    assert same[0] == same[1]


@pytest.fixture(scope="module")
def shipped() -> LoadedPair:
    return LoadedPair.load(SHIPPED)


@pytest.mark.slow
def test_shipped_target_mostly_writes_python_that_passes_and_its_drafter_agrees(shipped):
    assert shipped.drafter.num_parameters() * 8 < shipped.target.num_parameters()
    problems = generate(3, 12, "constants")
    prompts = [shipped.tokenizer.encode(problem.prompt).ids for problem in problems]
    written = sample(shipped.target, prompts, temperature=0.2, seed=0, new_tokens=48)
    functions = [first_function(p.prompt + shipped.tokenizer.decode(row)) for p, row in zip(problems, written, strict=True)]
    assert sum(map(is_valid, functions)) >= 10
    assert sum(passes(function, problem) for function, problem in zip(functions, problems, strict=True)) >= 8
    text = pack([problem.document for problem in generate(3, 40, "templates")], shipped.tokenizer)
    figures = text_figures(shipped, "problems", text)
    assert figures.agreement >= 0.75  # of the models, on problems that were held out
    assert figures.acceptance["1.0"] >= 0.75
