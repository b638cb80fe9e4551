"""Configuration: defaults, YAML 1.2, overrides, and errors that name the key and the way out."""

from __future__ import annotations

import pytest

from dapo.config import load_config, save_config
from dapo.errors import UserError

MINIMAL = "run_dir: r\nmodel: {path: m}\ndata: {train: {source: d.jsonl}}\ntrain: {steps: 1}\n"


def write(folder, text: str):
    path = folder / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def load(tmp_path):
    """Loads MINIMAL and more YAML under overrides."""
    return lambda *overrides, more="": load_config(write(tmp_path, MINIMAL + more), list(overrides))


@pytest.fixture
def refused(load):
    """The message of an error, checked to be one line that says which file it is about."""

    def message(*overrides, more="") -> str:
        with pytest.raises(UserError) as caught:
            load(*overrides, more=more)
        text = str(caught.value)
        assert "\n" not in text
        return text

    return message


def test_defaults_are_the_papers(load):
    config = load()
    assert (config.run_dir, config.seed, config.model.dtype) == ("r", 0, "float32")
    assert (config.data.prompt_template, config.data.eval) == ("{prompt}", None)
    assert (config.data.train.prompt_column, config.data.train.answer_column) == ("prompt", "answer")
    assert config.reward.model_dump() == {
        **{"mode": None, "answer_pattern": None, "correct": 1.0, "wrong": -1.0},
        **{"time_limit": 5.0, "memory_limit_mb": 1024, "workers": None, "terms": {}},
    }
    rollout, algorithm, optimizer = config.rollout, config.algorithm, config.optimizer
    assert (rollout.prompts_per_step, rollout.group_size, rollout.temperature) == (512, 16, 1.0)
    assert (rollout.max_response_length, algorithm.overlong_cache_length) == (20480, 4096)
    assert (algorithm.epsilon_low, algorithm.epsilon_high, algorithm.dual_clip) == (0.2, 0.28, None)
    assert (optimizer.learning_rate, optimizer.weight_decay, optimizer.warmup_steps) == (1e-6, 0.1, 20)
    assert (config.eval.samples_per_prompt, config.eval.top_p) == (32, 0.7)
    four = ("clip_higher", "dynamic_sampling", "token_level_loss", "soft_overlong_punishment")
    assert all(getattr(algorithm, name) is True for name in four)


def test_batch_sizes_fall_back_on_prompts_per_step(load):
    config = load("rollout.prompts_per_step=24")
    assert (config.mini_batch_prompts, config.prompts_per_generation) == (24, 24)
    config = load(
        "rollout.prompts_per_step=24", "train.mini_batch_prompts=8", "rollout.prompts_per_generation=7"
    )
    assert (config.mini_batch_prompts, config.prompts_per_generation) == (8, 7)


@pytest.mark.parametrize("text, value", [("1e-5", 1e-5), ("1.0e-5", 1e-5), ("3E-4", 3e-4), ("1", 1.0)])
def test_numbers_are_yaml_1_2(load, text, value):
    from_file = load(more=f"optimizer: {{learning_rate: {text}}}\n").optimizer.learning_rate
    from_override = load(f"optimizer.learning_rate={text}").optimizer.learning_rate
    assert from_file == from_override == value
    assert type(from_file) is type(from_override) is float


@pytest.mark.parametrize("word", ["on", "off", "yes", "no", "y", "n", "1:30"])
def test_words_are_strings(load, refused, word):
    assert load(f"run_dir={word}").run_dir == word
    assert load(f"data.train.task.operators=[{word}]").data.train.task == {"operators": [word]}
    assert f"algorithm.clip_higher: input should be a valid boolean, got '{word}' (str)" in refused(
        f"algorithm.clip_higher={word}"
    )


