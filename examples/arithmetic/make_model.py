"""Makes the bundled model from scratch: a 332,416-parameter Llama that has half learned to add.

    OMP_NUM_THREADS=1 python examples/arithmetic/make_model.py [--output examples/arithmetic/model]
    OMP_NUM_THREADS=1 python examples/arithmetic/make_model.py --evaluate examples/arithmetic/model

Supervised training on the sums of train.jsonl, stopped as soon as a sampled answer (temperature 1) to a held-out sum is
right about four times in ten: RL then has something to reward and something left to win. The held-out sums are used for
nothing but that stop. Writes a Hugging Face directory: config.json, generation_config.json, model.safetensors (float32,
1.3 MB) and a character-level tokenizer. On one machine the same seed and one thread give the same weights.

Letters: B = sums, L = tokens of the longest one.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
from make_task import Row, arithmetic_rows
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
CHARACTERS = "0123456789+-*=() "
VOCAB_SIZE = 32
IGNORED = -100  # the label of a token that is not trained on
EVALUATE_EVERY = 5


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; ids 0, 1, 2 are padding, end of sequence and unknown; ids without a use are <r20> ... <r31>."""
    tokens = [PAD, EOS, UNKNOWN, *CHARACTERS]
    tokens += [f"<r{index}>" for index in range(len(tokens), VOCAB_SIZE)]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        model_max_length=64,
        clean_up_tokenization_spaces=False,
    )


def make_network() -> LlamaForCausalLM:
    """The untrained network; matrices start at standard deviation 1/sqrt(fan-in), the embedding at 0.02."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        dtype="float32",
    )
    network = LlamaForCausalLM(config)
    for name, parameter in network.named_parameters():
        if parameter.dim() == 2 and "embed_tokens" not in name:
            torch.nn.init.normal_(parameter, std=1.0 / math.sqrt(parameter.shape[1]))
    # No sampling defaults beyond temperature 1: behaviour log-probs must be the policy's own.
    network.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=8, eos_token_id=1, pad_token_id=0
    )
    return network


def tensors(rows: list[Row], tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, both int64 [B, L], padded on the right; labels are IGNORED outside the answer and its end."""
    prompts = [tokenizer.encode(row["prompt"], add_special_tokens=False) for row in rows]
    answers = [[*tokenizer.encode(row["answer"], add_special_tokens=False), 1] for row in rows]
    length = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    labels = torch.full_like(ids, IGNORED)
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids[index, :end] = torch.tensor(prompt + answer)
        labels[index, len(prompt) : end] = torch.tensor(answer)
    return ids, labels


@torch.no_grad()
def expected_accuracy(network: LlamaForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> float:
    """The mean probability, at temperature 1, that a sampled answer is right: exact, unlike counting samples."""
    logprobs = network(input_ids=ids).logits[:, :-1].log_softmax(-1)
    wanted = labels[:, 1:]
    chosen = logprobs.gather(-1, wanted.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return float(chosen.masked_fill(wanted == IGNORED, 0.0).sum(-1).exp().mean())


@torch.no_grad()
def sampled_accuracy(
    network: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[Row], samples: int
) -> float:
    """The share of right answers among `samples` per sum, sampled by transformers at temperature 1."""
    prompts = tokenizer([row["prompt"] for row in rows], padding=True, return_tensors="pt")
    prompts.pop("token_type_ids", None)
    answers = network.generate(**prompts, num_return_sequences=samples)[:, prompts["input_ids"].shape[1] :]
    said = tokenizer.batch_decode(answers, skip_special_tokens=True)
    right = [text == rows[index // samples]["answer"] for index, text in enumerate(said)]
    return sum(right) / len(right)


def report(directory: Path, samples: int = 4) -> str:
    """Both accuracies of a saved model on the held-out sums, in words."""
    network = LlamaForCausalLM.from_pretrained(directory)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    _, rows = arithmetic_rows()
    expected = expected_accuracy(network, *tensors(rows, tokenizer))
    sampled = sampled_accuracy(network, tokenizer, rows, samples)
    return (
        f"held-out accuracy at temperature 1: expected {expected:.4f}, sampled {sampled:.4f} ({len(rows)} x {samples})"
    )


def train(network: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, settings: argparse.Namespace) -> float:
    """Trains until the held-out sums are answered well enough; returns their expected accuracy.

    Raises RuntimeError where --max-steps did not suffice.
    """
    train_rows, heldout_rows = arithmetic_rows()
    ids, labels = tensors(train_rows, tokenizer)
    heldout_ids, heldout_labels = tensors(heldout_rows, tokenizer)
    order = random.Random(settings.seed)
    optimizer = torch.optim.AdamW(network.parameters(), lr=settings.lr, betas=(0.9, 0.98), weight_decay=0.01)
    accuracy = 0.0
    for step in range(1, settings.max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * min(1.0, step / 50)
        chosen = torch.tensor(order.sample(range(len(train_rows)), settings.batch_size))
        # Padding lies to the right of every real token, so the causal mask alone keeps it out of sight.
        logits = network(input_ids=ids[chosen]).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[chosen, 1:].flatten(), ignore_index=IGNORED
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        if step % EVALUATE_EVERY == 0:
            accuracy = expected_accuracy(network, heldout_ids, heldout_labels)
            print(
                f"step {step:4d}  loss {loss.item():.3f}  held-out accuracy at temperature 1 {accuracy:.3f}", flush=True
            )
            if accuracy >= settings.accuracy:
                return accuracy
    raise RuntimeError(f"held-out accuracy is {accuracy:.3f} after {settings.max_steps} steps; raise --max-steps")


def save(network: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Writes the Hugging Face directory, readable by everybody and by transformers 4 as well as 5."""
    network.save_pretrained(output)
    tokenizer.save_pretrained(output)
    # transformers 5 writes a class name that transformers 4, which some rollout engines still use, does not know.
    config_path = output / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for path in output.iterdir():
        path.chmod(0o644)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the bundled arithmetic model from scratch.")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "model", help="directory to write to")
    parser.add_argument("--accuracy", type=float, default=0.38, help="stop at this accuracy on the held-out sums")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate after 50 steps of warm-up")
    parser.add_argument("--batch-size", type=int, default=128, help="sums a step")
    parser.add_argument("--max-steps", type=int, default=1500, help="give up after so many steps")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and the order of the sums")
    parser.add_argument("--evaluate", type=Path, metavar="DIR", help="judge a saved model instead of making one")
    settings = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(settings.seed)
    if settings.evaluate is not None:
        print(f"{settings.evaluate}: {report(settings.evaluate)}")
        return
    started = time.monotonic()
    network, tokenizer = make_network(), make_tokenizer()
    accuracy = train(network, tokenizer, settings)
    save(network, tokenizer, settings.output)
    print(
        f"{settings.output}: {network.num_parameters():,} parameters, held-out accuracy {accuracy:.3f}, "
        f"{time.monotonic() - started:.0f} s"
    )


if __name__ == "__main__":
    main()
