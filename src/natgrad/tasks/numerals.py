"""Dates and numbers in German and in English words, as sentences to translate."""

from __future__ import annotations

from random import Random

_ENGLISH, _ENGLISH_TENS, _ENGLISH_MONTHS, _GERMAN, _GERMAN_TENS, _GERMAN_MONTHS = (
    words.split()
    for words in (
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
        "seventeen eighteen nineteen",
        "twenty thirty forty fifty sixty seventy eighty ninety",
        "January February March April May June July August September October November December",
        "null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn "
        "siebzehn achtzehn neunzehn",
        "zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig",
        "Januar Februar März April Mai Juni Juli August September Oktober November Dezember",
    )
)
_ENGLISH_ORDINALS = {"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth"}
_ENGLISH_ORDINALS |= {"nine": "ninth", "twelve": "twelfth"}
_GERMAN_ORDINALS = {1: "ersten", 3: "dritten", 7: "siebten", 8: "achten"}
_THINGS = (
    *(("Bücher", "books"), ("Züge", "trains"), ("Briefe", "letters"), ("Tische", "tables"), ("Schiffe", "ships")),
    *(("Fahrräder", "bicycles"), ("Kisten", "boxes"), ("Lampen", "lamps"), ("Flaschen", "bottles")),
)
_DEEDS = (
    *(("kamen", "an", "arrived"), ("wurden", "verkauft", "were sold"), ("wurden", "gezählt", "were counted")),
    *(("gingen", "verloren", "were lost"), ("fehlten", "noch", "were still missing")),
)
_THOUSAND, _HUNDRED = 1000, 100


def english(number: int) -> str:
    """Return a number from 0 to 999,999 in English words."""
    if number >= _THOUSAND:
        head, rest = divmod(number, _THOUSAND)
        return f"{english(head)} thousand" + (f"{' and' * (rest < _HUNDRED)} {english(rest)}" if rest else "")
    if number >= _HUNDRED:
        head, rest = divmod(number, _HUNDRED)
        return f"{_ENGLISH[head]} hundred" + (f" and {english(rest)}" if rest else "")
    if number < len(_ENGLISH):
        return _ENGLISH[number]
    head, rest = divmod(number, 10)
    return _ENGLISH_TENS[head - 2] + (f"-{_ENGLISH[rest]}" if rest else "")


def german(number: int, *, ends: bool = True) -> str:
    """Return a number from 0 to 999,999 in German words; `ends`: no further part of a word follows."""
    if number >= _THOUSAND:
        head, rest = divmod(number, _THOUSAND)
        return f"{german(head, ends=False)}tausend" + (german(rest, ends=ends) if rest else "")
    if number >= _HUNDRED:
        head, rest = divmod(number, _HUNDRED)
        return f"{german(head, ends=False)}hundert" + (german(rest, ends=ends) if rest else "")
    if number == 1:
        return "eins" if ends else "ein"
    if number < len(_GERMAN):
        return _GERMAN[number]
    head, rest = divmod(number, 10)
    return (f"{german(rest, ends=False)}und" if rest else "") + _GERMAN_TENS[head - 2]


def english_ordinal(number: int) -> str:
    """Return the number of a day, from 1 to 31, in English words."""
    before, dash, last = english(number).rpartition("-")
    ordinal = _ENGLISH_ORDINALS.get(last) or (f"{last[:-1]}ieth" if last.endswith("y") else f"{last}th")
    return before + dash + ordinal


def german_ordinal(number: int) -> str:
    """Return the number of a day, from 1 to 31, in German words, in the dative."""
    return _GERMAN_ORDINALS.get(number) or german(number) + ("ten" if number < len(_GERMAN) else "sten")


def pairs(count: int, seed: int) -> list[tuple[str, str]]:
    """Return different German sentences with their English translations, the same for equal arguments."""
    random = Random(seed)
    found: dict[str, str] = {}
    while len(found) < count:
        source, target = _pair(random)
        found[source] = target
    return list(found.items())


def _pair(random: Random) -> tuple[str, str]:
    number = random.randrange(2, 10 ** random.randint(1, 6))
    day, month, year = random.randint(1, 28), random.randrange(12), random.randint(1700, 2099)
    (things, english_things), (verb, end, deed) = random.choice(_THINGS), random.choice(_DEEDS)
    date = f"{english_ordinal(day)} of {_ENGLISH_MONTHS[month]} {english(year)}"
    how = random.random()
    if how < 0.2:
        written = f"{day:02}.{month + 1:02}.{year}"
    else:
        written = f"{german_ordinal(day)} {_GERMAN_MONTHS[month]} {german(year)}"
    if how < 0.4:
        return f"Das war am {written}.", f"That was on the {date}."
    if how < 0.7:
        return f"{german(number)} {things}", f"{english(number)} {english_things}"
    return (
        f"Am {written} {verb} {german(number)} {things} {end}.",
        f"On the {date}, {english(number)} {english_things} {deed}.",
    )
