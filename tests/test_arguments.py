"""Flags and the config file: what is refused names the flag or the key, and nothing is rounded or guessed."""

from __future__ import annotations

import re
import typing
from pathlib import Path

import pytest

from m2po_megatron.arguments import Settings, build_parser, parse_arguments
from m2po_megatron.initialize import check_layout
from m2po_megatron.policy.settings import ParallelSettings
from m2po_megatron.startup import check_prompts


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with what the required flags name."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    return tmp_path


def parse(files: Path, *flags: str) -> Settings:
    required = ["--hf-path", str(files / "model"), "--prompt-data", str(files / "train.jsonl")]
    return parse_arguments([*required, *flags])


def refused(files: Path, *flags: str) -> str:
    with pytest.raises(ValueError) as error:
        parse(files, *flags)
    return str(error.value)


def with_config(files: Path, text: str, *flags: str) -> Settings:
    path = files / "run.yaml"
    path.write_text(text)
    return parse(files, "--config", str(path), *flags)


def config_refused(files: Path, text: str) -> str:
    with pytest.raises(ValueError) as error:
        with_config(files, text)
    assert f"--config {files / 'run.yaml'}" in str(error.value)
    return str(error.value)


def test_defaults_and_values_reach_their_rooms(files: Path) -> None:
    settings = parse(files, "--lr", "1e-5", "--m2-threshold", "0.02", "--bf16", "--max-staleness", "7", "--save", "out")
    assert settings.optimizer.lr == 1e-5
    assert settings.loss.m2_threshold == 0.02
    assert settings.model.bf16 is True
    assert settings.parallel.sequence_parallel is False
    assert settings.rollout.max_staleness == 7
    assert settings.run.directory == Path("out/run")
    assert settings.optimizer.clip_grad == 1.0


def test_a_flag_of_two_rooms_fills_both(files: Path) -> None:
    settings = parse(files, "--global-batch-size", "16", "--rollout-batch-size", "64", "--seed", "5")
    assert settings.batch.global_batch_size == settings.rollout.global_batch_size == 16
    assert settings.run.seed == settings.rollout.seed == 5
    assert settings.rollout.updates_per_batch == 4
    untouched = parse(files)
    assert untouched.batch.global_batch_size == untouched.rollout.global_batch_size == 512
    assert untouched.run.seed == untouched.rollout.seed == 0


def test_every_flag_says_what_it_does() -> None:
    groups = build_parser()._action_groups
    actions = [a for group in groups for a in group._group_actions if a.dest != "help"]
    assert len(actions) > 50
    assert [a.option_strings[0] for a in actions if not re.match(r"\w.{5,}", a.help or "")] == []
    assert [group.title for group in groups[2:]] == ["model", "parallel", "optimizer", "loss", "batch", "rollout", "run"]
    assert "--m2-threshold" in build_parser().format_help()  # no stray % in a help text


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--m2-treshold", "0.04"], "unknown flag --m2-treshold; did you mean --m2-threshold?"),
        (["--m2-treshold=0.04"], "unknown flag --m2-treshold=0.04; did you mean --m2-threshold?"),
        (["--no-sequence-paralel"], "unknown flag --no-sequence-paralel; did you mean --no-sequence-parallel?"),
        (["--confg", "x.yaml"], "unknown flag --confg; did you mean --config?"),
        (["--zzzzzz"], "unknown flag --zzzzzz"),
        (["--max-stale", "3"], "unknown flag --max-stale; did you mean --max-staleness?"),  # no abbreviations
        (["--micro-batch-size", "4", "8"], "unexpected argument 8: it belongs to no flag"),
    ],
)
def test_an_unknown_flag_is_named_with_the_nearest(files: Path, flags: list[str], said: str) -> None:
    assert refused(files, *flags) == said


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--train-iters", "many"], "--train-iters"),
        (["--train-iters", "2.5"], "--train-iters"),
        (["--lr", "fast"], "--lr"),
        (["--lr"], "--lr"),
        (["--bf16", "yes"], "yes"),
        (["--recompute-granularity", "half"], "--recompute-granularity"),
        (["--lr-decay-style", "steps"], "--lr-decay-style"),
        (["--logprob-mode", "keep"], "--logprob-mode"),
        (["--rollout-engine", "other"], "--rollout-engine"),
        (["--policy-loss", "ppo"], "--policy-loss 'ppo' is not known; known: m2po, grpo, reinforce"),
    ],
)
def test_a_value_of_the_wrong_type_names_the_flag(files: Path, flags: list[str], named: str) -> None:
    assert named in refused(files, *flags)


