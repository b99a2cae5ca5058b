"""`python -m asyncrl.train [--config FILE] [--dry-run] [key=value ...]`: one run.

Load, check, build, run, say how it went. Exit codes: 0 done, 1 the run failed, 2 the configuration
is wrong (nothing was started), 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence

from asyncrl import config_file, preflight
from asyncrl.config import Config, ConfigError

_DESCRIPTION = """\
Trains a language model by reinforcement learning, generating and training at the same time."""
_EPILOG = """\
examples:
  python -m asyncrl.train
  python -m asyncrl.train --config quickstart trainer.total_steps=50 async.staleness_threshold=0.5
  python -m asyncrl.train --config my.yaml data.type=jsonl data.path=rows.jsonl --dry-run

exit codes:
  0    done
  1    the run failed; the run folder says why
  2    the configuration cannot run; nothing was started
  130  interrupted"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    arguments = _parser().parse_intermixed_args(argv)
    try:
        path = config_file.resolve_config_path(arguments.config)
        config = config_file.load(path, arguments.overrides)
        preflight.check(config)
    except ConfigError as error:
        print(f"asyncrl: the configuration cannot run\n{error}", file=sys.stderr)
        return 2
    if arguments.dry_run:
        print(config_file.to_yaml(config))
        print(preflight.describe(config))
        return 0
    return run(config)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m asyncrl.train",
        usage="%(prog)s [--config FILE] [--dry-run] [key=value ...]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="a setting that replaces the file's, by its dotted key",
    )
    parser.add_argument(
        "--config",
        default="quickstart",
        metavar="FILE",
        help="a YAML file, or one of these that come along: "
        f"{', '.join(config_file.shipped_names())} (default: %(default)s)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything, print the whole configuration and its sizes, start nothing",
    )
    return parser


def run(config: Config) -> int:
    """Builds every part of a checked configuration, runs it, and takes all of it down again."""
    from asyncrl.session import Session

    try:
        session = Session(config)
    except (ConfigError, OSError) as error:
        print(f"asyncrl: run.dir={config.run.dir} cannot be used: {error}", file=sys.stderr)
        return 2
    # A shell script's background job starts with SIGINT ignored, and asyncio then leaves it so;
    # SIGTERM, which is turned into it, would be lost as well.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        asyncio.run(session.run())
    except KeyboardInterrupt:
        session.screen.warn(f"interrupted; what there is lies in {session.folder.root}")
        return 130
    except Exception as error:
        session.screen.warn(f"the run failed: {error}")
        session.screen.warn(f"details in {session.record_failure(error)}")
        return 1
    finally:
        session.screen.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
