"""Verdicts: what a careful person would say of a response, and the released scorer's opinion for
reproduction."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from fractions import Fraction
from pathlib import Path

import pytest
import verdict_cases

from dapo.rewards import answer_key, mode_names, verify
from dapo.rewards.math_mode import quick
from dapo.rewards.numbers import exact_value

# Gold answer, response, verdict.
FINAL_ANSWER = [
    ("34", "Answer: 34", True),
    ("34", "Answer: 34.", True),
    ("34", "**Answer:** 34", True),
    ("34", "**Answer**: 34", True),
    ("34", "answer : 34", True),
    ("34", "Answer: **34**", True),
    ("34", "Answer: `34`", True),
    ("34", r"Answer: \(34\)", True),
    ("34", "Answer: $34$", True),
    ("34", "Answer: $34", True),
    ("34", "Answer: 34?", True),
    ("34", r"\boxed{34}", True),
    ("34", r"So $m+n = \boxed{34}$.", True),
    ("34", r"\fbox{34}", True),
    ("34", "\\boxed{35}, but no:\nso it is \\boxed{34}", True),
    ("34", r"Answer: $\boxed{34}$", True),
    ("34", "Answer: 34<|im_end|>", True),
    ("34", "Answer: 34<|im_end|>\n<|im_start|>user\nAnswer: 35", True),
    ("34", "Answer: 34</s>", True),
    ("34", "Answer: 34\n" + "x" * 330, True),
    ("34", "Answer: 34. " + "And so on. " * 30, True),
    ("34", "Answer: 34\n\nI hope that the answer is clear.", True),
    ("34", "Answer:\n34", True),
    ("34", "Answer:\n\\[\n34\n\\]", True),
    ("34", "### Final Answer\n\n34", True),
    ("34", "**Final Answer**\n$$34$$", True),
    ("34", "<think>Answer: 35</think>\nAnswer: 34", True),
    ("34", "<answer> 34 </answer>", True),
    ("34", "The answer is 34.", True),
    ("34", "Hence the answer to the problem is $34$, since it is even.", True),
    ("34", "Answer: 35\nAnswer: 34", True),
    ("34", "Answer: 34\nAnswer: 35", False),
    ("34", "<|im_end|>Answer: 34", False),
    ("34", "34", True),
    ("34", "17 + 17\n#### 34", True),
    ("34", "34 things", False),
    ("34", "I do not know", False),
    ("34", "I see 34 of them but cannot say", False),
    ("34", "", False),
    ("34", "Answer:", False),
    ("34", "Answer: ?", False),
    ("34", r"\boxed{}", False),
    ("34", r"\boxed{34", False),
    ("", "Answer: 34", False),
    ("", "", False),
]
ONE_ANSWER = [
    ("34", "Answer: 34 or 35", False),
    ("34", "Answer: 34 or maybe 35", False),
    ("34", "Answer: 34, or 35", False),
    ("34", "Answer: either 34 or 35", False),
    ("34", "Answer: 34 and 35", False),
    ("34", "Answer: 34, 35", False),
    ("34", "Answer: 34; 35", False),
    ("34", "Answer: 34 35", False),
    ("34", "Answer: 34 ± 1", False),
    ("34", "Answer: $34$ or $35$", False),
    ("34", "Answer: 34\nor 35", False),
    ("34", r"\boxed{34} or \boxed{35}", False),
    ("34", r"\boxed{34}, \boxed{35}", False),
    ("34", r"\boxed{34} or 35", False),
    ("34", r"\boxed{34 \text{ or } 35}", False),
    ("34", r"Answer: \{34, 35\}", False),
    ("34", "Answer: 35 = 34", False),
    ("34", "Answer: 34 = 35", False),
    ("34", "Answer: not 34", False),
    ("34", "Answer: more than 34", False),
    ("34", "Answer: 34 million", False),
    ("34", "Answer: -34", False),
    ("34", "Answer: 34 - 5", False),
    ("34", "Answer: 34x", False),
    ("34", "Answer: 34!", False),
    ("34", r"Answer: \sum_{k=1}^{34} 1", False),
    ("34", "Answer: x = 34", True),
    ("34", r"Answer: $m + n = 33 + 1 = 34$", True),
    ("34", r"Answer: $\frac{68}{2} = 34$", True),
    ("34", r"Answer: $\frac{70}{2} = 34$", False),
    ("34", "Answer: 34 (since 17*2 = 34)", True),
    ("34", "Answer: 34, which is even", True),
    ("34", "Answer: There are 34 ways.", True),
    ("3, 5", "Answer: 5, 3", True),
    ("3, 5", r"\boxed{3} and \boxed{5}", True),
    ("3, 5", "Answer: 3", False),
]
VALUES = [
    ("1234", "Answer: 12,34", False),
    ("1000", "Answer: 1,000", True),
    ("1000", r"Answer: $1{,}000$", True),
    ("1000", "Answer: 1 000", True),
    ("5", "Answer: 5.0", True),
    ("5", "Answer: 05", True),
    ("-5", "Answer: −5", True),
    ("5", "Answer: −5", False),
    (r"\frac{1}{2}", "Answer: 0.5", True),
    (r"\frac{1}{2}", r"Answer: \dfrac12", True),
    (r"\frac{1}{2}", "Answer: 1/2", True),
    ("$\\frac{1}{3}$", "Answer: 0.333333", False),
    ("34", r"Answer: \text{34}", True),
    ("34", "Answer: 34 cm", True),
    ("34", r"Answer: $34\text{ cm}^2$", True),
    ("34", r"Answer: 34^\circ", True),
    ("34", "Answer: 34%", True),
    ("0.34", "Answer: 34%", True),
    ("34", r"Answer: \$34", True),
    ("34", r"Answer: $2 \cdot 17$", False),  # it may be the question
    ("34", r"Answer: \frac{68}{2}", False),
    ("1024", r"Answer: 2^{10}", False),
    ("3400", r"Answer: 3.4 \times 10^3", True),
    ("34", "Answer: ٣٤", False),
    (r"2\sqrt{3}", r"Answer: $\sqrt{12}$", True),
    (r"2\sqrt{3}", r"Answer: $\sqrt{13}$", False),
    (r"\frac{\pi}{2}", r"\boxed{\pi/2}", True),
    ("x^2+1", "Answer: 1+x^2", True),
    ("(1,2)", "Answer: $(1, 2)$", True),
    ("(1,2)", "Answer: (2, 1)", False),
    (r"\text{even}", "Answer: Even", True),
    (r"\text{even}", "Answer: odd", False),
    (r"\text{(B)}", "Answer: B", True),
    (r"\text{(B)}", "Answer: (C)", False),
    ("9" * 40, "Answer: " + "9" * 40, True),
    ("9" * 40, "Answer: " + "9" * 39 + "8", False),
]


@pytest.mark.parametrize("answer, response, right", FINAL_ANSWER + ONE_ANSWER + VALUES)
def test_math(answer, response, right):
    assert verify(response, answer) is right


@pytest.mark.parametrize("response", verdict_cases.WRONG)
def test_math_is_not_talked_into_it(response):
    assert verify(response, "34") is False


@pytest.mark.parametrize("response", verdict_cases.RIGHT)
def test_math_reads_what_a_person_reads(response):
    assert verify(response, "34") is True and verify(response, "35") is False


@pytest.mark.parametrize("answer, response, right", verdict_cases.OTHER_ANSWERS)
def test_math_on_other_answers(answer, response, right):
    assert verify(response, answer) is right


@pytest.mark.parametrize("gold", ["C", "(C)", r"\text{(C)}"])
@pytest.mark.parametrize("response, right", verdict_cases.CHOICES)
def test_multiple_choice(gold, response, right):
    assert verify(response, gold) is right


HOSTILE = {
    "power tower": "Answer: 9^{9^{9^9}}",
    "megabyte of digits": "Answer: " + "9" * 1_000_000,
    "bare megabyte": "9" * 1_000_000,
    "brackets": "Answer: " + "(" * 20_000 + "34" + ")" * 20_000,
    "braces": r"\boxed" + "{" * 20_000 + "34",
    "boxes": r"\boxed{" * 20_000,
    "open boxes": r"\boxed" * 100_000,
    "markers": "Answer:" * 100_000,
    "blank markers": "Answer:\n" * 100_000,
    "sentences": "the answer is " * 100_000,
    "long sentence": "answer of " + "a " * 300_000,
    "or": "Answer: 34 " + "or " * 200_000,
    "dollars": "Answer: " + "$" * 500_000,
    "stars": "Answer: " + "*" * 500_000,
    "commas": "Answer: 1" + ",000" * 200_000,
    "NUL": "Answer: \x0034",
    "NULs": "\0" * 100_000,
    "lone surrogate": "Answer: \ud83434",
    "backslashes": "Answer: " + "\\" * 100_000,
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("mode", ["math", "gsm8k", "math_dapo", "math_dapo_strict_box", "exact"])
def test_hostile_responses_are_wrong_in_no_time(name, mode):
    started = time.monotonic()
    assert verify(HOSTILE[name], "35", mode) is False
    if mode in (
        "math",
        "gsm8k",
        "exact",
    ):  # normalising such an answer takes the released scorer the whole limit
        assert verify("Answer: 35", HOSTILE[name], mode) is False
    assert time.monotonic() - started < 20  # two of at most 5 s, and a worker to start on a busy machine


def test_what_hangs_is_wrong_and_logged(caplog):
    hangs = "Answer: " + "(" * 5 + "1!" + ")!" * 5 + " + 99999!!"
    assert verify(r"Answer: $\sqrt{12}$", r"2\sqrt{3}", time_limit=2.0)  # starts a worker
    started = time.monotonic()
    assert verify(hangs, r"\sqrt{2}", time_limit=2.0) is False
    assert time.monotonic() - started < 2.5
    assert verify(r"Answer: $\sqrt{8}$", r"2\sqrt{2}", time_limit=2.0)
    assert "no verdict" in caplog.text and "it counts as wrong" in caplog.text


def test_a_poisoned_batch_leaves_no_one_waiting():
    """From threads, all at once, with good responses among the bad."""
    batch = [(text, "35", False) for text in HOSTILE.values()] * 3
    batch += [(f"Answer: $\\sqrt{{{4 * n}}}$", f"2\\sqrt{{{n}}}", True) for n in range(2, 42)]
    random.Random(0).shuffle(batch)
    found: list[bool | None] = [None] * len(batch)

    def judge(i: int) -> None:
        found[i] = verify(batch[i][0], batch[i][1])

    threads = [threading.Thread(target=judge, args=(i,)) for i in range(len(batch))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [right for _, _, right in batch]


@pytest.mark.parametrize("value", [None, 34, b"34", ["34"]])
def test_whatever_is_given_is_judged(value):
    assert verify(value, "35") is False and verify("Answer: 35", value) is False
    assert verify("Answer: 34", 34) is True


def test_modes():
    assert {"math", "math_dapo", "gsm8k", "reasoning_gym"} <= set(mode_names())
    with pytest.raises(ValueError, match=r"no reward mode 'maths'; there are .*exact, gsm8k, math, "):
        verify("34", "34", "maths")
    with pytest.raises(ValueError, match="No module named 'nowhere'"):
        verify("34", "34", "nowhere:fn")


# The released scorer: gold answer, response, verdict. Where it differs from mode `math`, that is the point.
RELEASED = [
    ("34", "Answer: 34", True),
    ("34", "Answer: 34.", False),
    ("34", "Answer: 3,4", True),
    ("34", "**Answer:** 34", False),
    ("34", "Answer: $34$", True),
    ("34", "Answer: $34.$", True),
    ("34", "Answer: x = 34", True),
    ("34", "Answer: 35 = 34", True),
    ("34", r"Answer: \boxed{34}", True),
    ("34", r"\boxed{34}", False),
    ("34", "Answer: 34" + " " * 290, True),
    ("34", "Answer: 34" + " " * 294, False),
    ("34", "Answer: 35\nanswer:34", True),
    ("34", "Answer: a 34 units", True),
    ("34", "Answer: 34 square feet", True),
    ("34", r"Answer: \text{34}", True),
    ("34", r"Answer: 34^\circ", True),
    ("34", "Answer: 34%", False),
    (r"\frac{1}{2}", r"Answer: \frac12", True),
    (r"\frac{1}{2}", "Answer: 0.5", False),
    (r"\sqrt{2}", r"Answer: \sqrt2", True),
    ("1,234", "Answer: 1234", True),
    ("-34", "Answer: -34", True),
]


@pytest.mark.parametrize("answer, response, right", RELEASED)
def test_math_dapo(answer, response, right):
    assert verify(response, answer, "math_dapo") is right


@pytest.mark.parametrize(
    "answer, response, right",
    [
        ("34", r"so \boxed{34}.", True),
        ("34", r"so \boxed{34}" + "." * 90, True),
        ("34", r"so \boxed{34}" + "." * 91, False),
        ("34", r"\boxed{ 34}", False),
        ("34", r"\boxed{35}\boxed{34}", True),
        (r"\frac{1}{2}", r"\boxed{\frac{1}{2}}", True),
        ("34", r"\boxed{34", False),
        ("34", "Answer: 34", False),
    ],
)
def test_math_dapo_strict_box(answer, response, right):
    assert verify(response, answer, "math_dapo_strict_box") is right


@pytest.mark.parametrize(
    "answer, response, right",
    [
        ("34", "#### 34", True),
        ("so it is\n#### 34", "17 + 17 = 34\n#### 34", True),
        ("1000", "#### $1,000.00", True),
        ("1000", "That makes $1,000.", True),
        ("1234", "#### 12,34", False),
        ("34", "#### 34 or 35", False),
        ("34", "#### 34 apples", True),
        ("34", "#### 33\n#### 34", True),
        ("34", "34 apples and 12 pears", False),
        ("12", "34 apples and 12 pears", True),
        ("-5", "a loss, so -5 dollars", True),
        ("-5", "#### -$5", True),
        ("3", "16-3", True),
        ("5", "- 5 apples", True),
        ("0.5", "1/2 of it", True),
        ("50", "It is 50%", True),
        ("34", r"\boxed{34}", True),
        ("2", r"#### \sqrt{2}", False),
        ("2", "#### x^2", False),
        (r"\sqrt{2}", "#### 2", False),
        ("34", "none", False),
        ("", "34", False),
    ],
)
def test_gsm8k(answer, response, right):
    assert verify(response, answer, "gsm8k") is right


@pytest.mark.parametrize("response", verdict_cases.GSM8K_WRONG)
def test_gsm8k_is_not_talked_into_it(response):
    assert verify(response, "34", "gsm8k") is False


@pytest.mark.parametrize("response", verdict_cases.GSM8K_RIGHT)
def test_gsm8k_reads_what_a_person_reads(response):
    assert verify(response, "34", "gsm8k") is True


def test_reasoning_gym_without_a_row_compares():
    assert verify("34", "34", "reasoning_gym") and not verify("the answer is 34", "34", "reasoning_gym")


@pytest.mark.parametrize(
    "text, value",
    [
        ("34", 34),
        ("034", 34),
        ("-1,234,567.50", Fraction(-2469135, 2)),
        (r"\tfrac{-3}{4}", Fraction(-3, 4)),
        (r"-\frac34", Fraction(-3, 4)),
        (".5", Fraction(1, 2)),
        ("12,34", None),
        ("1234,567", None),
        ("1,0000", None),
        ("1/0", None),
        ("1.2.3", None),
        ("1 2", None),
        ("", None),
        ("9" * 1001, None),
        ("x", None),
    ],
)
def test_exact_value(text, value):
    assert exact_value(text) == value


def test_equal_answers_vote_together():
    spellings = ["Answer: 34", r"\boxed{34.0}", "Answer: x = 34", "The answer is $34$.", "34"]
    keys = [answer_key(text) for text in spellings if "=" not in text]
    assert set(keys) == {"34"}
    assert answer_key("Answer: 34 or 35") is None and answer_key("no idea what it is") is None
    assert answer_key("#### 1,000", "gsm8k") == answer_key("1000", "gsm8k") == "1000"
    assert answer_key("Answer: 3,4", "math_dapo") == "34" and answer_key("", "math_dapo") is None


def golds(name: str, request) -> list[str]:
    path = request.config.rootpath / Path("../shared/data") / name
    if not path.is_file():
        pytest.skip(f"needs ../shared/data/{name}")
    if path.suffix == ".jsonl":
        return [json.loads(line)["answer"] for line in path.read_text(encoding="utf-8").splitlines()]
    import pyarrow.parquet as pq

    return sorted({row["ground_truth"] for row in pq.read_table(path)["reward_model"].to_pylist()})


FORMS = [
    "Answer: {}",
    "**Answer:** ${}$.",
    r"Thus $x = \boxed{{{}}}$.",
    "The answer is {}, as was asked.",
    "{}",
]


def test_round_trips_of_aime(request):
    answers = golds("aime-2024.parquet", request)
    assert len(answers) == 29
    for answer in answers:
        assert all(quick(form.format(answer), answer) is True for form in FORMS)
        assert all(quick(form.format(int(answer) + 1), answer) is False for form in FORMS)
        assert verify(f"Answer: {answer}", answer, "math_dapo")


def test_round_trips_of_gsm8k(request):
    solutions = golds("gsm8k-test.jsonl", request)
    assert len(solutions) == 1319
    for solution in solutions:
        answer = solution.split("####")[1].strip()
        assert verify(solution, solution, "gsm8k") and verify(f"It is ${answer}.00.", solution, "gsm8k")
        assert not verify(f"#### {answer}1", solution, "gsm8k")
        assert all(quick(form.format(answer), answer) is True for form in FORMS)
        assert verify(f"Answer: {answer}", answer, "math_dapo")


def test_rewards_import_neither_torch_nor_transformers():
    program = "import sys, dapo.rewards; print({'torch', 'transformers', 'sympy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