SIZES = ("tensor-model-parallel", "pipeline-model-parallel", "context-parallel", "expert-model-parallel")
SIZES += ("expert-tensor-parallel",)


@pytest.mark.parametrize("flags", [["--recompute-method", "block"], ["--recompute-num-layers", "1"]])
@pytest.mark.parametrize("granularity", [[], ["--recompute-granularity", "selective"]])
def test_what_only_full_recomputation_takes_is_refused_without_it(
    files: Path, flags: list[str], granularity: list[str]
) -> None:
    assert refused(files, *flags, *granularity) == f"{flags[0]}: needs --recompute-granularity full"
    parse(files, *flags, "--recompute-granularity", "full")


def numeric_flags(kind: type) -> list[str]:
    return [
        a.option_strings[0] for group in build_parser()._action_groups for a in group._group_actions if a.type is kind
    ]


def test_no_number_may_be_negative(files: Path) -> None:
    flags = numeric_flags(int) + numeric_flags(float)
    assert len(flags) > 35
    for name in flags:
        assert name in refused(files, f"{name}=-1")


def test_no_number_may_be_nan_or_infinite(files: Path) -> None:
    flags = numeric_flags(float)
    assert {"--m2-threshold", "--lr", "--temperature", "--eval-temperature", "--clip-grad", "--weight-decay"} <= set(flags)
    for name in flags:
        for value in ("nan", "inf", "-inf"):
            said = refused(files, f"{name}={value}")
            assert name in said
            assert value in said


@pytest.mark.parametrize(
    "flags",
    [
        *([name, "0"] for name in ("--train-iters", "--global-batch-size", "--micro-batch-size", "--group-size")),
        *([name, "0"] for name in ("--max-tokens-per-micro-batch", "--tensor-model-parallel-size", "--rollout-batch-size")),
        *([name, "0"] for name in ("--pipeline-model-parallel-size", "--make-vocab-size-divisible-by", "--lr-decay-iters")),
        *([name, "0"] for name in ("--distributed-timeout-minutes", "--temperature", "--adam-eps", "--publish-interval")),
        *([name, "0"] for name in ("--eval-samples-per-prompt", "--engine-floor-samples", "--max-response-length")),
        *([name, "0"] for name in ("--logprob-chunk-tokens", "--num-virtual-stages-per-pipeline-rank")),
        *([f"--{name}-size", "0", "--max-tokens-per-micro-batch", "64"] for name in SIZES),
        ["--recompute-num-layers", "0", "--recompute-granularity", "full"],
        ["--make-vocab-size-divisible-by", "1000000000000"],
        ["--distributed-timeout-minutes", "999999999999"],
        *([name, "1"] for name in ("--adam-beta1", "--adam-beta2")),
        ["--seed", str(2**32)],
        ["--seed", "1" + "0" * 400],
    ],
    ids=lambda flags: flags[0] + (" huge" if len(flags[1]) > 10 else "") + (" budget" if len(flags) > 2 else ""),
)
def test_what_is_out_of_range_names_the_flag(files: Path, flags: list[str]) -> None:
    assert flags[0] in refused(files, *flags)


