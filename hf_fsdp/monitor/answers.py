"""How right a generated answer is: plain functions of one answer and the answers that count as right.

Every metric takes ``(answer, references)`` and returns a score from 0 to 1; the mean over rows is the number that is
reported. With several references the best one counts, except for `vqa_accuracy`, which counts annotators.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from hf_fsdp.errors import DataError, Problem, nearest_names
from hf_fsdp.monitor.vqa_words import ARTICLES, CONTRACTIONS, NUMBER_WORDS

Metric = Callable[[str, Sequence[str]], float]

ANLS_THRESHOLD = 0.5
RELAXED_TOLERANCE = 0.05
_VQA_ENOUGH = 3  # annotators that have to agree with an answer for the full score
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?(%?)")
_WORD_PUNCTUATION = re.compile(r"[^\w\s]|_")
# Colons and apostrophes stay: "10:30" and "don't" are words.
_VQA_PUNCTUATION = re.compile(r"""[;/\[\]"{}()=+\\_\-><@`,?!]""")
_DIGITS_COMMA = re.compile(r"(?<=\d),(?=\d)")
_PERIOD = re.compile(r"\.(?!\d)")


def exact_match(answer: str, references: Sequence[str]) -> float:
    """Return 1 when the answer is one of the references, else 0.

    Compared after Unicode's compatibility composition (NFKC), without case, with every run of white space as one
    blank, and without one full stop at the end. Articles and other punctuation count.

    Example:
        >>> exact_match("Seven.", ["seven"]), exact_match("the seven", ["seven"])
        (1.0, 0.0)
    """
    return float(_plain(answer) in {_plain(reference) for reference in references})


def vqa_accuracy(answer: str, references: Sequence[str]) -> float:
    """Return the VQA challenge's accuracy: an answer that three annotators gave is right.

    For every annotator the other ones are asked: min(how many of them gave this answer / 3, 1); the mean of that is
    the score. So of ten annotators 1 gives 0.3, 2 give 0.6, 3 give 0.9, and 4 or more give 1. Answers are compared
    after `normalize_vqa`. (The challenge's script compares as written, case included, where all ten annotators gave
    the same text; here such rows are normalised like the others, which can only find more answers right.)

    With fewer than four annotators nobody could reach three others, so all of the others are enough: two annotators
    of whom one gave the answer make 0.5, and a single reference makes 1 or 0.

    Example:
        >>> vqa_accuracy("Two", ["2"] * 2 + ["3"] * 8)
        0.6
    """
    wanted = normalize_vqa(answer)
    matches = [normalize_vqa(reference) == wanted for reference in references]
    if len(matches) == 1:
        return float(matches[0])
    enough, num_matching = min(_VQA_ENOUGH, len(matches) - 1), sum(matches)
    shares = [min((num_matching - own) / enough, 1.0) for own in matches]
    return round(sum(shares) / len(shares), 12)  # 0.6, not 0.6000000000000001


def anls(answer: str, references: Sequence[str]) -> float:
    """Return the Levenshtein similarity of document questions (DocVQA): 1 - distance / length of the longer text.

    More than half of the letters wrong (a normalised distance of 0.5 or more) is 0, so that a wrong answer earns
    nothing for letters it happens to share. Compared in lower case with white space collapsed, letter by letter
    (code points, after NFC: a composed é equals a combined one). Two empty texts are equal.

    Example:
        >>> anls("Coca Cola", ["coca-cola"]), anls("pepsi", ["coca-cola"])
        (0.8888888888888888, 0.0)
    """
    return max(_similarity(_letters(answer), _letters(reference)) for reference in references)


def token_f1(answer: str, references: Sequence[str]) -> float:
    """Return the F1 of the answer's words against the best reference's (SQuAD's): order does not count.

    Words are what white space separates, in lower case, without punctuation and articles. A text without blanks
    (Chinese, Japanese) is one word. Two answers without words are equal; one of them without is 0.

    Example:
        >>> token_f1("a red car", ["the red bus"])
        0.5
    """
    return max(_f1(_words(answer), _words(reference)) for reference in references)


def relaxed_accuracy(answer: str, references: Sequence[str]) -> float:
    """Return ChartQA's accuracy: a number within 5 % of the reference is right, other answers must be equal.

    ``12%`` is 0.12. A reference of 0 must be met exactly. Text is compared without case and white space around it.
    ``1,234`` is text, as in the published script.

    Example:
        >>> relaxed_accuracy("104", ["100"]), relaxed_accuracy("106", ["100"])
        (1.0, 0.0)
    """
    return max(_relaxed(answer, reference) for reference in references)


