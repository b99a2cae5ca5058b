"""Where metrics go. A plug-in module offers `Config` and `Tracker(config, *, run_dir: Path)` with

    log(metrics, step)    one call an optimizer step; names such as `staleness/token_mean`
    close()               writes what is left

and optionally, as in every family, `requires` (pairs of module and how to install it) and
`check(settings)`, which raises ValueError for what cannot work on this machine. Vendor libraries
are imported in the constructor.
"""
