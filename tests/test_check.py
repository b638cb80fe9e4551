"""`dapo data check`: kinds of answers, and the report on a file."""

from __future__ import annotations

import re

import pytest
from tiny import write_jsonl

from dapo.answer_classes import CLASSES, AnswerClass, classify, same_answer, shape
from dapo.check import Conflict, check, legend, summary, to_markdown
from dapo.cli import main
from dapo.data_sets import MATH_TEMPLATE
from dapo.errors import UserError

SHAPES = {
    "integer": r"1.5e3 | 3 \times 10^5 | 2\cdot10^{3}"
    r" | 34 | -7 | +7 | −7 | 1,000 | 12,345,678 | 1{,}000 | 10,\!080 | 0 | 007 | 34.0 | 6/3 | 34."
    r" | $34$ | $$34$$ | \(34\) | \[34\] | \boxed{34} | $\boxed{34}$ | \text{34}",
    "number": r"1.5e-3 | -2.5 \times 10^{-2}"
    r" | 0.5 | .5 | -1.25 | 3/4 | -3/4 | \frac{1}{2} | \frac12 | -\dfrac{3}{4} | 1,000.5",
    "expression": r"\sqrt{2} | 2\pi | 2pi | 3\sqrt{13} | x^2+1 | 6r^2-4r-24 | p - q | 2xy | x | F | 6 - 5i"
    r" | 5! | 2^{10} | \binom{5}{2} | \log_2 5 | 0.\overline{3} | 3 \times 10^n | 3 \times 5"
    r" | (1+2)(3+4) | (1+2)"
    r" | sin(x) | f(2,3) | \gcd(2,3) | \cos 30^\circ | \sum_{k=1}^{n} k | \infty | 4210_{5}"
    r" | \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
    "choice": r"A | E | (C) | [B] | D. | B) | \text{(C)} | \textbf{(E)} | $A$",
    "text": r"Evelyn | \text{even} | no solution | True | infinity | \text{Monday, Tuesday} | as in figure 3",
    "several values": r"3, 5 | 1,-2 | 1,2,3 | 1; 2 | 2 or 3 | 2 and 3 | 2 \text{ or } 3 | \pm 2 | ±2 | A, C"
    r" | 1 \pm \sqrt{19} | \frac{1}{2}, 3 | $3, 5$ | 1,000, 2,000 | 2 \text{ hours and } 30 \text{ minutes}",
    "set": r"\{1,2\} | {1,2} | \{1\} | \left\{ 1, 2 \right\}",
    "tuple or open interval": r"(1,2) | \left( 3, \frac{\pi}{2} \right) | (-1, 2)",
    "tuple": r"(1,2,3) | \langle 1, 2 \rangle",
    "interval or list": r"[1,2]",
    "list": r"[1,2,3]",
    "interval": r"[1,2) | (1,2] | (-\infty, 2) | (0, \infty)",
    "set or interval": r"(-\infty, 2) \cup (3, \infty) | x \in [-2,7] | \emptyset",
    "unit": r"34 cm | 34cm | 34 cm^2 | 34 \text{ cm}^2 | 5^\circ | 5^{\circ} | 90° | 50\% | 50% | \$36 | $36"
    r" | \$1,000 | 1,000 km | 18 dollars | 5.4 \text{ cents} | 3\sqrt{2} \text{ cm} | 5 m | 5 m^2",
    "equation": r"x=3 | y = 2x + 3 | x \equiv 3 | x \approx 3.1",
    "inequality": r"x > 3 | x \leq 3 | 0 < x < 1 | x \neq 2 | x ≥ 2",
    "malformed number": r"12,34 | 1,2 | 1,234,56 | 1.2.3",
    "mixed number": r"3\frac{1}{2} | 1\frac12 | 3 1/2",
    "ratio or time": r"3:2 | 10:30 am | 1:2:3",
    "empty": r" | $$ | \text{} | .",
}
CASES = [(answer, name) for name, answers in SHAPES.items() for answer in answers.split(" | ")]


@pytest.mark.parametrize("answer, name", CASES)
def test_shape(answer, name):
    expected = AnswerClass(name) if name in CLASSES else AnswerClass("ambiguous", name)
    assert shape(answer) == expected


