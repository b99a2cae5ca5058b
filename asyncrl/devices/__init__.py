"""Device plug-ins: one module a kind of device that ranks and engines compute on.

A module offers `Config` (no settings but `type`), optionally `requires` (pairs of package and how
to install it), `actor_options()` (what one device is to the cluster's scheduler), and a class
`Device(config)` with

- `type: str`, the torch device type, and `backend: str`, what `torch.distributed` talks over there;
- `select(local_rank) -> torch.device`: makes that device this process's current one;
- `set_threads(num)`: CPU threads torch may use for one operator in this process;
- `num_devices() -> int`: devices this process may use on this node.

Counting devices starts nothing, and no module imports a vendor library when it is imported.
"""
