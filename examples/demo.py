"""Runs every example, reports what it measured, and exits with 0 if all of it holds."""

import importlib
import sys
import time
import traceback

from checks import report


PARTS = {
    "mlp_carry": "Equinox issues 630 and 934: networks as carry, stateful layers as xs",
    "ppo_cartpole": "PPO on CartPole: training as one compiled call of nested scans",
    "digits_training": "Handwritten digits: model and optimiser state as the carry",
    "transformer": "A language model on Python's own documentation: its depth as one scan",
    "van_der_pol": "Van der Pol: an adaptive solver in one while loop",
}


def run(module: str, title: str) -> bool:
    """Runs one example. One that raises has failed, and the others still run."""
    print(f"{title} (examples/{module}.py)", flush=True)
    start = time.perf_counter()
    try:
        ok = report(importlib.import_module(module).main())
    except Exception:
        traceback.print_exc(file=sys.stdout)
        ok = False
    seconds = time.perf_counter() - start
    print(f"  {'ok' if ok else 'FAILED'} in {seconds:.1f} s\n", flush=True)
    return ok


def main() -> int:
    failed = [module for module, title in PARTS.items() if not run(module, title)]
    if failed:
        print(f"FAILED: {', '.join(failed)}")
        return 1
    print(f"All {len(PARTS)} parts hold.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
