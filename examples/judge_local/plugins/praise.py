import re

from rft import register

GOOD = """amazing awesome beautiful best breathtaking brilliant charming comfortable cozy delicious delightful enjoyable enjoyed excellent
exciting fantastic fun good gorgeous great happy impressive incredible inspiring love loved lovely magical memorable nice outstanding
perfect pleasant refreshing relaxing remarkable spectacular splendid stunning success superb thrilling unforgettable wonderful"""
BAD = """awful bad bland boring broke broken cold dirty disappointed disappointing dull hate hated horrible late mediocre never no nor not
poor rude sad terrible tired uncomfortable unhappy unpleasant waste worse worst wrong"""
GOOD = set(GOOD.split())
BAD = set(BAD.split())


@register.reward("praise_words")
def praise_words(task, transcript):
    """A plain check beside the judge: 1 for an answer with a word of praise and none of blame or
    denial.
    """
    words = set(re.findall(r"[a-z]+", transcript.answer.lower()))
    return float(bool(words & GOOD) and not words & BAD)
