"""``python -m burst_attention``: what a bug report needs, and self-checks of seconds.

``python -m burst_attention schedule`` predicts how long a schedule takes on a machine,
``python -m burst_attention offload`` whether caches on other devices pay, and
``python -m burst_attention kernels`` says which kernels compute a call on a GPU.
"""

import argparse
import sys

from burst_attention._cli import check, kernels, offload, report, schedule


def main() -> int:
    """Carries out the command; without one, prints the report. Returns 0 if all went well."""
    parser = argparse.ArgumentParser(prog="python -m burst_attention", description=__doc__)
    commands = parser.add_subparsers(title="commands")
    schedule.add_parser(commands)
    offload.add_parser(commands)
    kernels.add_parser(commands)
    check.add_parser(commands)
    parser.set_defaults(run=lambda _: report.report())
    flags = parser.parse_args()
    return int(flags.run(flags))


if __name__ == "__main__":
    sys.exit(main())
