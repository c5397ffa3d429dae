"""Run the cases: compare them with what is stored, store them anew (--write), or write all of their bits (--bits).

python -m tests.values.run [--write | --bits FILE] [PREFIX ...]       a prefix such as methods or engines/vmap
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import nestfed
from tests.values.registry import EXPECTED, Case, differences, every_case, expected, plain, store


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.values.run")
    parser.add_argument("prefixes", nargs="*", help="only the cases whose names begin so")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--write", action="store_true", help="store the values; all others stay as they are")
    how.add_argument("--bits", type=Path, metavar="FILE", help="write all values, floats to the last bit")
    given = parser.parse_args()
    if Path(nestfed.__file__).resolve().parents[1] != EXPECTED.parents[2]:
        tell(f"The library comes from {nestfed.__file__}: set PYTHONPATH to this checkout.")
        return 2
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    logging.disable(logging.INFO)  # Flower tells of every round
    torch.set_num_threads(1)  # as in the tests: more threads add in another order
    chosen = [c for c in every_case().values() if not given.prefixes or c.name.startswith(tuple(given.prefixes))]
    found: dict[str, Any] = {}
    for one in chosen:
        began = time.perf_counter()
        found[one.name] = plain(one.values(), whole=given.bits is not None)
        tell(f"{time.perf_counter() - began:6.2f} s  {one.name}")
    if given.bits is not None:
        given.bits.write_text(json.dumps(found))  # Python writes a float so that it is read back the same
        return 0
    return write(found, not given.prefixes) if given.write else check(chosen, found)


def check(chosen: list[Case], found: dict[str, Any]) -> int:
    wrong = 0
    for one in chosen:
        for line in differences(expected(one.group).get(one.name), found[one.name], one.tolerance):
            tell(f"{one.name}{line}")
            wrong += 1
    tell(f"{len(chosen)} cases, {wrong} values differ.")
    return int(wrong > 0)


def write(found: dict[str, Any], all_of_them: bool) -> int:
    cases = every_case()
    for group in dict.fromkeys(c.group for c in cases.values()):
        new = {name: values for name, values in found.items() if cases[name].group == group}
        old = {} if all_of_them else {k: v for k, v in expected(group).items() if k in cases}
        if new:
            store(group, {**old, **new})
    tell(f"{len(found)} cases are stored.")
    return 0


def tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
