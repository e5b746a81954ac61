from __future__ import annotations

import argparse
import os
import sys
from importlib.metadata import version
from importlib.util import find_spec

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from clients import serving, training

PACKAGES = ("torch", "transformers", "accelerate", "trl", "lm_eval", "sentence_transformers")


def main() -> int:
    parser = argparse.ArgumentParser(description="Real clients of patched models, in one table.")
    parser.add_argument("--only", default="", help="clients whose name holds this")
    parser.add_argument("--stock", help="a Python of an environment without rope_ext, for stock transformers")
    given = parser.parse_args()
    if given.stock:
        serving.STOCK_PYTHON[:] = [given.stock]
    print(", ".join(f"{name} {version(name)}" for name in PACKAGES if find_spec(name)), end="\n\n")
    print("| client | family | method | outcome |\n|---|---|---|---|", flush=True)
    bad = 0
    for case in training.CASES + serving.CASES:
        if given.only not in case.client:
            continue
        missing = find_spec(case.package) is None
        outcome = f"skipped: {case.package} is not installed" if missing else case.outcome()
        right = missing or case.as_expected(outcome)
        bad += not right
        mark = "" if right else "**not as expected** "
        row = f"| {case.client} | {case.family} | {case.method} | {mark}{outcome[:220]} |"
        print(row.replace("\n", " "), flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
