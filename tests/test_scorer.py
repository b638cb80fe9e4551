"""The scorer of a run: modes, patterns, custom functions and terms, and that nothing a response does stops
it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dapo.config import RewardConfig, SourceConfig
from dapo.data import Prompt
from dapo.errors import UserError
from dapo.rewards import Scorer, Verdict, verify
from dapo.rewards.scorer import contains_answer
from dapo.sources import Row, open_source

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))


class Records:
    """A source that is a file as far as a scorer can tell."""

    default_mode = "math"

    def judged_row(self, row: Row) -> dict:
        return row.entry


@pytest.fixture
def make():
    scorers = []

    def build(source=None, **reward) -> Scorer:
        reward = {"workers": 2, "time_limit": 2.0} | reward
        scorers.append(Scorer(RewardConfig.model_validate(reward), source or Records()))
        return scorers[-1]

    yield build
    for scorer in scorers:
        scorer.close()


def prompt(answer: str = "34", **entry) -> Prompt:
    return Prompt(7, "q", [3], Row("q", answer, entry))


@pytest.mark.parametrize(
    "pattern, response, correct",
    [
        (None, " 34\n", True),
        (None, "Answer: 34", False),
        (r"-?\d+", "12 and then 34.", True),
        (r"-?\d+", "34 and then 12", False),  # the last one counts
        (r"-?\d+", "-34", False),
        (r"-?\d+", "none", False),
        (r"Answer: (\d+)", "Answer: 12\nAnswer: 34\n35", True),  # group 1, not the match
        (r"(\d+) of (\d+)", "34 of 99", True),  # the first group
        (r"(?:a(\d))|b", "b", False),  # a group that took no part is an empty answer
        (r"(?s)<a>(.*?)</a>", "<a>1</a><a>\n34\n</a>", True),
    ],
)
def test_answer_is_the_last_match(make, pattern, response, correct):
    verdict = make(mode="exact", answer_pattern=pattern)(response, prompt())
    assert verdict.correct is correct and not verdict.failed


def test_a_pattern_hands_its_match_to_any_mode(make):
    scorer = make(answer_pattern=r"(?s)<final>(.*)</final>")
    assert scorer("35 <final>x = 34.0</final> 36", prompt()).correct
    assert not scorer("Answer: 34", prompt()).correct


def test_a_catastrophic_pattern_is_cut_short(make, caplog):
    scorer = make(answer_pattern=r"(a+)+$")
    started = time.monotonic()
    verdict = scorer("a" * 60 + "b", prompt())
    assert verdict == Verdict(False, failure="no verdict within 2 s") and time.monotonic() - started < 4
    assert scorer("34 a", prompt("a")).correct
    assert f"prompt 7, response '{'a' * 60}b': no verdict within 2 s" in caplog.text


def test_a_task_is_judged_by_its_own_scorer(make):
    """reasoning_gym gives 0.01 for a wrong number, and more for text that contains the right one."""
    source = open_source(
        SourceConfig(source="reasoning_gym:basic_arithmetic", task={"size": 3, "max_terms": 2, "seed": 4})
    )
    rows = list(source.rows())
    scorer = make(source)
    for index, row in enumerate(rows):
        asked = Prompt(index, row.question, [3], row)
        assert scorer(row.answer, asked).correct and scorer(row.answer, asked).answer == row.answer
        assert not scorer(f"It is {row.answer}, I think", asked).correct


def test_a_task_scorer_that_hangs_is_wrong(make, caplog):
    """countdown evaluates the response."""
    source = open_source(SourceConfig(source="reasoning_gym:countdown", task={"size": 1, "seed": 1}))
    (row,) = source.rows()
    scorer, asked = make(source), Prompt(0, row.question, [3], row)
    tower = scorer.submit("9**9**9**9", asked)
    assert scorer(row.answer, asked).correct
    assert tower.result(timeout=10) == Verdict(False, failure="no verdict within 2 s")
    assert scorer(row.answer, asked).correct


def test_custom_functions(make):
    assert make(mode="reward_functions:behave")("34", prompt()).correct
    assert not make(mode="reward_functions:behave")("35", prompt()).correct
    assert make(mode="reward_functions:patient")("0.01", prompt("0.01")).correct  # async
    assert make(mode="reward_functions:has_level")("3", prompt(level=3)).correct  # sees the row
    assert verify("34", "34", "reward_functions:behave")
    verdict = make(mode="reward_functions:behave")("text", prompt())
    assert verdict.failure == "returned a str; it must be a bool or a number"
    verdict = make(mode="reward_functions:behave")("half", prompt())
    assert not verdict.correct and not verdict.failed  # right is 1, no less


def test_registered_functions():
    import reward_functions  # noqa: F401  registers "even"

    assert verify("34", "", "even") and not verify("35", "", "even")
    from dapo.rewards import register_mode

    with pytest.raises(ValueError, match="'even' is taken by reward_functions:even"):
        register_mode("even")(len)
    with pytest.raises(ValueError, match="must be a function of a module"):
        register_mode("local")(lambda response, answer: True)


@pytest.mark.parametrize("deed", ["hang", "crash", "raise", "devour"])
def test_t14_what_cannot_be_judged_is_wrong_and_logged(make, caplog, deed):
    scorer = make(mode="reward_functions:behave")
    verdict = scorer(deed, prompt(deed))
    assert not verdict.correct and verdict.failed
    assert f"no verdict on prompt 7, response '{deed}': {verdict.failure}" in caplog.text
    assert scorer("34", prompt()) == Verdict(True, answer="34")


def test_rows_choose_their_mode(make):
    scorer = make(mode="data_source")
    assert scorer("#### 34\nAnswer: 35", prompt(data_source="gsm8k")).correct
    assert scorer("#### 34\nAnswer: 35", prompt("35", data_source="math")).correct
    assert scorer("Answer: 3,4", prompt(data_source="math_dapo")).correct
    assert scorer("#### 34", prompt(data_source="openai/gsm8k")).correct
    assert scorer("1", prompt(data_source="reward_functions:has_level", level=1)).correct
    scorer.check_rows([prompt(data_source="math"), prompt(data_source="reward_functions:behave")])
    for entry, complaint in [
        ({"data_source": "maths"}, "row 8: data_source: no reward mode 'maths'; there are .*exact, gsm8k"),
        ({"data_source": None}, "row 8: data_source: mode must be a string, got None"),
        ({}, "needs a column of that name; row 8 has none"),
        ({"data_source": "nowhere:fn"}, "row 8: data_source: .*No module named 'nowhere'"),
    ]:
        with pytest.raises(UserError, match=complaint):
            scorer.check_rows([prompt(**entry)])


@pytest.mark.parametrize(
    "reward, complaint",
    [
        ({"mode": "maths"}, "reward.mode: no reward mode 'maths'; there are .*exact, gsm8k, math, math_dapo"),
        ({"mode": "nowhere:fn"}, "reward.mode: .*No module named 'nowhere'"),
        ({"answer_pattern": "("}, r"reward.answer_pattern '\(' is not a valid pattern"),
        (
            {"terms": {"x": {"function": "nowhere:fn"}}},
            "reward.terms.x.function: .*No module named 'nowhere'",
        ),
        (
            {"terms": {"x": {"function": "len"}}},
            "reward.terms.x.function: 'len' must be package.module:function",
        ),
    ],
)
def test_what_cannot_work_is_said_at_once(make, reward, complaint):
    with pytest.raises(UserError, match=complaint):
        make(**reward)


def test_terms_are_kept_apart(make, caplog):
    terms = {
        "brevity": {"function": "reward_functions:brevity", "weight": 0.5},
        "bonus": {"function": "reward_functions:waits"},
    }
    scorer = make(terms=terms)
    verdict = scorer("Answer: 34", prompt(bonus=2))
    assert verdict.correct and verdict.terms == {"brevity": -1.0, "bonus": 2.0} and not verdict.failed
    verdict = scorer("raise", prompt(bonus="nan"))
    assert not verdict.correct and verdict.terms == {"brevity": 0.0, "bonus": 0.0}
    assert verdict.failure == "reward term brevity: RuntimeError: no brevity" and "no brevity" in caplog.text


@pytest.mark.parametrize(
    "response, answer, found",
    [
        ("34", "34", True),
        ("it is 34.", "34", True),
        ("34 = 34.", " 34\n", True),
        ("134", "34", False),
        ("345", "34", False),
        ("34.5", "34", False),
        ("34,000", "34", False),
        ("1.34", "34", False),
        ("-34", "34", False),
        ("−34", "34", False),
        ("x34 34x _34", "34", False),
        ("cats", "cat", False),
        (r"\frac{1}{2}!", r"\frac{1}{2}", True),
        ("1 2", "1.2", False),
        ("", "34", False),
    ],
)
def test_contains_answer_as_a_word_of_its_own(response, answer, found):
    assert contains_answer(response, answer) is found


def test_a_function_of_the_wrong_shape_is_refused_at_once(make):
    with pytest.raises(
        UserError, match=r"reward.mode: 'reward_functions:one_argument' must take \(response, ans"
    ):
        make(mode="reward_functions:one_argument")
    assert make(mode="reward_functions:generous")("34", prompt()).correct


def test_failures_are_logged_a_few_times_then_counted(make, caplog):
    scorer = make(mode="reward_functions:behave")
    for _ in range(12):
        scorer("raise", prompt())
    assert [message.split(",")[0] for message in caplog.messages] == [
        *["no verdict on prompt 7"] * 5,
        "no verdict on 10 responses so far",
    ]
    assert scorer.failures == 12
