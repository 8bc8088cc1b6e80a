"""Tables in README and docs are what bench/results and the code say."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_tables_are_generated_from_the_committed_results_and_the_code() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "bench" / "tables.py"), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