def test_every_form_of_override(load):
    config = load(
        "seed=7",
        "run_dir=a=b",  # only the first = separates
        "algorithm.clip_higher=false",
        "algorithm.dual_clip=10",
        "data.train.limit=null",
        "data.train.task.min_terms=2",
        "data.train.task.operators=['+', '-']",
        "data.eval.source=held_out.jsonl",  # a section the file lacks
        "reward={answer_pattern: '\\d+', wrong: 0}",  # a section at once
        "reward.correct=2",  # on top of it
        r"data.prompt_template='Q: {prompt}'",
        "rollout.group_size=4",
        "rollout.group_size=8",  # the last one counts
        "algorithm.overlong_cache_length=",  # nothing is null, so the next one must replace it
        "algorithm.overlong_cache_length=5",
        more="seed: 3\nreward: {correct: 5, wrong: 5}\nalgorithm: {clip_higher: true, epsilon_low: 0.1}\n",
    )
    assert (config.seed, config.run_dir) == (7, "a=b")
    assert (config.algorithm.clip_higher, config.algorithm.epsilon_low) == (False, 0.1)
    assert (config.algorithm.dual_clip, config.algorithm.overlong_cache_length) == (10.0, 5)
    assert config.data.train.task == {"min_terms": 2, "operators": ["+", "-"]}
    assert (config.data.train.limit, config.data.eval.source) == (None, "held_out.jsonl")
    reward = config.reward
    assert (reward.answer_pattern, reward.correct, reward.wrong) == (r"\d+", 2.0, 0.0)
    assert (config.data.prompt_template, config.rollout.group_size) == ("Q: {prompt}", 8)


@pytest.mark.parametrize(
    "override, expected",
    [
        ("seed", "override 'seed' must be section.key=value"),
        ("=3", "override '=3' must be section.key=value"),
        ("seed.deep=3", "override 'seed.deep=3': seed is not a section"),
        ("seed=[1", "override 'seed=[1' is not valid YAML"),
    ],
)
def test_malformed_overrides(refused, override, expected):
    assert expected in refused("seed=1", override)


@pytest.mark.parametrize(
    "key, nearest",
    [
        ("sede", "seed"),
        ("alogrithm", "algorithm"),
        ("rollout.group_sise", "rollout.group_size"),
        ("algorithm.epsilon_hi", "algorithm.epsilon_high"),
        ("data.train.sorce", "data.train.source"),
        ("data.eval.answer_colum", "data.eval.answer_column"),
        ("learning_rate", "optimizer.learning_rate"),
        ("train.learning_rate", "optimizer.learning_rate"),
        ("rollout.samples_per_prompt", "eval.samples_per_prompt"),
    ],
)
def test_unknown_key_names_the_nearest(refused, key, nearest):
    assert f"unknown key {key}; did you mean {nearest}?" in refused(f"{key}=1", "data.eval.source=e.jsonl")


def test_override_below_a_section_that_is_null(load):
    assert load("data.eval=null", "data.eval.source=e.jsonl").data.eval.source == "e.jsonl"


@pytest.mark.parametrize("override", ["reward.correct=.nan", "reward.wrong=-.inf"])
def test_rewards_are_finite(refused, override):
    assert override.split("=")[0] in refused(override)


@pytest.mark.parametrize("key, nearest", [("rollout.seed", "seed"), ("rollout.path", "model.path")])
def test_right_key_in_the_wrong_section(refused, key, nearest):
    assert f"unknown key {key}; did you mean {nearest}?" in refused(f"{key}=1")


def test_hopeless_key_lists_what_is_allowed(refused):
    assert "unknown key zzz; allowed here: run_dir, seed, model, lora, data, reward" in refused("zzz=1")


def test_misspelt_section_in_the_file(tmp_path):
    path = write(tmp_path, MINIMAL.replace("train: {steps", "trainn: {steps"))
    with pytest.raises(UserError) as caught:
        load_config(path)
    assert str(caught.value) == f"{path}: train is required; unknown key trainn; did you mean train?"


@pytest.mark.parametrize(
    "override, expected",
    [
        ("model.path=1", "model.path: input should be a valid string, got 1 (int)"),
        ("seed=true", "seed: input should be a valid integer, got True (bool)"),
        ("seed=-1", "seed: input should be greater than or equal to 0, got -1 (int)"),
        ("train.steps='5'", "train.steps: input should be a valid integer, got '5' (str)"),
        ("train.steps=5.0", "train.steps: input should be a valid integer, got 5.0 (float)"),
        (
            "optimizer.learning_rate=high",
            "optimizer.learning_rate: input should be a valid number, got 'high'",
        ),
        ("optimizer.learning_rate=0", "optimizer.learning_rate: input should be greater than 0"),
        ("optimizer.beta1=1.0", "optimizer.beta1: input should be less than 1"),
        ("optimizer.weight_decay=.inf", "optimizer.weight_decay: input should be a finite number"),
        ("algorithm.clip_higher=1", "algorithm.clip_higher: input should be a valid boolean, got 1 (int)"),
        ("model.dtype=fp16", "model.dtype: input should be 'float32' or 'bfloat16', got 'fp16' (str)"),
        ("rollout.group_size=1", "rollout.group_size: input should be greater than or equal to 2"),
        ("rollout.temperature=0", "rollout.temperature: input should be greater than 0"),
        ("data.train.task=[1]", "data.train.task: input should be a valid dictionary, got [1] (list)"),
        ("train=null", "train: input should be a valid dictionary"),
    ],
)
def test_wrong_type_or_range(refused, override, expected):
    assert expected in refused(override)


