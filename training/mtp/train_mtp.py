"""The training of a small hybrid target with a multi-token-prediction layer, and its tokens per pass.

`python training/mtp/train_mtp.py build/mtp` writes a checkpoint named as Qwen3.5's, of three gated delta nets and one attention
layer, from the bundled pair's corpus and tokenizer, and prints its tokens per pass with
`--draft mtp`, for how many prompts its greedy ids are those of Transformers, and the p-values of its samples under the
law of Transformers; with `--json FILE` these and the machine become a file.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).parents[1] / "pair"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import torch
import typer
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.modeling_layers import MtpModel

import command
import shoal
from pair_corpus import CorpusSize, build_corpus, pack
from problems.generator import generate
from provenance import require_place, write_results
from shoal.bench.machine import machine
from shoal.models.mtp_layer import Beside
from shoal.models.sources import bundled
from shoal.train.own_samples import Windows

SIZE = CorpusSize(problems=12_000, stdlib_characters=400_000)
LENGTH, BATCH, RATE = 128, 16, 4e-3
NEW = 64
TOKENS, CALLS, TEMPERATURE, TOP_K = 3, 160, 1.5, 4
"""The number of tokens whose law is tested, the calls of 8 samples, and how these are drawn."""
PUBLISHED = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}


def config() -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(
        vocab_size=2048,
        hidden_size=192,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=48,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=48,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        eos_token_id=0,
        pad_token_id=4,
        mtp_num_hidden_layers=1,
    )


def losses(model: Any, layer: Any, tokens: Tensor) -> list[Tensor]:
    """Computes the loss of the target, of the layer on its states, and of the layer on its own states."""
    out = model(tokens, use_cache=False, output_hidden_states=True)
    found = [cross_entropy(out.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())]
    states = out.hidden_states[-1]
    for ahead in (1, 2):
        fed = tokens[:, ahead:]
        positions = torch.arange(ahead, tokens.shape[1])[None]
        states = layer.forward_layer(0, states[:, :-1], positions, None, input_ids=fed)
        said = layer._project_to_logits(states[:, :-1])
        found.append(cross_entropy(said.flatten(0, 1), fed[:, 1:].flatten()))
    return found


def save(model: Any, layer: Any, directory: Path) -> None:
    """Writes the checkpoint; the layer's tensors have the names of Qwen3.5."""
    model.save_pretrained(directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in layer.layers[0].state_dict().items():
        outer = PUBLISHED.get(name.removesuffix(".weight"))
        place = name.replace("mtp_block.", "layers.0.") if outer is None else f"{outer}.weight"
        tensors[f"mtp.{place}"] = tensor.contiguous()
    save_file(tensors, file, {"format": "pt"})
    save_tokenizer(directory)


def save_tokenizer(directory: Path) -> None:
    for file in bundled("target").glob("*token*"):
        shutil.copy(file, directory)


def measure(directory: Path, draft: str = "mtp") -> list[dict[str, Any]]:
    """Prints and returns counts of 8 samples at T = 0.8, for prompts of held-out constants.

    Beside them stands the number of prompts of which all 8 greedy samples are those of Transformers.
    """
    rows: list[dict[str, Any]] = []
    print("lookahead  rounds  tokens per pass and row  drafted  accepted  greedy as Transformers")
    prompts = [problem.prompt for problem in generate(1, 12, "constants")]
    with shoal.load(directory, draft, dtype="float32") as pair:
        greedy = by_transformers(directory, [pair.tokenizer.encode(prompt) for prompt in prompts])
        for lookahead in ("off", 1, 2, 3, 5):
            stats = pair.generate(prompts, 8, max_new_tokens=NEW, temperature=0.8, lookahead=lookahead).stats
            alike = pair.generate(prompts, 8, max_new_tokens=NEW, temperature=0.0, lookahead=lookahead)
            same = sum(
                all(sample.token_ids == ids for sample in result.samples) for result, ids in zip(alike, greedy, strict=True)
            )
            rows.append(
                {
                    "lookahead": lookahead,
                    "rounds": stats.rounds,
                    "tokens per pass and row": stats.acceptance_length,
                    "drafted": stats.drafted,
                    "accepted": stats.accepted,
                    "prompts": len(prompts),
                    "prompts with the greedy ids of Transformers": same,
                }
            )
            counts = f"{stats.rounds:7} {stats.acceptance_length:24.2f} {stats.drafted:8} {stats.accepted:9}"
            print(f"{lookahead!s:9} {counts} {same:12} of {len(prompts)}", flush=True)
    return rows


def by_transformers(directory: Path, prompts: Sequence[list[int]]) -> list[tuple[int, ...]]:
    """Returns the greedy ids of Transformers, each prompt alone, up to the end of the text."""
    hf = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    texts = [hf.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)[0] for prompt in prompts]
    return [tuple(text[len(prompt) :].tolist()) for text, prompt in zip(texts, prompts, strict=True)]


