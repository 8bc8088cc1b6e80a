"""`python -m sidestream_order.check_trace script.py [args]`."""

from __future__ import annotations

import argparse
import sys

from sidestream_kv.errors import ConfigError
from sidestream_order.check_trace.script import DEVICES, WRONG_INPUT, check_script


def main() -> int:
    """Run the script that `sys.argv` names. The report goes to standard error. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="check_trace", description="Run a PyTorch script, and judge its use of CUDA streams."
    )
    parser.add_argument("--device", default="", choices=DEVICES, help="default: the GPU, or without one a fake GPU")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    try:
        judgement = check_script(options.script, options.arguments, device=options.device)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_INPUT
    sys.stdout.flush()
    print(judgement, file=sys.stderr)
    return judgement.status


if __name__ == "__main__":
    sys.exit(main())
