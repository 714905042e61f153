"""Write a travel CSV of any size, always the same one: python make_large.py --rows 500000 --year 2026."""

from __future__ import annotations

import argparse
import csv
import random
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path

COLUMNS = ["reference", "organisation_unit", "activity", "date", "amount", "unit"]
FACULTIES = ["ARCH", "BIO", "CHEM", "CIVIL", "ECON", "LIB", "MATH", "MECH", "PHYS"]
TRIPS = [  # activity, weight, unit, minimum, maximum
    ("train", 40, "km", 12, 900),
    ("flight_short_haul", 16, "km", 250, 1500),
    ("hotel", 14, "night", 1, 6),
    ("car_petrol", 9, "km", 8, 450),
    ("taxi", 7, "km", 2, 40),
    ("flight_long_haul", 6, "km", 3900, 11800),
    ("bus", 4, "km", 3, 200),
    ("flight_short_haul", 2, "nmi", 140, 800),
    ("car_electric", 2, "mi", 5, 200),
]
SPOILT = [  # mistakes that people make: column, text
    ("amount", "1.204,50"),
    ("unit", "kilometers"),
    ("date", "31.05.2026"),
    ("amount", "-85"),
    ("organisation_unit", ""),
    ("date", "2019-02-11"),
    ("amount", "n/a"),
]


def rows(count: int, year: int, bad: int) -> Iterator[dict[str, str]]:
    """The rows of the file; `bad` of them, evenly spread, are invalid."""
    chance = random.Random(year)
    spoilt = {count * (place + 1) // (bad + 1) for place in range(bad)}
    weights = [often for _, often, _, _, _ in TRIPS]
    for number in range(count):
        activity, _, unit, shortest, longest = chance.choices(TRIPS, weights)[0]
        amount = chance.uniform(shortest, longest)
        row = {
            "reference": f"T{year % 100:02d}-{number + 1:07d}",
            "organisation_unit": f"{chance.choice(FACULTIES)}-{chance.randint(1, 6):02d}",
            "activity": activity,
            "date": str(date(year, 1, 1) + timedelta(days=chance.randrange(365))),
            "amount": f"{amount:.0f}" if unit == "night" else f"{amount:.1f}",
            "unit": unit,
        }
        if number in spoilt:
            column, text = SPOILT[sorted(spoilt).index(number) % len(SPOILT)]
            row[column] = text
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--bad", type=int, default=7, help="number of invalid rows")
    parser.add_argument("--year", type=int, default=2026)
    parser.add_argument("--to", type=Path, default=Path(__file__).parent / "data" / "travel_large.csv")
    given = parser.parse_args()
    with given.to.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows(given.rows, given.year, given.bad))


if __name__ == "__main__":
    main()
