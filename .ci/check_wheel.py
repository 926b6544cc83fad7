"""check_wheel.py WHEEL [GLIBC]: fails unless a wheel's tag is true, and the wheel small enough.

auditwheel must find the tag that the build hook wrote, from the symbols of all libraries. Where a
newest glibc is named, such as 2.28, the wheel must run there.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

LARGEST_MB = 100


def main(path: str, newest: str = "") -> None:
    """Checks a wheel and prints its tag and size."""
    wheel = Path(path)
    command = [sys.executable, "-m", "auditwheel", "show", "--json", path]
    ran = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    tag, audited = wheel.stem.split("-")[-1], json.loads(ran.stdout)["overall_tag"]
    if tag != audited:
        sys.exit(f"{wheel}: expected the platform tag {audited} that auditwheel finds, got {tag}")
    glibc = re.search(r"_(\d+)_(\d+)_", tag).groups()
    if newest and tuple(map(int, glibc)) > tuple(map(int, newest.split("."))):
        sys.exit(f"{wheel}: expected a wheel for glibc {newest}, got one for {'.'.join(glibc)}")
    megabytes = wheel.stat().st_size / 1e6
    if megabytes >= LARGEST_MB:
        sys.exit(f"{wheel}: expected less than {LARGEST_MB} MB, got {megabytes:.0f} MB")
    print(f"{wheel.name}: {megabytes:.1f} MB, auditwheel finds {audited}")


if __name__ == "__main__":
    main(*sys.argv[1:])
