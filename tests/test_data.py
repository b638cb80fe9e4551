"""Prompts in: sources, templates, filters, epochs."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny import BOS, write_jsonl
from transformers import AutoTokenizer

from dapo.config import DataConfig, SourceConfig
from dapo.data import Prompt, PromptStream, load_prompts
from dapo.errors import UserError
from dapo.sources import Row, open_source


@pytest.fixture(scope="module")
def plain(tiny_model_dir):
    return AutoTokenizer.from_pretrained(tiny_model_dir)


@pytest.fixture(scope="module")
def chat(tiny_chat_model_dir):
    return AutoTokenizer.from_pretrained(tiny_chat_model_dir)


@pytest.fixture
def load(tmp_path):
    """Prompts of rows by way of a JSONL file; keywords are keys of `data.train` or of `data`."""

    def run(rows, tokenizer, held_out=None, name="train", **settings):
        rows = [{"prompt": row, "answer": "1"} if isinstance(row, str) else row for row in rows]
        mine = {key: settings.pop(key) for key in list(settings) if key in SourceConfig.model_fields}
        source = SourceConfig(source=str(write_jsonl(tmp_path / f"{name}.jsonl", rows)), **mine)
        return load_prompts(name, source, DataConfig(train=source, **settings), tokenizer, held_out)

    return run


def texts(prompt_set) -> list[str]:
    return [prompt.text for prompt in prompt_set.prompts]


NESTED = [{"q": {"text": "1+1=", "id": 3}, "reward_model": {"ground_truth": "2"}}, {"q": {"text": "é ∑"}}]
NESTED[1] |= {"reward_model": {"ground_truth": 34}}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_columns_with_dots(tmp_path, suffix):
    path = tmp_path / f"data{suffix}"
    if suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in NESTED) + "\n\n", "utf-8")
    else:
        rows = [
            row | {"reward_model": {"ground_truth": str(row["reward_model"]["ground_truth"])}}
            for row in NESTED
        ]
        pq.write_table(pa.Table.from_pylist(rows), path)
    config = SourceConfig(source=str(path), prompt_column="q.text", answer_column="reward_model.ground_truth")
    rows = list(open_source(config).rows())
    assert [(row.question, row.answer) for row in rows] == [("1+1=", "2"), ("é ∑", "34")]
    assert rows[0].entry["q"]["id"] == 3


def test_messages_of_a_parquet_file_go_through_the_chat_template(tmp_path, chat):
    messages = [{"role": "system", "content": "Be {brief}."}, {"role": "user", "content": "1+1"}]
    pq.write_table(pa.Table.from_pylist([{"prompt": messages, "answer": "2"}]), tmp_path / "data.parquet")
    source = SourceConfig(source=str(tmp_path / "data.parquet"))
    config = DataConfig(train=source, prompt_template="Q: {prompt}")
    (prompt,) = load_prompts("train", source, config, chat).prompts
    assert prompt.text == "<bos>[system]Be {brief}.[user]1+1[assistant]"  # the template is for strings only
    assert chat.decode(prompt.ids) == prompt.text and prompt.ids.count(BOS) == 1


def test_braces_in_prompts_are_text(load, plain):
    rows = [r"\frac{1}{2} {prompt} {0} {", "%s {{x}}"]
    prompts = load(rows, plain, prompt_template="{Q} {prompt}\nA{{}}:")
    assert texts(prompts) == [
        r"{Q} \frac{1}{2} {prompt} {0} {" + "\nA{{}}:",
        "{Q} %s {{x}}\nA{{}}:",
    ]
    assert [plain.decode(prompt.ids) for prompt in prompts.prompts] == texts(prompts)


def test_t9_one_bos_whoever_writes_it(load, chat):
    """T9: the tokenizer adds one to plain text, the template writes its own."""
    (prompt,) = load(["1+1"], chat, prompt_template="Q {prompt}", chat_template=True).prompts
    assert prompt.text == "<bos>[user]Q 1+1[assistant]"
    assert prompt.ids[0] == BOS and prompt.ids.count(BOS) == 1 and chat.decode(prompt.ids) == prompt.text
    (prompt,) = load(["1+1"], chat, prompt_template="Q {prompt}").prompts
    assert prompt.text == "Q 1+1" and prompt.ids == [
        BOS,
        *chat("Q 1+1", add_special_tokens=False)["input_ids"],
    ]


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1"}]


@pytest.mark.parametrize(
    "chat_template, string, messages",
    [
        (None, "Q 2+2", "<bos>[system]Be brief.[user]1+1[assistant]"),
        (True, "<bos>[user]Q 2+2[assistant]", "<bos>[system]Be brief.[user]1+1[assistant]"),
        (False, "Q 2+2", "Be brief.\n\n1+1"),
    ],
)
def test_chat_template_for_strings_and_messages(load, chat, chat_template, string, messages):
    rows = [{"prompt": prompt, "answer": ""} for prompt in ("2+2", MESSAGES)]
    loaded = load(rows, chat, prompt_template="Q {prompt}", chat_template=chat_template)
    assert texts(loaded) == [string, messages]
    for prompt in loaded.prompts:
        assert prompt.ids[0] == BOS and prompt.ids.count(BOS) == 1
        assert chat.decode(prompt.ids).removeprefix("<bos>") == prompt.text.removeprefix("<bos>")


def test_messages_without_a_chat_template(load, plain, chat, monkeypatch):
    rows = [{"prompt": MESSAGES, "answer": ""}]
    for choice in (None, True):
        with pytest.raises(UserError, match=r"has no chat template: set data\.chat_template=false"):
            load(rows, plain, chat_template=choice)
    (prompt,) = load(rows, plain, chat_template=False).prompts
    assert prompt.ids == plain("Be brief.\n\n1+1")["input_ids"]
    parts = [{"role": "user", "content": [{"type": "text", "text": "1+1"}]}]
    with pytest.raises(UserError, match=r"chat_template=false needs messages whose content is a string"):
        load([{"prompt": parts, "answer": ""}], plain, chat_template=False)
    monkeypatch.setattr(chat, "chat_template", "{{ raise_exception('no system role') }}")
    with pytest.raises(UserError, match=r"chat template refuses the messages .*: no system role"):
        load(rows, chat)


def test_t10_too_long_is_dropped_and_counted_never_cut(load, plain):
    """T10: the limit itself still fits, and counts tokens of the rendered prompt."""
    rows = ["1", "1" * 7, "1" * 5, "1" * 6, "1" * 50]
    prompts = load(rows, plain, prompt_template="{prompt}=", max_prompt_length=7)
    assert texts(prompts) == ["1=", "11111=", "111111="]
    assert [len(prompt.ids) for prompt in prompts.prompts] == [2, 6, 7]
    assert prompts.dropped == {"too long": 2}
    with pytest.raises(UserError, match=r"2 prompts are longer than .*the shortest has 4"):
        load(["111", "1111"], plain, prompt_template="{prompt}=", max_prompt_length=3)


def test_duplicates(load, plain):
    rows = ["a", "b", "a", "a", "c", "b"]
    prompts = load(rows, plain)
    assert texts(prompts) == ["a", "b", "c"] and prompts.dropped == {"duplicate": 3}
    assert [prompt.index for prompt in prompts.prompts] == [0, 1, 4]  # the first of each
    everything = load(rows, plain, deduplicate=False)
    assert texts(everything) == rows and not everything.dropped


def test_held_out_prompts_are_excluded(load, plain):
    held_out = load(["b", "x"], plain, name="eval")
    prompts = load(["a", "b", "c", "b", "c"], plain, held_out)
    assert texts(prompts) == ["a", "c"]
    assert prompts.dropped == {"duplicate": 1, "held out": 2}
    again = load(["b", "a"], plain, held_out, deduplicate=False, prompt_template="Q {prompt}")
    assert texts(again) == ["Q b", "Q a"]  # what counts is the text the model sees


def test_copies_that_disagree_are_told(load, plain):
    rows = [
        {"prompt": p, "answer": a}
        for p, a in (("a", "1"), ("a", "2"), ("b", "1/2"), ("a", "3"), ("b", "0.5"))
    ]
    prompts = load(rows, plain, name="eval")
    assert prompts.describe() == "2 prompts (left out: 3 duplicates); 1 prompt with conflicting answers"
    assert load(rows, plain, deduplicate=False).describe() == "5 prompts; 1 prompt with conflicting answers"
    assert load(rows[2:3], plain).describe() == "1 prompt"


def test_empty_prompts_are_to_be_dropped_and_empty_answers_are_not(load, plain):
    with pytest.raises(
        UserError, match=r"row 2 holds an empty prompt; `dapo data prepare FILE OUT` writes the"
    ):
        load(["a", ""], plain)
    assert [prompt.row.answer for prompt in load([{"prompt": "a", "answer": ""}], plain).prompts] == [""]


def test_limit_counts_kept_prompts(load, plain):
    held_out = load(["h"], plain, name="eval")
    rows = ["too long", "a", "a", "h", "b", "c", "too long too"]
    prompts = load(rows, plain, held_out, limit=2, max_prompt_length=4)
    assert texts(prompts) == ["a", "b"]
    assert prompts.dropped == {"duplicate": 1, "held out": 1, "too long": 1}
    assert prompts.describe() == "2 prompts (left out: 1 duplicate, 1 held out, 1 too long)"
    assert texts(load(rows, plain, held_out, limit=9, max_prompt_length=4)) == ["a", "b", "c"]


def test_epochs_are_permutations_that_differ_and_repeat_with_the_seed():
    prompts = [Prompt(i, str(i), [i], Row(str(i), "", {})) for i in range(20)]

    def epochs(seed: int, take: int) -> list[list[int]]:
        stream = PromptStream(prompts, seed)
        served = [prompt.index for _ in range(60 // take) for prompt in stream.take(take)]
        assert stream.epoch == 2  # the last of epoch 2 was served, epoch 3 not begun
        return [served[:20], served[20:40], served[40:]]

    first = epochs(seed=5, take=4)
    assert all(sorted(epoch) == list(range(20)) for epoch in first)
    assert first == epochs(seed=5, take=12) == epochs(seed=5, take=30)  # whatever the step
    orders = first + epochs(seed=6, take=4) + [list(range(20))]
    assert all(a != b for a, b in itertools.combinations(orders, 2))


def prompts_of(count: int, word: str = "p") -> list[Prompt]:
    return [Prompt(i, f"{word}{i}", [i, 7], Row("", "", {})) for i in range(count)]


@pytest.mark.parametrize("served", [0, 1, 7, 19, 20, 21, 33, 40, 59])
def test_stream_goes_on_where_it_stopped(served):
    """20 prompts an epoch: stops before the first, within an epoch, at its end and after it."""
    whole = PromptStream(prompts_of(20), seed=5)
    whole.take(served)
    state = json.loads(json.dumps(whole.state_dict()))
    assert whole.state_dict() == state  # plain values
    again = PromptStream(prompts_of(20), seed=5)
    again.take(3)  # wherever it stands
    again.load_state_dict(state)
    assert (again.epoch, again.position) == (whole.epoch, whole.position)
    for _ in range(20):  # three epochs, in batches that do not divide them
        assert again.take(3) == whole.take(3)
        assert again.epoch == whole.epoch and again.state_dict() == whole.state_dict()
    assert again.epoch == (served + 60 - 1) // 20


@pytest.mark.parametrize(
    "other, complaint",
    [
        (
            PromptStream(prompts_of(4), seed=6),
            "the seed of the data order differs from the saved run's: 6 there, 5",
        ),
        (
            PromptStream(prompts_of(5), seed=5),
            "the number of training prompts differs from the saved run's: 5 there, 4",
        ),
        (PromptStream(prompts_of(4, "q"), seed=5), "the text of the training prompts differs"),
        (PromptStream(prompts_of(4)[::-1], seed=5), "the text of the training prompts differs"),
    ],
)
def test_stream_of_other_prompts_is_refused(other, complaint):
    stream = PromptStream(prompts_of(4), seed=5)
    stream.take(6)
    before = stream.state_dict()
    with pytest.raises(UserError, match=complaint):
        stream.load_state_dict(other.state_dict())
    assert stream.state_dict() == before


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"position": 5}, "has position 5 of 4 prompts"),
        ({"position": -1}, "has position -1 of 4 prompts"),
        ({"seed": ...}, "lacks seed"),
    ],
)
def test_damaged_state_is_refused(change, complaint):
    stream = PromptStream(prompts_of(4), seed=5)
    state = {key: value for key, value in (stream.state_dict() | change).items() if value is not ...}
    with pytest.raises(UserError, match=complaint):
        stream.load_state_dict(state)


def test_reasoning_gym_options_and_their_seed():
    task = {"min_terms": 2, "max_terms": 2, "operators": ["+"], "allow_parentheses": False, "size": 4}

    def questions(**more) -> list[str]:
        source = SourceConfig(source="reasoning_gym:basic_arithmetic", task=task | more)
        return [row.question for row in open_source(source).rows()]

    assert len(questions()) == 4 and all(question.count("+") == 1 for question in questions())
    assert questions() == questions(seed=0) != questions(seed=1)  # no seed is not a random one


def test_aime(request, chat):
    path = request.config.rootpath / Path("../shared/data/aime-2024.parquet")
    if not path.is_file():
        pytest.skip("needs ../shared/data/aime-2024.parquet")
    source = SourceConfig(source=str(path), answer_column="reward_model.ground_truth")
    prompts = load_prompts("train", source, DataConfig(train=source), chat)
    assert len(prompts.prompts) == 30 and prompts.dropped == {"duplicate": 930}
    answers = [int(prompt.row.answer) for prompt in prompts.prompts]
    assert len(set(answers)) > 25 and all(0 <= answer <= 999 for answer in answers)
    assert all(prompt.text.startswith("<bos>[user]Solve the following math") for prompt in prompts.prompts)
    assert all(prompt.ids.count(BOS) == 1 for prompt in prompts.prompts)


@pytest.mark.parametrize(
    "row, complaint",
    [
        ({"prompt": ["a"], "answer": "1"}, "list of {role, content} messages"),
        ({"prompt": [], "answer": "1"}, "list of {role, content} messages"),
        ({"prompt": [{"role": "user"}], "answer": "1"}, "list of {role, content} messages"),
        (
            {"prompt": "a", "answer": None},
            "answer is null; `dapo data prepare FILE OUT` writes the data without",
        ),
        (
            {"prompt": None, "answer": "1"},
            "messages, got None; `dapo data prepare FILE OUT` writes",
        ),
    ],
)
def test_rows_that_cannot_be_used(tmp_path, row, complaint):
    path = write_jsonl(tmp_path / "rows.jsonl", [row])
    with pytest.raises(UserError, match=re.escape(complaint)):
        list(open_source(SourceConfig(source=str(path))).rows())


def test_answers_of_a_number_column(tmp_path):
    path = write_jsonl(
        tmp_path / "rows.jsonl", [{"prompt": "a", "answer": 34.0}, {"prompt": "b", "answer": 0.5}]
    )
    assert [row.answer for row in open_source(SourceConfig(source=str(path))).rows()] == ["34", "0.5"]
