"""Units of measure and currencies by name, so that 5 km, 5000 m and 5,000 metres are one length.

Depends only on the text of a unit.  An unlisted word is no unit and is ignored.
"""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction
from functools import cache, lru_cache
from typing import NamedTuple

_SI = {"l": "L", **{symbol: symbol for symbol in "m g s L A Hz J N Pa V W eV mol Ω".split()}}
_PREFIXES = {"": 0, "k": 3, "M": 6, "G": 9, "c": -2, "m": -3, "μ": -6, "n": -9}
_NAMED = """
% 1/100 % percent
$ 1 $ usd dollar
€ 1 € eur euro
£ 1 £ gbp
¥ 1 ¥ jpy yen 円
元 1 元 cny yuan
₹ 1 ₹ inr rs rupee
° 1 ° deg degree
°C 1 °C degC celsius
°F 1 °F degF fahrenheit
K 1 K kelvin
s 1 sec second
s 60 min minute
s 3600 h hr hour
s 86400 day
m 1 meter metre
m 1000 kilometer kilometre
m 1/100 centimeter centimetre
m 1/1000 millimeter millimetre
m 127/5000 inch inche
m 381/1250 ft foot feet
m 201168/125 mi mile
g 1 gram
g 1000 kilogram
L 1 liter litre
"""
_PART = re.compile(r"(?P<by>[/*]?)(?P<name>[^\W\d_]+|[%$€£¥₹元円]|°[CF]?)(?:\^(?P<power>-?\d))?")


class Unit(NamedTuple):
    """`factor` of `dimension`: 1000 m.  A bare number has the dimension ""."""

    dimension: str = ""
    factor: Fraction = Fraction(1)


@cache
def _by_name() -> dict[str, Unit]:
    units: dict[str, Unit] = {}
    for line in _NAMED.strip().splitlines():
        dimension, factor, *names = line.split()
        units |= dict.fromkeys(names, Unit(dimension, Fraction(factor)))
    for symbol, base in _SI.items():
        for prefix, power in _PREFIXES.items():
            units.setdefault(prefix + symbol, Unit(base, Fraction(10) ** power))
    return units


def _single(name: str) -> Unit | None:
    """Return the unit of a name without powers; symbols are case-sensitive, words may be plural or
    capitalized.
    """
    units = _by_name()
    word = name.lower()
    if name in units or len(word) < 3:
        return units.get(name)
    return units.get(word) or units.get(word.removesuffix("s"))


@lru_cache(4096)
def unit_of(text: str) -> Unit | None:
    """Return the unit of a text like km/h, m^2 or %; None for other text."""
    powers: Counter[str] = Counter()
    factor = Fraction(1)
    end = 0
    for part in _PART.finditer(text):
        single = _single(part["name"])
        if single is None or part.start() != end:
            return None
        power = int(part["power"] or 1) * (-1 if part["by"] == "/" else 1)
        powers[single.dimension] += power
        factor *= single.factor**power
        end = part.end()
    if not powers or end != len(text):
        return None
    return Unit(
        " ".join(
            f"{name}^{power}" if power != 1 else name for name, power in sorted(powers.items())
        ),
        factor,
    )
