"""Words of our own choosing: common ones for tasks that need distinct words or keys, and people who do not exist."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product

ADJECTIVES = tuple(
    "amber ancient angry anxious awkward basic bitter blue bouncy brave brief bright brisk broad broken bronze brown "
    "bumpy busy calm careful careless cheap cheerful chilly chubby clean clear clever clumsy coarse cosy crafty crazy "
    "creamy crisp crooked curious curly damp dark decent deep dense dizzy double dreamy dull dusty eager early easy "
    "elastic elegant empty endless exact faint faithful famous fancy fierce final flat fluffy fond foolish formal "
    "fragile frank fresh friendly frosty frozen funny fuzzy gentle giant gloomy golden graceful grand grateful greedy "
    "green grumpy handy happy hasty hollow honest huge humble hungry idle jolly joyful juicy keen kind large lazy "
    "legal light little lively local lonely loyal lucky mellow merry messy mighty modern modest muddy narrow nasty "
    "neat nervous nimble noble noisy novel orange oval pale patient perfect plain playful pleasant polite proper "
    "proud purple quaint quick quiet rapid rare ready rigid ripe rough round royal rusty sandy scarlet serious "
    "shallow sharp shiny silent silly simple sleepy slender slim slow smart smooth snug solar solid sour spicy stable "
    "steady steep sticky strange strict strong sturdy sudden sunny sweet swift tender thick thirsty tidy tiny tired "
    "tough tricky true urgent useful vague vast vivid warm weak weary wicked wild wise witty wobbly wooden yellow "
    "young".split()
)

NOUNS = tuple(
    "acorn anchor apron avenue badge bakery balcony balloon banana barrel basket beach beetle bicycle blanket bottle "
    "branch bridge broom bucket bullet button cabbage cactus camel candle canyon carpet carrot castle cattle ceiling "
    "cellar cherry chimney church circus clock cloud cobweb coffee collar compass copper cottage cousin cradle crayon "
    "cricket crown curtain cushion daisy dancer desert diamond dolphin donkey dragon drawer drum eagle engine falcon "
    "farmer feather fence ferry fiddle finger flower forest fossil fountain garage garden giraffe glove goblet guitar "
    "hammer harbour hedge helmet hermit hotel island jacket jelly jigsaw jungle kennel kettle kitchen kitten ladder "
    "lantern lemon leopard library lizard lobster locket magnet mango marble market meadow mirror mitten monkey "
    "museum mushroom napkin needle nephew nugget oasis ocean office onion orchard ostrich otter oyster paddle palace "
    "parcel parrot pebble pencil pepper piano pigeon pillow pirate planet pocket pony potato puddle pumpkin puppet "
    "puzzle pyramid rabbit radio raven ribbon river robot rocket saddle sailor salmon sandal scarf school shadow "
    "shovel shrimp skirt sledge snail soldier sparrow spider sponge spoon statue stove street sugar summit sunset "
    "tablet teacher temple thimble thunder ticket tiger timber toast tomato tractor trumpet tulip tunnel turtle "
    "umbrella uncle valley vanilla velvet village violin volcano waffle wagon wallet walnut weasel whistle window "
    "winter wizard yacht zebra".split()
)

SINGLES = ADJECTIVES + NOUNS
"""No word is contained in another one, so that an answer that names one word does not name a second one by accident."""

PAIRS = len(ADJECTIVES) * len(NOUNS)
"""How many "adjective-noun" pairs there are."""


def vocabulary(count: int, rng: random.Random) -> list[str]:
    """Distinct words in random order: single words if they suffice, else all of them "adjective-noun" pairs.

    Raises:
        ValueError: more are asked for than there are pairs.
    """
    if count <= len(SINGLES):
        return rng.sample(SINGLES, count)
    return pairs(count, rng)


def pairs(count: int, rng: random.Random) -> list[str]:
    """Distinct "adjective-noun" pairs in random order.

    Raises:
        ValueError: more are asked for than there are.
    """
    if count > PAIRS:
        raise ValueError(f"count {count} is more than the {PAIRS} distinct words there are.")
    chosen = rng.sample(range(PAIRS), count)
    return [f"{ADJECTIVES[place // len(NOUNS)]}-{NOUNS[place % len(NOUNS)]}" for place in chosen]


FIRST_NAMES = tuple(
    "Adela Anselm Beatrix Bertram Clemens Cordula Dagmar Edmund Elfriede Erwin Fabian Florian Gerda Gudrun Hedwig "
    "Helmut Ingrid Isolde Jolanda Konrad Leopold Ludmila Magnus Mathilde Norbert Ottilie Quirin Reinhold Rosalind "
    "Sieglinde Sigmund Tabitha Theodor Ulrike Valentin Veronika Waldemar Wendelin Winifred Xaver".split()
)

LAST_NAMES = tuple(
    "Ambergill Barnstock Brackwater Cobbleton Dornfeld Eschenbrook Farrowby Fennimore Garthside Gravenhill Hallowdene "
    "Hartigan Holmquist Kestrelby Kirschwald Lanternby Lindqvast Marchbanks Merrowick Nettlefold Oakenshaw Ormsgarth "
    "Pellingham Quillfeather Ravenscar Rookhope Sallowfield Silverlode Skelderby Stormgate Tarnowitz Thistlewood "
    "Underbarrow Vanterpool Wetherlam Whinfell Windermoor Wolkenstein Yarrowdale Zimmerton".split()
)

NAMES = tuple(f"{first} {last}" for first, last in product(FIRST_NAMES, LAST_NAMES))


@dataclass(frozen=True)
class Fact:
    """One thing to know about a person. No value is contained in another one."""

    question: str
    wordings: tuple[str, ...]
    """Ways to say it, with ``{name}`` and ``{value}``."""
    values: tuple[str, ...]


FACTS = (
    Fact(
        "In which town was {name} born?",
        (
            "{name} was born in the town of {value}, in a house by the mill.",
            "The town where {name} was born is {value}, although the family moved away soon.",
        ),
        tuple(
            "Abbotsmere Birkenholm Calderwick Dunmarsh Eastrigg Felsberg Glenfinnoch Harrowgate Innisfern Jasperville "
            "Kaltenbrunn Lockhaven Moorcastle Nordhavn Oldstead Pinewhistle Quarrington Rotherbeck Saltmarket "
            "Tannenau Upperfold Vinterby Westerholt Yellowsand".split()
        ),
    ),
    Fact(
        "In which year did {name} leave school?",
        (
            "{name} left school with good marks in the year {value}.",
            "It was in the summer of {value} that {name} left school.",
        ),
        tuple(str(year) for year in range(1921, 1990)),
    ),
    Fact(
        "What was the profession of {name}?",
        (
            "By profession {name} was a {value}, taught by an uncle.",
            "{name} became a {value}, a profession that nobody in the family had had before.",
        ),
        tuple(
            "baker beekeeper blacksmith botanist carpenter chemist clockmaker cobbler dentist fisherman gardener "
            "glassblower goldsmith hairdresser journalist lawyer librarian locksmith mathematician photographer "
            "plumber printer surveyor tailor translator watchmaker".split()
        ),
    ),
    Fact(
        "Which company did {name} work for?",
        (
            "For most of a long working life {name} was employed by the company {value}.",
            "The company that {name} worked for until retirement was {value}.",
        ),
        tuple(
            " ".join(parts)
            for parts in product(
                "Alderton Brisling Copperfield Dovetail Farthing Grindstone".split(),
                "Brothers Glassworks Printing Railways".split(),
            )
        ),
    ),
    Fact(
        "What was the favourite hobby of {name}?",
        (
            "On Sundays {name} had time for a favourite hobby, which was {value}.",
            "Friends say that {value} was the favourite hobby of {name}.",
        ),
        tuple(
            "archery astronomy birdwatching calligraphy canoeing chess embroidery falconry fencing hiking juggling "
            "knitting mushrooming origami painting pottery quilting rowing sailing singing skating swimming weaving "
            "whittling".split()
        ),
    ),
    Fact(
        "Which animal did {name} keep?",
        (
            "In the yard {name} kept an animal with a bell around its neck, a {value}.",
            "The only animal that {name} ever kept was a {value}, and it came along on journeys.",
        ),
        tuple(
            "badger camel canary donkey ferret goat goose hamster hedgehog llama lizard magpie monkey parrot peacock "
            "pelican pony rabbit raven sheep squirrel tortoise turkey zebra".split()
        ),
    ),
)