def test_zero_stays_possible_where_it_means_something(files: Path) -> None:
    zeros = ["m2-threshold", "lr", "clip-grad", "weight-decay", "max-staleness", "eval-temperature", "seed", "save-interval"]
    parse(files, *(f"--{name}=0" for name in zeros))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rollout-batch-size", "20"], "--rollout-batch-size 20 is not a multiple of --group-size 8"),
        (["--rollout-batch-size", "24", "--global-batch-size", "16"], "24 is not a multiple of --global-batch-size 16"),
        (
            ["--micro-batch-size", "4", "--max-tokens-per-micro-batch", "100"],
            "--micro-batch-size and --max-tokens-per-micro-batch: give one of them, not both",
        ),
        (
            ["--max-tokens-per-micro-batch", "64"],
            "--max-tokens-per-micro-batch 64: a micro-batch holds sequences of at most 64 tokens; "
            "1 prompt token + --max-response-length 64 is more",
        ),
        (
            [*("--max-tokens-per-micro-batch", "51", "--context-parallel-size", "2", "--max-prompt-length", "37")],
            "51 x --context-parallel-size 2: a micro-batch holds sequences of at most 100 tokens; "
            "--max-prompt-length 37 + --max-response-length 64 is more",
        ),
        (["--save-interval", "5"], "--save-interval: needs --save DIR"),
        (["--logits-dtype", "bf16"], "--logits-dtype bf16: needs --bf16"),
        (["--eval-interval", "5"], "--eval-interval: needs --eval-data FILE"),
        (["--train-iters", "6"], "--train-iters 6: must be a multiple of the 4 updates of a batch"),
        (["--lr", "1e-6", "--min-lr", "1e-5"], "--min-lr 1e-05: is above --lr 1e-06"),
        (["--lr-warmup-iters", "9", "--lr-decay-iters", "9"], "--lr-decay-iters 9: must be above --lr-warmup-iters 9"),
        (["--rollout-engine", "sglang"], "--rollout-engine sglang needs --sglang-urls"),
        (["--sglang-urls", "http://a:1"], "--sglang-urls is given, but --rollout-engine is not sglang"),
    ],
)
def test_contradictions_name_the_flags(files: Path, flags: list[str], said: str) -> None:
    assert said in refused(files, *flags)


def test_a_token_budget_that_holds_the_longest_sequence_is_taken(files: Path) -> None:
    parse(files, "--max-tokens-per-micro-batch", "65")
    parse(files, *("--max-tokens-per-micro-batch", "50", "--context-parallel-size", "2", "--max-prompt-length", "36"))


def test_what_is_not_there_names_the_flag(files: Path) -> None:
    prompts = ["--prompt-data", str(files / "train.jsonl")]
    with pytest.raises(ValueError, match="--hf-path is required"):
        parse_arguments(prompts)
    with pytest.raises(ValueError, match="--prompt-data is missing"):
        parse_arguments(["--hf-path", str(files / "model")])
    gone, file = str(files / "gone"), str(files / "train.jsonl")
    assert f"--hf-path {gone}: no config.json there" in refused(files, "--hf-path", gone)
    assert f"--hf-path {file}: no config.json there" in refused(files, "--hf-path", file)
    assert f"--prompt-data {gone}: there is no such file" in refused(files, "--prompt-data", gone)
    assert f"--prompt-data {files}: there is no such file" in refused(files, "--prompt-data", str(files))
    assert f"--eval-data {gone}: there is no such file" in refused(files, "--eval-data", gone)
    for name in ("--save", "--load", "--run-dir", "--tensorboard-dir"):
        assert f"{name} {file}: is not a directory" in refused(files, name, file)
        parse(files, name, gone)  # made when it is needed


def test_a_bad_line_of_a_prompt_file_names_flag_file_and_line(files: Path) -> None:
    check_prompts(parse(files))
    bad = files / "bad.jsonl"
    bad.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+1="}\n')
    for name in ("--prompt-data", "--eval-data"):
        with pytest.raises(ValueError, match=rf'^{name}: {bad}, line 2: has no "answer"'):
            check_prompts(parse(files, name, str(bad)))


