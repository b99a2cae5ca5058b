"""`python -m asyncrl.train [--config FILE] [--dry-run] [key=value ...]`: one run.

Load, check, build, run, say how it went. Exit codes: 0 done, 1 the run failed, 2 the configuration
is wrong (nothing was started), 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from asyncrl import config as configuration
from asyncrl import preflight
from asyncrl.config import Config, ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m asyncrl.train", description=__doc__)
    parser.add_argument("--config", default="quickstart", help="YAML file, or a shipped name")
    parser.add_argument("--dry-run", action="store_true", help="check, print, start nothing")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args(argv)
    try:
        path = configuration.resolve_config_path(arguments.config)
        config = configuration.load(path, arguments.overrides)
        preflight.check(config)
    except ConfigError as error:
        print(f"asyncrl: the configuration cannot run\n{error}", file=sys.stderr)
        return 2
    if arguments.dry_run:
        print(configuration.to_yaml(config))
        print(preflight.describe(config))
        return 0
    return run(config)


def run(config: Config) -> int:
    """Builds every part of a checked configuration, runs it, and takes all of it down again."""
    from asyncrl.session import Session

    try:
        session = Session(config)
    except (ConfigError, OSError) as error:
        print(f"asyncrl: run.dir={config.run.dir} cannot be used: {error}", file=sys.stderr)
        return 2
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
