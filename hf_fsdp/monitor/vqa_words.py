"""Words that the VQA challenge takes for equal: numbers as words and digits, contractions without their apostrophe."""

from __future__ import annotations

from itertools import combinations

ARTICLES = frozenset({"a", "an", "the"})
NUMBER_WORDS = {
    "none": "0",
    **{
        word: str(number) for number, word in enumerate("zero one two three four five six seven eight nine ten".split())
    },
}

# Whole contractions; what is looked up is each of them with one or more of its apostrophes missing. Those that are
# other words without it (its, were, well, ill, shell, hell, wed, id, lets) are left alone, as the challenge does.
_WHOLE = """
    ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've
    he's how'd how'll how's i'd've i'm i've isn't it'd it'd've it'll ma'am might've mightn't mightn't've must've mustn't
    needn't not've o'clock oughtn't shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll
    somebody's someone'd someone'd've someone'll someone's something'd something'd've something'll that's there'd
    there'd've there're there's they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll
    what're what's what've when's where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't
    would've wouldn't wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're you've
""".split()


def _without_apostrophes(word: str) -> set[str]:
    places = [index for index, letter in enumerate(word) if letter == "'"]
    missing = (gone for count in range(1, len(places) + 1) for gone in combinations(places, count))
    return {"".join(letter for index, letter in enumerate(word) if index not in gone) for gone in missing}


CONTRACTIONS = {short: word for word in _WHOLE for short in _without_apostrophes(word)}