def p_values(directory: Path, draft: str = "mtp") -> list[dict[str, Any]]:
    """Prints and returns p-values of 3 tokens, 8 samples a call, under their law, by rules of acceptance.

    A p-value near 0 says that the samples do not follow the law. It stands beside that of another law, the one of a
    temperature of 1, which shall be near 0. Of the coupled rule, whose tokens are those of plain decoding, the prompts
    are counted for which they are.
    """
    rows: list[dict[str, Any]] = []
    prompts = [problem.prompt for problem in generate(1, 12, "constants")]
    hf = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    print("rule       drafted  accepted  outcomes  p-value  of another law  sampled as plain")
    with shoal.load(directory, draft, dtype="float32") as pair:
        prompt = pair.tokenizer.encode(prompts[0])
        laws = [law(hf, prompt, temperature) for temperature in (TEMPERATURE, 1.0)]
        for rule in ("rejection", "coupled"):
            counts, drafted, accepted = Counter[tuple[int, ...]](), 0, 0
            for seed in range(CALLS):
                result = pair.generate(
                    prompt, 8, max_new_tokens=TOKENS, temperature=TEMPERATURE, top_k=TOP_K, lookahead=2, rule=rule, seed=seed
                )
                counts.update(tuple(sample.token_ids) for sample in result[0].samples)
                drafted, accepted = drafted + result.stats.drafted, accepted + result.stats.accepted
            p_value, control = (fit_of(counts, each) for each in laws)
            row: dict[str, Any] = {
                "rule": rule,
                "samples": 8 * CALLS,
                "tokens": TOKENS,
                "drafted": drafted,
                "accepted": accepted,
            }
            row |= {"outcomes": len(laws[0]), "p-value": p_value, "p-value of another law": control}
            if rule == "coupled":
                drafts, plain = (
                    pair.generate(prompts, 8, max_new_tokens=NEW, temperature=0.8, lookahead=lookahead, rule=rule, seed=1)
                    for lookahead in (3, "off")
                )
                row["prompts"] = len(prompts)
                row["prompts with the sampled ids of plain decoding"] = sum(
                    [sample.token_ids for sample in one.samples] == [sample.token_ids for sample in other.samples]
                    for one, other in zip(drafts, plain, strict=True)
                )
            rows.append(row)
            alike = row.get("prompts with the sampled ids of plain decoding", "-")
            said = f"{rule:9} {drafted:8} {accepted:9} {len(laws[0]):9} {p_value:8.3f} {control:15.1e} {alike:>17}"
            print(said, flush=True)
    return rows


@torch.inference_mode()
def law(hf: Any, prompt: Sequence[int], temperature: float) -> dict[tuple[int, ...], float]:
    """Computes the probabilities of all continuations of `TOKENS` tokens, or up to the end of the text, by Transformers."""
    paths: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        longer: dict[tuple[int, ...], float] = {}
        for path, share in paths.items():
            if path and path[-1] == hf.config.eos_token_id:
                longer[path] = share
                continue
            logits = hf(torch.tensor([[*prompt, *path]]), use_cache=False).logits[0, -1].double()
            best = logits.topk(TOP_K)
            for token, each in zip(best.indices.tolist(), (best.values / temperature).softmax(-1).tolist(), strict=True):
                further = (*path, token)
                longer[further] = share * each
        paths = longer
    return paths


def fit_of(counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """Computes the p-value of Pearson's test; outcomes that are expected less than 5 times count as one."""
    if set(counts) - set(law):
        return 0.0
    samples = counts.total()
    cells = {outcome: outcome if share * samples >= 5 else None for outcome, share in law.items()}
    observed, expected = Counter[tuple[int, ...] | None](), Counter[tuple[int, ...] | None]()
    for outcome, share in law.items():
        observed[cells[outcome]] += counts[outcome]
        expected[cells[outcome]] += share * samples  # type: ignore[assignment]
    distance = sum((observed[cell] - wanted) ** 2 / wanted for cell, wanted in expected.items())
    halves = torch.tensor([(len(expected) - 1) / 2, distance / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(*halves)) if len(expected) > 1 else 1.0


def main(
    directory: Path,
    steps: int = 300,
    trained: Annotated[bool, typer.Option("--trained", help="measure the checkpoint that is there")] = False,
    to: Annotated[Path | None, typer.Option("--json", help="write the counts")] = None,
) -> None:
    """Trains, saves and measures."""
    require_place(to)
    if not trained:
        train(directory, steps)
    report(to, None if trained else steps, directory)


def report(to: Path | None, steps: int | None, target: Path, draft: str = "mtp") -> None:
    """Measures, and writes the counts to a file."""
    rows, laws = measure(target, draft), p_values(target, draft)
    if to is not None:
        write_results(to, {"machine": machine(torch.device("cpu")), "training steps": steps, "rows": rows, "laws": laws})


def train(directory: Path, steps: int) -> None:
    """Trains target and layer, and writes the checkpoint."""
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(config())
    layer = MtpModel(Beside(model, directory), 1)
    own = sum(one.numel() for one in layer.layers.parameters())
    print(f"{own:,} parameters of the layer", flush=True)
    fit([*model.parameters(), *layer.layers.parameters()], lambda tokens: losses(model, layer, tokens), steps)
    directory.mkdir(parents=True, exist_ok=True)
    save(model.eval(), layer, directory)


def fit(parameters: Iterable[torch.nn.Parameter], losses: Callable[[Tensor], list[Tensor]], steps: int) -> None:
    """Trains by the sum of the losses of windows of the corpus, [16, 128] tokens a step."""
    tokenizer = Tokenizer.from_file(str(bundled("target") / "tokenizer.json"))
    windows = Windows(pack(build_corpus(SIZE, 0).train, tokenizer), LENGTH, BATCH, 0)
    trained = {id(one): one for one in parameters}
    print(f"{sum(one.numel() for one in trained.values()):,} parameters", flush=True)
    optimizer = torch.optim.AdamW(trained.values(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.05)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 50) * (0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2)
    )
    started = time.perf_counter()
    for step in range(steps):
        of_step = losses(torch.from_numpy(windows[step]))
        sum(of_step).backward()  # type: ignore[union-attr]
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
        if step % 50 == 0 or step == steps - 1:
            said = " ".join(f"{one.item():.3f}" for one in of_step)
            print(f"step {step}: losses {said}, {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    command.run(main)
