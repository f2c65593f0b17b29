"""Plain-text documents of the bundled model's corpus: stories, journeys, catalogues, lessons, facts.

Every kind is a function from a random stream to a text. The text is made of short templates, but what it says hangs
together over its whole length (who owns what, which words were named, which way back), which is what a language model
can learn and a 5-gram cannot.
"""

from __future__ import annotations

import random

from examples.bundled_words import (
    ADJECTIVES,
    ANIMALS,
    DAYS,
    NAMES,
    NOUNS,
    NUMBERS,
    PLACES,
    TRADES,
    any_chunk,
    any_word,
    distinct_words,
    invented_word,
)


def with_article(words: str) -> str:
    """`words` with "a" or "an" before it."""
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def joined(items: list[str]) -> str:
    """`items` as English enumerates them: "a, b and c"."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def animal_facts(animal: str) -> tuple[str, str, str, int]:
    """Colour, home, food and number of young of an animal in this made-up world: the same in every document."""
    fixed = random.Random(f"animal {animal}")
    return fixed.choice(ADJECTIVES), fixed.choice(PLACES), fixed.choice(NOUNS), fixed.randint(1, 10)


def _pronouns(name: str) -> tuple[str, str, str]:
    female = name[-1] in "aeoë" and name not in ("Hugo", "Marco", "Pedro", "Theo", "Leo")
    return ("she", "her", "her") if female or name in ("Iris", "Ingrid") else ("he", "him", "his")


def _thing(rng: random.Random) -> str:
    return f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}" if rng.random() < 0.6 else any_word(rng)


def _title(rng: random.Random, words: list[str]) -> str:
    text = "the " + " and the ".join(words) if rng.random() < 0.5 else ", ".join(words)
    style = rng.random()
    if style < 0.5:
        return text.upper() + "\n"
    return (text.title() if style < 0.7 else text.capitalize()) + "\n" if style < 0.85 else ""


def finding(rng: random.Random) -> str:
    """Somebody finds a thing, loses it, and gets it back from a helper."""
    hero, helper = rng.sample(NAMES, 2)
    she, her, poss = _pronouns(hero)
    job, place, other = rng.choice(TRADES), rng.choice(PLACES), rng.choice(PLACES)
    thing, gift, land = _thing(rng), _thing(rng), invented_word(rng).capitalize()
    lines = [
        f"{hero} was {with_article(job)} who lived in the {place} of {land}.",
        f"One {rng.choice(DAYS)} {she} found {with_article(thing)} near the {other}.",
        rng.choice(
            (
                f"{hero} took the {thing} home to the {place}.",
                f'"What a fine {thing}!" said {hero} the {job}.',
                f"{she.capitalize()} had never seen such {with_article(thing)} in {land}.",
            )
        ),
        f"But the next day the {thing} was gone, and {hero} was {rng.choice(('sad', 'cold', 'tired', 'angry'))}.",
        f"{hero} asked {helper} for help, and {helper} looked in the {other}.",
        f"There lay the {thing}! {helper} brought it back to {her}.",
        rng.choice(
            (
                f"{hero} gave {helper} {with_article(gift)}, and {helper} carried the {gift} out of {land}.",
                f"Now the {thing} stands in {poss} {place}, and {helper} comes to see it every {rng.choice(DAYS)}.",
            )
        ),
    ]
    return _title(rng, [thing, gift]) + " ".join(lines)


def journey(rng: random.Random) -> str:
    """A way there past some things, and the way back past the same things in the other order."""
    name, place = rng.choice(NAMES), rng.choice(PLACES)
    things = distinct_words(rng, rng.randint(2, 6))
    back = things[::-1]
    she = _pronouns(name)[0]
    there = rng.choice(
        (
            f"On the way to the {place} {name} passed {joined(['the ' + w for w in things])}.",
            f"{name} walked to the {place}: {', '.join(things)}.",
            f"{name} went first by the {', then by the '.join(things)}, and so came to the {place}.",
        )
    )
    home = rng.choice(
        (
            f"On the way back {she} passed {joined(['the ' + w for w in back])}.",
            f"{she.capitalize()} walked home: {', '.join(back)}.",
            f"{she.capitalize()} went home by the {', then by the '.join(back)}.",
        )
    )
    return f"{_title(rng, things)}{there} {she.capitalize()} stayed until {rng.choice(DAYS)}. {home}"


def trade(rng: random.Random) -> str:
    """Two people own something and exchange it; the end says who owns what."""
    first, second = rng.sample(NAMES, 2)
    mine, yours, extra = _thing(rng), _thing(rng), _thing(rng)
    lines = [f"{first} had {with_article(mine)} and {second} had {with_article(yours)}."]
    swapped = rng.random() < 0.7
    if swapped:
        lines.append(f"{first} gave {second} the {mine} and {second} gave {first} the {yours}.")
    else:
        lines.append(f"{second} wanted the {mine}, but {first} did not want the {yours}.")
    if rng.random() < 0.5:
        lines.append(f"Then {second} bought {with_article(extra)} at the {rng.choice(PLACES)}.")
    left, right = (yours, mine) if swapped else (mine, yours)
    lines.append(f"Now {first} has the {left} and {second} has the {right}.")
    lines.append(f'"I like my {left}," said {first}. "And I like my {right}," said {second}.')
    return _title(rng, [mine, yours]) + " ".join(lines)


def catalogue(rng: random.Random) -> str:
    """A list of things and a sentence that counts and names them."""
    place, things = rng.choice(PLACES), distinct_words(rng, rng.randint(3, 7))
    mark = rng.choice(("- ", "* ", "+ "))
    listed = "".join(f"{mark}{word}\n" for word in things)
    head = f"{'THINGS IN THE ' + place.upper() if rng.random() < 0.5 else 'Things in the ' + place}:\n"
    return (
        f"{head}{listed}There are {NUMBERS[len(things)]} things in the {place}: {joined(['the ' + w for w in things])}."
        f" The first is the {things[0]} and the last is the {things[-1]}."
    )


def signs(rng: random.Random) -> str:
    """Words on signs in capitals, and somebody who reads them; or read words that get painted."""
    name, words = rng.choice(NAMES), distinct_words(rng, rng.randint(2, 6))
    poss = _pronouns(name)[2]
    capitals, plain = ", ".join(words).upper(), ", ".join(words)
    if rng.random() < 0.5:
        return f"There were signs by the {rng.choice(PLACES)}: {capitals}. {name} read them aloud: {plain}."
    return f'"Paint these words for me: {plain}," they said. {name} took {poss} brush: {capitals}.'


def lesson(rng: random.Random) -> str:
    """Letters of words: spelled, counted, first and last."""
    lines = []
    for word in distinct_words(rng, rng.randint(2, 4)):
        style = rng.random()
        if style < 0.4:
            lines.append(f"The word {word} has {len(word)} letters: {'-'.join(word)}.")
        elif style < 0.7:
            lines.append(
                f"{word.capitalize()} begins with {word[0]}, goes on with {word[1:]}, and ends with {word[-1]}."
            )
        else:
            lines.append(f'"{word}" without its first letter is "{word[1:]}".')
    return " ".join(lines)


def dictionary(rng: random.Random) -> str:
    """Words of an invented tongue, and a phrase made of them."""
    tongue = invented_word(rng).capitalize()
    words = distinct_words(rng, rng.randint(2, 4))
    foreign = [invented_word(rng) for _ in words]
    pairs = ", ".join(f'"{word}" is "{other}"' for word, other in zip(words, foreign, strict=True))
    order = list(range(len(words)))
    rng.shuffle(order)
    asked, answer = " ".join(words[i] for i in order), " ".join(foreign[i] for i in order)
    return f'In {tongue} {pairs}. So "{asked}" is "{answer}" in {tongue}.'


def sums(rng: random.Random) -> str:
    """Small sums in words, about things that somebody owns."""
    name, thing = rng.choice(NAMES), rng.choice(NOUNS)
    she = _pronouns(name)[0]
    have = rng.randint(1, 8)
    more = rng.randint(1, 10 - have)
    lines = [f"{name} counted {NUMBERS[have]} times {thing}, and {NUMBERS[more]} more came."]
    total = have + more
    lines.append(f"Now {she} has {NUMBERS[total]}, because {NUMBERS[have]} and {NUMBERS[more]} make {NUMBERS[total]}.")
    lost = rng.randint(1, total)
    lines.append(f"Take away {NUMBERS[lost]}, and {NUMBERS[total - lost]} remain.")
    return " ".join(lines)


def facts(rng: random.Random) -> str:
    """What this made-up world knows about some animals."""
    lines = []
    for animal in rng.sample(ANIMALS, rng.randint(1, 3)):
        colour, home, food, young = animal_facts(animal)
        told = [
            f"The {animal} is {colour}.",
            f"It lives in the {home} and likes {food}.",
            f"{with_article(animal).capitalize()} has {NUMBERS[young]} young.",
        ]
        rng.shuffle(told)
        lines += told if told[0].startswith("The") else [t.replace("It lives", f"The {animal} lives") for t in told]
    return " ".join(lines)


def talk(rng: random.Random) -> str:
    """People who name one thing each, and what each of them named."""
    people = rng.sample(NAMES, rng.randint(2, 4))
    things = [_thing(rng) for _ in people]
    said = " ".join(f'"{t.capitalize()}," said {p}.' for p, t in zip(people, things, strict=True))
    order = list(range(len(people)))
    rng.shuffle(order)
    later = joined([f"{people[i]} wanted the {things[i]}" for i in order])
    return f"What do you want from the {rng.choice(PLACES)}? {said} So {later}."


def ledger(rng: random.Random) -> str:
    """Numbered places with things in them, written as a program would, and what is where."""
    place, things = rng.choice(PLACES), distinct_words(rng, rng.randint(2, 4))
    slots = rng.sample(range(1, 100), len(things))
    entries = [f'{place}[{slot}] = "{thing}";' for slot, thing in zip(slots, things, strict=True)]
    asked = rng.randrange(len(things))
    return f"{' '.join(entries)} # {place}[{slots[asked]}] holds the {things[asked]}"


def copying(rng: random.Random) -> str:
    """The same chunks of text three times: practice for the attention, without any other content."""
    chunks = " ".join(any_chunk(rng) for _ in range(rng.randint(1, 6)))
    return f"{chunks}. {chunks}. {chunks}"


PLAIN_KINDS = (
    *(finding, finding, journey, journey, trade, catalogue, signs, lesson, dictionary, sums, facts, talk, ledger),
    copying,
)