METRICS: Mapping[str, Metric] = {
    metric.__name__: metric for metric in (exact_match, vqa_accuracy, anls, token_f1, relaxed_accuracy)
}


def resolve_metrics(metrics: Sequence[str | Metric], *, source: str) -> dict[str, Metric]:
    """Return name -> function of the metrics that were asked for: names of `METRICS`, or functions of one's own.

    Args:
        metrics: a function is called like the metrics here and reported under its own name.
        source: where the names stand, for the error.

    Raises:
        DataError: unknown names, all of them at once.
    """
    if isinstance(metrics, str):
        metrics = (metrics,)
    found: dict[str, Metric] = {}
    problems = []
    for metric in metrics:
        if isinstance(metric, str) and metric in METRICS:
            found[metric] = METRICS[metric]
        elif callable(metric) and (name := getattr(metric, "__name__", "")).isidentifier():
            found[name] = metric
        else:
            near = nearest_names(str(metric), METRICS)
            problems.append(
                Problem(
                    message=f"metrics: {metric!r} is no metric of answers; there are {', '.join(METRICS)}",
                    near=", ".join(near) or None,
                    fix=f'metrics=("{near[0] if near else "exact_match"}",), or a function of (answer, references) '
                    "with a name",
                    source=source,
                )
            )
    if problems:
        raise DataError(problems)
    return found


def score_answer(metrics: Mapping[str, Metric], answer: str, references: Sequence[str]) -> dict[str, float]:
    """Return every metric's score of one answer; `references` must hold at least one."""
    return {name: float(metric(answer, references)) for name, metric in metrics.items()}


def mean_scores(scores: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of every metric over rows; empty without rows."""
    if not scores:
        return {}
    return {name: sum(row[name] for row in scores) / len(scores) for name in scores[0]}


def normalize_vqa(text: str) -> str:
    """Return an answer as the VQA challenge compares it.

    Lower case; punctuation (not apostrophes and colons) is dropped beside a blank and is a blank between letters;
    commas inside numbers and full stops that are no decimal points go; number words up to ten are digits; articles
    go; a contraction without its apostrophe gets it.

    Example:
        >>> normalize_vqa("The two dogs, dont run.")
        "2 dogs don't run"
    """
    whole = text = " ".join(text.replace("’", "'").split())
    has_number_with_comma = _DIGITS_COMMA.search(whole) is not None
    for mark in set(_VQA_PUNCTUATION.findall(whole)):
        # One place beside a blank decides for every such mark of the answer, as in the challenge's script.
        is_dropped = has_number_with_comma or f"{mark} " in whole or f" {mark}" in whole
        text = text.replace(mark, "" if is_dropped else " ")
    words = [NUMBER_WORDS.get(word, word) for word in _PERIOD.sub("", text).lower().split()]
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ARTICLES)


def _plain(text: str) -> str:
    text = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return text[:-1].rstrip() if text.endswith(".") else text


def _letters(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).lower().split())


def _words(text: str) -> list[str]:
    text = _WORD_PUNCTUATION.sub("", unicodedata.normalize("NFC", text).lower())
    return [word for word in text.split() if word not in ARTICLES]


def _similarity(first: str, second: str) -> float:
    distance = _levenshtein(first, second) / max(len(first), len(second), 1)
    return 1.0 - distance if distance < ANLS_THRESHOLD else 0.0


def _levenshtein(first: str, second: str) -> int:
    """The fewest letters to insert, drop or replace; one row of the table at a time."""
    if len(first) < len(second):
        first, second = second, first
    above = list(range(len(second) + 1))
    for row, letter in enumerate(first, start=1):
        here = [row]
        for column, other in enumerate(second, start=1):
            here.append(min(above[column] + 1, here[-1] + 1, above[column - 1] + (letter != other)))
        above = here
    return above[-1]


def _f1(answer: list[str], reference: list[str]) -> float:
    if not answer or not reference:
        return float(answer == reference)
    num_shared = sum((Counter(answer) & Counter(reference)).values())
    return 2 * num_shared / (len(answer) + len(reference))


def _relaxed(answer: str, reference: str) -> float:
    given, wanted = _number(answer), _number(reference)
    if given is None or wanted is None:
        return float(answer.strip().casefold() == reference.strip().casefold())
    if wanted == 0:
        return float(given == 0)
    return float(abs(given - wanted) / abs(wanted) <= RELAXED_TOLERANCE)


def _number(text: str) -> float | None:
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        return None
    return float(match[0].rstrip("%")) / (100 if match[4] else 1)
