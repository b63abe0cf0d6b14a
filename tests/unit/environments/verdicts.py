"""What verifiers say to answers of many forms; `tools/verdicts_table.py` writes it into the guide."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from nemo_rl.environments.math.verification import VERIFIERS, Verdict, Verification


@dataclass(frozen=True)
class Kind:
    """Answers of one kind to a ground truth, by their verdict."""

    verifier: str
    name: str
    truth: str
    right: tuple[str, ...]
    wrong: tuple[str, ...] = ()
    options: str = ""
    also: tuple[str, ...] = ()
    """Further ground truths with the same verdicts."""

    def cases(self) -> Iterator[tuple[Verification, bool]]:
        for truth in (self.truth, *self.also):
            for response in (*self.right, *self.wrong):
                yield Verification(self.verifier, response, truth, self.options), response in self.right

    def decided_otherwise(self) -> list[str]:
        """The responses on which the published rule has another verdict, for `truth`."""
        shown = list(self.cases())[: len(self.right) + len(self.wrong)]
        return [job.response for job, right in shown if verdict(job._replace(published_rules=True))[0] is not right]


def verdict(job: Verification) -> Verdict:
    return VERIFIERS[job.verifier](job)


_PERCENT = Kind(
    "hf_math_verify",
    "percentages",
    "50%",
    (
        r"\boxed{50\%}",
        r"\boxed{50}",
        "The answer is 50%.",
        "50 percent",
        r"\boxed{50 \text{ percent}}",
        r"\boxed{50 percent}",
        r"$50$ %",
    ),
    (r"\boxed{0.5}", r"\boxed{\frac{1}{2}}", r"\boxed{5\%}"),
    also=(r"50\%", "50 percent", "50"),
)
_MIXED = Kind(
    "hf_math_verify",
    "mixed numbers",
    "5/2",
    (
        "2 1/2",
        r"\boxed{2 1/2}",
        r"\boxed{2\frac{1}{2}}",
        r"\boxed{2~1/2}",
        "2½",
        "The answer is 2 1/2.",
        r"\boxed{2.5}",
    ),
    ("2", "1/2", r"\boxed{1}", r"\boxed{21/2}"),
    also=("2.5", "2 1/2", r"2\frac12"),
)
_A_TO_D = Kind("english_multichoice", "words before the letter", "B", (), options="ABCD")

KINDS = (
    Kind(
        "hf_math_verify",
        "equal values",
        "0.5",
        (r"so \boxed{\frac{1}{2}}", "1/2", "The answer is $.5$"),
        (r"\boxed{2}", "a half"),
    ),
    Kind("hf_math_verify", "expressions", "(x+1)^2", ("the answer is $x^2 + 2x + 1$",), ("the answer is $x^2 + 1$",)),
    Kind("hf_math_verify", "sets", r"\{2, 1\}", (r"\boxed{\{1, 2\}}",), (r"\boxed{\{1, 3\}}",)),
    Kind("hf_math_verify", "units", "7", (r"\boxed{7 \text{ apples}}", r"\boxed{\$7}"), (r"\boxed{8 \text{ apples}}",)),
    Kind("hf_math_verify", "boxes", "46", ("46", r"\boxed{46}"), (r"\boxed{46", r"\boxed{47}", "no number")),
    _PERCENT,
    _MIXED,
    Kind("hf_math_verify", "mixed numbers", "-5/2", ("-2 1/2", r"\boxed{-2 1/2}"), ("2 1/2", "-3/2")),
    Kind("hf_math_verify", "mixed numbers", "2", (r"\boxed{2}",), ("2 2/3",)),
    Kind("hf_math_verify", "mixed numbers", "10", ("The answer is 10",), ("The answer is 4 10/3",)),
    Kind(
        "hf_math_verify",
        "mixed numbers in words",
        "5/4",
        ("1 and 1/4", "The answer is 1 and 1/4.", r"\boxed{1 and 1/4}", r"\boxed{1 \text{ and } \frac{1}{4}}"),
        ("1/4", "1", "The roots are 1 and 1/4", "1 and 1/4 are the roots"),
        also=("1 and 1/4", r"1\text{ and }\frac{1}{4}"),
    ),
    Kind("hf_math_verify", "mixed numbers in words", "-5/4", ("-1 and 1/4",), ("1 and 1/4",)),
    Kind("hf_math_verify", "mixed numbers in words", "1/4", ("The roots are 1 and 1/4",), ("1 and 1/4",)),
    Kind(
        "hf_math_verify",
        "lists of numbers",
        "1, 1/4",
        (r"\boxed{1, \frac{1}{4}}", r"\boxed{1 and 1/4}"),
        (r"\boxed{5/4}",),
    ),
    Kind(
        "hf_math_verify",
        "Markdown",
        "5/2",
        ("**5/2**", "The answer is **5/2**.", "**Answer: 5/2**", "*5/2*", "__5/2__", "`5/2`", "**2 and 1/2**"),
        ("**5**/2 **5/3**", "2*5/2", "x_5/2_"),
    ),
    Kind("hf_math_verify", "Markdown", "8", ("**8**", "2**3", "(2)**3", "2*2*2", "$2*4$"), ("2**4",)),
    Kind(
        "hf_math_verify",
        "Chinese and Japanese",
        "7",
        ("7。", r"\boxed{7。}", "答案是7。", "答案\uff1a7。", "答えは7。", "答案是**7**。", "\uff17"),
        ("8。", "答案是8。第7步"),
    ),
    Kind("hf_math_verify", "Chinese and Japanese", "1.5", ("1.5。", "答案是1.5。", "\uff11\uff0e\uff15"), ("15。",)),
    Kind(
        "hf_math_verify",
        "marks around the truth",
        "#### 7",
        (r"\boxed{7}", "The answer is 7.", r"\boxed{7.}", "#### 7"),
        (r"\boxed{8}",),
        also=("7.", "7", "$7$", r"\boxed{7}", "**7**", "The answer is 7.", "3 + 4 = 7\n#### 7", "Answer: 7"),
    ),
    Kind("hf_math_verify", "full stops", "5/2", ("The answer is 5/2.", r"$\frac{5}{2}.$"), ("Step 2.5. 2",)),
    Kind(
        "hf_math_verify",
        "signs",
        "-1/2",
        ("The answer is \u22121/2", "\\boxed{\u2212½}", "-½"),
        ("½",),
        also=("\u2212½",),
    ),
    Kind("hf_math_verify", "signs", r"2\sqrt{3}", (r"\boxed{2√3}",), (r"\boxed{2√5}",), also=("2√3",)),
    Kind("hf_math_verify", "signs", "90°", (r"\boxed{90}", r"\boxed{90^\circ}", "90°"), (r"\boxed{9}",)),
    Kind(
        "dapo_math_verify",
        "the last line",
        "34",
        (
            "Thus\nAnswer: 34",
            "**Answer:** 34",
            "**Answer**: **34**",
            "Answer: x = 34.",
            "Answer\uff1a34。",
            "Answer: `34`",
        ),
        ("34", "Answer: 33", r"\boxed{34}", "Answer: 34" + "." * 400),
        also=("34.", "#### 34", "$34$"),
    ),
    Kind(
        "dapo_math_verify", "equal texts", "1024", (r"Answer: $\boxed{1{,}024}$.", "Answer: 1,024"), ("Answer: 2^10",)
    ),
    Kind("dapo_math_verify", "equal texts", "even", (r"Answer: x = \text{even}",), ("Answer: odd",)),
    Kind("dapo_math_verify", "equal texts", r"\frac{1}{2}", (r"Answer: \dfrac 12",), ("Answer: 1/2",)),
    replace(
        _PERCENT,
        verifier="dapo_math_verify",
        right=("Answer: 50%", r"Answer: 50\%", "Answer: 50", "Answer: 50 percent"),
        wrong=("Answer: 0.5",),
    ),
    replace(
        _MIXED,
        verifier="dapo_math_verify",
        right=("Answer: 2 1/2", "Answer: 2 and 1/2", "Answer: 5/2"),
        wrong=("Answer: 2",),
        also=(),
    ),
    Kind("dapo_math_verify", "mixed numbers", "21/2", ("Answer: 21/2",), ("Answer: 2 1/2",)),
    replace(
        _A_TO_D,
        right=(
            *("Answer: B", "answer: b", "Answer: I think B", "Answer: option B", "The answer is therefore B"),
            *("I'd say the answer must be B.", "The answer I find is B.", "The answer is: option (b)"),
        ),
        wrong=("B", "The answer is not B", "Answer: vitamin B", "Answer: A", "Answer: Because", "ANSWERS"),
        also=("(B)", "B.", "Answer: B", "b", "B) Paris"),
    ),
    replace(
        _A_TO_D,
        name="boxes and other marks",
        right=(
            *(r"\boxed{B}", r"\boxed{\text{(B)}}", r"\boxed{b}", "**Answer:** (B)", r"Answer: $\boxed{\mathbf{(B)}}$."),
            *("**Answer**: **b**", r"\text{Answer}: \(B\)", "Answer: $B$"),
        ),
        wrong=(r"\boxed{A}", r"\boxed{\text{Bees}}"),
    ),
    replace(
        _A_TO_D,
        name="quotation marks",
        right=(
            *('Answer: "B"', "Answer: 'B'", "Answer: `B`", 'The answer is "B".', 'Answer: "b"', 'Answer: "(B)"'),
            *("Answer: \u201cB\u201d", 'The answer is "B) Paris"', '{"answer": "B"}', "It's clear: the answer it's: B"),
        ),
        wrong=('"B"', 'The answer is "Bees"', 'The answer is "B flat"', 'Answer: "A"', "the answer isn't 'B'"),
    ),
    replace(
        _A_TO_D,
        name="the last letter that the row offers",
        right=(
            *(
                "Answer: A\n... no. Answer: B",
                "Answer: B. This answer is a direct consequence of X. Other answers fail.",
            ),
            *(
                "Answer: B\nThe answer is a tensor",
                "Answer: B. The answer: E",
                "Answer: B. The answer I'd give is here",
            ),
        ),
        wrong=("Answer: B or not? The answer is C.",),
    ),
    replace(
        _A_TO_D,
        name="the letter I",
        truth="I",
        right=("Answer: I", "The answer is I because"),
        options="ABCDEFGHI",
        wrong=("Answer: I think B", "Answer: I'd say B"),
    ),
    Kind(
        "multilingual_multichoice",
        "other languages",
        "B",
        (
            *(
                "Answer: B",
                "Réponse : B",
                "答案\uff1aB",
                "答案是 B",
                "答案\uff1a选项B",
                "الإجابة: ب",
                "الإجابة هي ب",
                "উত্তর: ব",
            ),
            *("**Respuesta:** (B)", "La respuesta es B", "Respuesta: la opción B", "Die Antwort ist B", r"\boxed{B}"),
            *("答案\uff1a“B”", "答案是「B」。", "Réponse : « B »", "Antwort: „B“"),
        ),
        ("Réponse : C", "答案是 A", "B"),
        options="ABCD",
    ),
)


@dataclass(frozen=True)
class Turn:
    """A turn of the model, and its program; None: there is none."""

    name: str
    text: str
    program: str | None


TURNS = (
    Turn("tags", "so <code>print(1)</code> it is", "print(1)"),
    Turn("a tag left open at the end", "<code>print(1)", "print(1)"),
    Turn("a fence in tags", "<code>\n```python\nprint(1)\n```\n</code>", "print(1)\n"),
    Turn("several blocks: the last", "<code>\nx = 1\n</code> and <code>print(x)</code>", "print(x)"),
    Turn("several blocks: the last", "```python\nprint(1)\n```\nbetter:\n```py\nprint(2)\n```", "print(2)\n"),
    Turn("tags before a fence", "Not <code>x</code>:\n```python\nprint(1)\n```", "print(1)\n"),
    Turn("tags named in the prose", "Between `<code>` and `</code>`:\n```python\nprint(1)\n```", "print(1)\n"),
    Turn("tags in the program", "```python\nprint('<code>')\n```", "print('<code>')\n"),
    Turn("python3, Python, py", "```python3\nprint(1)\n```", "print(1)\n"),
    Turn("python3, Python, py", "```Python\nprint(1)\n```", "print(1)\n"),
    Turn("words behind the language", "```python title=a.py\nprint(1)\n```", "print(1)\n"),
    Turn("no language", "```\nprint(1)\n```", "print(1)\n"),
    Turn("no language, beside Python", "```python\nprint(1)\n```\nIt prints\n```\n1\n```", "print(1)\n"),
    Turn("another language", "```bash\nls\n```", None),
    Turn("CRLF", "```python\r\nprint(1)\r\n```", "print(1)\r\n"),
    Turn(
        "indented in a list", "1. So:\n   ```python\n   def f():\n       return 1\n   ```", "def f():\n    return 1\n"
    ),
    Turn(
        "an indented comment first", "```python\n  # f\ndef f():\n    return 1\n```", "  # f\ndef f():\n    return 1\n"
    ),
    Turn("four backticks", "````python\nprint(1)\n````", "print(1)\n"),
    Turn("a fence behind words", "see `f`: ```python\nprint(1)```", "print(1)"),
    Turn("a fence in the program", "```python\nprint('```')\nx = 1\n```", "print('```')\nx = 1\n"),
    Turn("a fence in a line", "```print(1)``` prints\n1", None),
    Turn("tildes", "~~~python\nprint('```')\n~~~", "print('```')\n"),
    Turn("tildes in a list, left open", "1. So:\n   ~~~python\n   print(1)", "print(1)"),
    Turn("tildes under a heading", "Code\n~~~~\n```python\nprint(1)\n```", "print(1)\n"),
    Turn("tildes in the program", "```python\nx = '''\n~~~python\n'''\n```", "x = '''\n~~~python\n'''\n"),
    Turn("attributes of the language", "```{.python}\nprint(1)\n```", "print(1)\n"),
    Turn("attributes of the language", "```python:a.py\nprint(1)\n```", "print(1)\n"),
    Turn("a fence left open at the end", "```python\nprint(1)", "print(1)"),
    Turn("an empty block", "```python\n```", None),
    Turn("no block", "print(1)", None),
)