@pytest.mark.parametrize(
    "overrides, expected",
    [
        (
            ["rollout.prompts_per_step=10", "train.mini_batch_prompts=4"],
            "train.mini_batch_prompts (4) must divide rollout.prompts_per_step (10)",
        ),
        (
            ["rollout.max_response_length=10", "algorithm.overlong_cache_length=10"],
            "algorithm.overlong_cache_length (10) must be under rollout.max_response_length (10)",
        ),
        (
            ["train.offload_activations=true"],
            "train.offload_activations takes train.gradient_checkpointing: set that to true",
        ),
        (
            ["algorithm.dual_clip=1.27"],
            "algorithm.dual_clip must be null or at least 1 + epsilon_high, got 1.27",
        ),
        (["data.prompt_template=Solve"], "data.prompt_template must contain {prompt}, got 'Solve'"),
    ],
)
def test_sections_that_do_not_fit(refused, overrides, expected):
    assert refused(*overrides).endswith(f"config.yaml: {expected}")


def test_sections_that_just_fit(load):
    load("rollout.prompts_per_step=10", "train.mini_batch_prompts=5")
    load("rollout.max_response_length=10", "algorithm.overlong_cache_length=9")
    load("rollout.max_response_length=10", "algorithm.soft_overlong_punishment=false")
    load("algorithm.dual_clip=1.28")


def test_all_errors_at_once_on_one_line(refused):
    message = refused("seed=x", "rollout.group_sise=4", "train.steps=0", r'model.path=["a\nb"]')
    for part in ("seed: input", "unknown key rollout.group_sise", "train.steps: input", "model.path: input"):
        assert message.count(part) == 1


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", "must hold sections such as `model:`, got NoneType"),
        ("- a\n", "must hold sections such as `model:`, got list"),
        ("model: [\nb: {\n", "is not valid YAML"),
        ("seed: 1\nseed: 2\n", "is not valid YAML"),
        ("{}", "run_dir is required; model is required; data is required; train is required"),
    ],
)
def test_files_that_are_no_configuration(tmp_path, text, expected):
    path = write(tmp_path, text)
    with pytest.raises(UserError) as caught:
        load_config(path)
    assert expected in str(caught.value) and str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_saved_configuration_loads_to_the_same(load, tmp_path):
    texts = ["1e-5", "on", "null", "~", "Q: {prompt}\n\tA:", "π ≤ 4 \\d", " # no comment ", "'", '"', ""]
    config = load(
        "optimizer.learning_rate=1e-7",
        "algorithm.dual_clip=3",
        "data.eval={source: e.parquet, answer_column: a.b, limit: 3}",
        more="reward: {answer_pattern: '\\b(-?\\d+)\\s*$'}\n",
    )
    task = {"texts": texts, "nested": {"on": True, "none": None, "x": 1e-05, "n": -3}}
    data = config.data.model_copy(
        update={"prompt_template": texts[4], "train": config.data.train.model_copy(update={"task": task})}
    )
    config = config.model_copy(update={"data": data})
    save_config(config, tmp_path / "saved.yaml")
    loaded = load_config(tmp_path / "saved.yaml")
    assert loaded == config
    assert loaded.data.train.task == task and loaded.optimizer.learning_rate == 1e-7
    save_config(loaded, tmp_path / "again.yaml")
    assert (tmp_path / "again.yaml").read_bytes() == (tmp_path / "saved.yaml").read_bytes()


def test_quickstart_configuration_is_valid(request):
    path = request.config.rootpath / "configs" / "quickstart.yaml"
    config = load_config(path)
    train, held_out = config.data.train.task, config.data.eval.task
    assert held_out == train | {"seed": 1000000, "size": 200}  # the same task under another seed
    assert config.optimizer.learning_rate == 1e-5


@pytest.mark.parametrize("key", ["top_p=0.9", "top_k=50", "min_p=0.1", "repetition_penalty=1.1"])
def test_t11_training_samples_from_the_whole_distribution(refused, key: str) -> None:
    """Log-probs would be of another distribution than the one that is trained."""
    message = refused(f"rollout.{key}")
    assert f"unknown key rollout.{key.partition('=')[0]}" in message