@pytest.mark.parametrize(
    "answer, mode, name",
    [
        ("34", "math", "integer"),
        (r"\frac{1}{2}", "math", "number"),
        (r"3\sqrt{13}", "math", "expression"),
        (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", "math", "expression"),
        ("x", "math", "expression"),
        ("(C)", "math", "choice"),
        ("Evelyn", "math", "text"),
        ("34 cm", "math", "ambiguous: unit"),
        (r"\frac", "math", "text: math-verify cannot read it"),
        ("{{{", "math", "text: math-verify cannot read it"),
        ("", "math", "empty"),
        ("34", "math_dapo", "integer"),
        ("1\n2", "math_dapo", "unverifiable: expression"),  # it reads one line
        (r"\sqrt{2}", "math_dapo_strict_box", "expression"),
        ("Evelyn", "gsm8k", "unverifiable: text"),
        ("Half of 68 is 34.\n#### 34", "gsm8k", "integer"),
        ("Half of 68 is 34.\n#### 34", "math", "unverifiable: worked solution"),
        ("34 cm", "exact", "ambiguous: unit"),
    ],
)
def test_classify(answer, mode, name):
    assert str(classify(answer, mode)) == name


def test_same_answer():
    assert same_answer("x", "x") and same_answer("34", "34.0") and same_answer("1,000", "1000")
    assert same_answer("1/2", r"\frac{1}{2}") and not same_answer("1/2", "0.51")
    assert same_answer("1.5e3", "1500") and same_answer(r"3 \times 10^{-2}", "0.03")
    assert not same_answer("1.5e3", "1501") and not same_answer("x", "y") and not same_answer("x", "3")


def row(prompt: object, answer: object) -> dict:
    return {"prompt": prompt, "answer": answer}


ROWS = [
    *(row(f"p{i}", str(i)) for i in range(7)),
    row("p0", 0),  # a duplicate
    row("p1", "1.0"),  # a duplicate that agrees
    row("p2", "3"),  # one that does not
    row("p2", "4"),
    row("u", "Evelyn | `Ann`"),
    row([{"role": "user", "content": "v"}], "(1,2)"),
    row("w", None),
    row("", "12,34"),
]


def test_report_on_a_file(tmp_path):
    report = check(str(write_jsonl(tmp_path / "data.jsonl", ROWS)))
    assert (report.rows, report.prompts, report.duplicates, report.empty_prompts) == (15, 10, 4, 1)
    assert report.conflicting == [Conflict("p2", (3, 10), ("2", "3"))]  # 4 in row 11 makes no other one
    assert report.columns == ("prompt", "answer") and report.comparable == 14
    groups = {str(kind): (group.rows, group.answers) for kind, group in report.groups.items()}
    assert groups == {
        "integer": (11, 8),  # 1 and 1.0 are two texts
        "text": (1, 1),
        "ambiguous: tuple or open interval": (1, 1),
        "ambiguous: malformed number": (1, 1),
        "empty": (1, 1),
    }
    assert next(iter(groups)) == "integer" and list(groups)[-1] == "empty"
    integers = report.groups[AnswerClass("integer")]
    assert integers.examples == [(1, "0"), (2, "1"), (3, "2"), (4, "3"), (5, "4")]
    assert report.groups[AnswerClass("ambiguous", "malformed number")].examples == [(15, "12,34")]


def test_markdown(tmp_path):
    page = to_markdown(check(str(write_jsonl(tmp_path / "data.jsonl", ROWS))))
    assert "15 rows (prompts in prompt, answers in answer), 10 distinct prompts, 4 duplicates" in page
    assert "| integer | 11 | 73.3 % | 8 | 1: `0`<br>2: `1`<br>3: `2`<br>4: `3`<br>5: `4` |" in page
    assert "| 12: `` Evelyn \\| `Ann` `` |" in page
    assert "\n- integer: a whole number\n- text: compared by its spelling\n" in page
    table = [line for line in page.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 5 and len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1


def test_command(tmp_path, capsys):
    path, out = str(write_jsonl(tmp_path / "data.jsonl", ROWS)), tmp_path / "new" / "report.md"
    assert main(["data", "check", path, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "73.3 %" in shown and ", 1 prompt with conflicting answers" in shown
    assert '\nConflicting answers:\n- "p2": 2 in row 3, 3 in row 10\n' in shown
    table, _, below = shown.partition("\ninteger: a whole number\n")  # what the classes mean stands below
    assert below.startswith("text: compared by its spelling\n")
    lines = table.splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) <= 15  # wrapped at words, not letter by letter
    assert any(re.match(r" *ambiguous: malformed +1 +6.7 % +1 +15: 12,34", line) for line in lines)
    assert out.read_text(encoding="utf-8").startswith("# Answers\n") and list(out.parent.iterdir()) == [out]


def test_nothing_to_compare(tmp_path, capsys):
    path = str(write_jsonl(tmp_path / "data.jsonl", [row("a", "Half of 68 is 34.\n#### 34"), row("b", "")]))
    assert main(["data", "check", path]) == 1
    shown = capsys.readouterr().out
    assert "Nothing here can be compared" in shown and "take --mode gsm8k" in shown
    assert main(["data", "check", path, "--mode", "gsm8k"]) == 0
    assert "integer" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["data.jsonl", "report.txt", "report"])
def test_a_report_replaces_no_data(tmp_path, capsys, name):
    path, out = write_jsonl(tmp_path / "data.jsonl", ROWS), tmp_path / name
    before = path.read_bytes()
    assert main(["data", "check", str(path), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert (
        f"--out {out} is FILE itself" in error
        if out == path
        else f"--out must end in .md, got {out}" in error
    )
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_legend_speaks_of_mode_math_where_it_judges(tmp_path):
    path = str(write_jsonl(tmp_path / "data.jsonl", [row("a", r"\sqrt{2}")]))
    assert legend(check(path)) == ["expression: one closed form; mode math compares its value"]
    assert legend(check(path, "math_dapo")) == ["expression: one closed form"]


def test_conflicts_show_the_problem_and_not_the_words_around_it(tmp_path):
    prompt = MATH_TEMPLATE.replace("{prompt}", "How many " + "x" * 80)
    rows = [row([{"role": "user", "content": prompt}], answer) for answer in ("1", r"\frac12", None)]
    (conflict,) = check(str(write_jsonl(tmp_path / "data.jsonl", rows))).conflicting
    assert str(conflict) == f'"How many {"x" * 50}…": 1 in row 1, \\frac12 in row 2'


SOLUTION = "Half of 68 is 34.\n#### 34"


def test_each_row_is_judged_by_the_mode_it_names(tmp_path):
    rows = [row("a", SOLUTION) | {"data_source": "openai/gsm8k"}, row("b", "5") | {"data_source": "math"}]
    rows += [row("c", SOLUTION) | {"data_source": "math"}]
    path = str(write_jsonl(tmp_path / "data.jsonl", rows))
    report = check(path, "data_source")
    groups = {str(kind): group.rows for kind, group in report.groups.items()}
    assert groups == {"integer": 2, "unverifiable: worked solution": 1} and report.note == ""
    assert report.modes == {"gsm8k", "math"} and report.groups[AnswerClass("integer")].examples[0] == (
        1,
        "34",
    )
    assert "judged by the mode that each row names in data_source (gsm8k, math)" in summary(report)


@pytest.mark.parametrize(
    "second, complaint",
    [
        ({}, "row 2 has no column data_source"),
        ({"data_source": None}, "row 2: data_source is None: mode must be a string"),
        ({"data_source": "maths"}, "row 2: data_source is 'maths': no reward mode 'maths'; there are exact"),
        ({"data_source": "no_such:mode"}, "row 2: data_source: 'no_such:mode': No module named"),
    ],
)
def test_rows_that_name_no_mode(tmp_path, second, complaint):
    rows = [row("a", "1") | {"data_source": "math"}, row("b", "2") | second]
    path = str(write_jsonl(tmp_path / "data.jsonl", rows))
    with pytest.raises(UserError, match=re.escape(complaint)):
        check(path, "data_source")


def test_modes_that_rows_name_and_nobody_asked_for(tmp_path):
    names = ["openai/gsm8k", "math", "unknown", None, 7]
    rows = [row(f"p{i}", "1") | {"data_source": name} for i, name in enumerate(names)]
    path = str(write_jsonl(tmp_path / "data.jsonl", rows))
    note = "rows name their mode (gsm8k) in data_source; judged by math: --mode data_source judges by theirs"
    assert check(path).note == note and f"\nNote: {note}." in summary(check(path))
    assert check(path, "math").note == ""
    assert check(str(write_jsonl(tmp_path / "math.jsonl", rows[1:]))).note == ""


def test_columns_and_what_is_wrong(tmp_path):
    path = str(write_jsonl(tmp_path / "data.jsonl", [{"q": "a", "gold": "1"}]))
    assert check(path, prompt_column="q", answer_column="gold").comparable == 1
    with pytest.raises(
        UserError, match=r"row 1 has none of the columns .*set --prompt-column to one of: q, gold"
    ):
        check(path)
    with pytest.raises(
        UserError,
        match=r"--mode: no reward mode 'maths'; there are exact, gsm8k.* or data_source, by which each row",
    ):
        check(path, "maths")
    with pytest.raises(UserError, match="holds no rows"):
        check(str(write_jsonl(tmp_path / "empty.jsonl", [])))
    with pytest.raises(UserError, match="row 1: prompt must be a string or a list of"):
        check(str(write_jsonl(tmp_path / "odd.jsonl", [row(7, "1")])))


def test_aime(request):
    path = request.config.rootpath / "../shared/data/aime-2024.parquet"
    if not path.is_file():
        pytest.skip("needs ../shared/data/aime-2024.parquet")
    report = check(str(path))
    assert (report.rows, report.prompts, report.duplicates, report.conflicting) == (960, 30, 930, [])
    assert {str(kind): group.rows for kind, group in report.groups.items()} == {"integer": 960}
    assert report.columns == ("prompt", "reward_model.ground_truth")