def test_the_command_line_wins_over_the_config_file(files: Path) -> None:
    text = (
        "lr: 1e-5\ntrain-iters: 40\nmax_staleness: 3\nbf16: true\n--clip-grad: 2\nmicro-batch-size: 4\n"
        "sequence_parallel: false\nrollout-engine: sglang\nsglang-urls: [http://a:1, http://b:1]\nsave: null\n"
    )
    settings = with_config(files, text, "--train-iters", "80", "--no-bf16")
    assert settings.optimizer.lr == 1e-5  # a text to YAML
    assert settings.run.train_iters == 80
    assert settings.model.bf16 is False
    assert settings.rollout.max_staleness == 3
    assert settings.optimizer.clip_grad == 2.0
    assert isinstance(settings.optimizer.clip_grad, float)
    assert settings.batch.micro_batch_size == 4
    assert settings.rollout.sglang_urls == ["http://a:1", "http://b:1"]
    assert settings.run.save is None
    one = with_config(files, "rollout-engine: sglang\nsglang-urls: http://a:1\nmicro-batch-size: null\n")
    assert one.rollout.sglang_urls == ["http://a:1"]
    assert one.batch.micro_batch_size is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("m2-treshold: 0.1", "unknown key m2-treshold; did you mean m2_threshold?"),
        ("config: other.yaml", "unknown key config"),
        ("train-iters: many", "train-iters: 'many' is not a int"),
        ("train-iters: 2.5", "train-iters: 2.5 is not a int"),
        ("train-iters: true", "train-iters: True is not a int"),
        ("train-iters: null", "train-iters: None is not a int"),
        ("train-iters: [1, 2]", "train-iters: [1, 2] is not a int"),
        ("lr: {peak: 1}", "is not a float"),
        ("bf16: 1", "bf16: 1 is not a bool"),
        ("bf16: 'true'", "bf16: 'true' is not a bool"),
        ("hf-path: null", "hf-path: None is not a str"),
        ("run-dir: 2024_01_01", "run-dir: 20240101 is not a str: write it in quotes"),
        ("reward: [a]", "reward: ['a'] is not a str"),
        ("sglang-urls: [1]", "sglang-urls: [1] is not a str"),
        ("lr-decay-style: steps", "lr-decay-style: 'steps' is not one of constant, linear, cosine"),
        ("lr: 1\nlr: 2", "lr is given twice"),
        ("max-staleness: 1\nmax_staleness: 2", "max_staleness is given twice"),
        ("- lr", "must be a mapping"),
        ("", "must be a mapping"),
        ("lr: [1", "cannot be read"),
    ],
)
def test_a_bad_config_file_names_the_file_and_the_key(files: Path, text: str, said: str) -> None:
    assert said in config_refused(files, text)


def test_a_config_value_is_checked_as_a_flag_is(files: Path) -> None:
    path = files / "run.yaml"
    path.write_text("m2-threshold: .nan\n")
    assert refused(files, "--config", str(path)).startswith("--m2-threshold nan")
    path.write_text("train-iters: 4.0\n")
    assert parse(files, "--config", str(path)).run.train_iters == 4
    path.write_bytes(b"reward: \xff\xfe\n")
    assert f"--config {path}: cannot be read" in refused(files, "--config", str(path))
    for gone in (files / "gone.yaml", files):
        assert f"--config {gone}: cannot be read" in refused(files, "--config", str(gone))


@pytest.mark.parametrize(
    ("layout", "ranks", "said"),
    [
        ({"tensor_model_parallel_size": 2}, 3, r"3 ranks cannot be divided by .* = 2; start a multiple of 2"),
        (
            {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
            2,
            r"--tensor-model-parallel-size x --pipeline-model-parallel-size x --context-parallel-size = 4",
        ),
        ({"tensor_model_parallel_size": 0}, 1, r"^--tensor-model-parallel-size 0: must be at least 1"),
        ({"pipeline_model_parallel_size": -1}, 1, r"^--pipeline-model-parallel-size -1: must be at least 1"),
        ({"context_parallel_size": 0}, 2, r"^--context-parallel-size 0: must be at least 1"),
        ({"context_parallel_size": 2}, 3, r"3 ranks cannot be divided by .* = 2"),
        ({"expert_model_parallel_size": 3}, 2, r"2 ranks of a pipeline stage .* --expert-model-parallel-size = 3"),
        ({"expert_tensor_parallel_size": 0}, 2, r"^--expert-tensor-parallel-size 0: must be at least 1"),
        ({"num_virtual_stages_per_pipeline_rank": 2}, 2, r"^--num-virtual-stages-per-pipeline-rank: needs --pipeline"),
        (
            {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
            4,
            r"^--expert-model-parallel-size: beside tensor parallelism it needs --sequence-parallel",
        ),
        ({"sequence_parallel": True}, 2, r"^--sequence-parallel: needs --tensor-model-parallel-size above 1"),
    ],
)
def test_a_layout_that_does_not_fit_the_ranks_names_the_flags(
    layout: dict[str, typing.Any], ranks: int, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        check_layout(ParallelSettings(**layout), ranks)


def test_layouts_that_fit_pass() -> None:
    check_layout(ParallelSettings(), 1)
    check_layout(ParallelSettings(tensor_model_parallel_size=2, sequence_parallel=True), 2)
    check_layout(ParallelSettings(tensor_model_parallel_size=2, pipeline_model_parallel_size=3), 12)
    check_layout(ParallelSettings(pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=3), 4)
    check_layout(ParallelSettings(context_parallel_size=2, expert_model_parallel_size=4), 4)
