"""Engines: one module a way to generate completions.

A module offers `Config` (a frozen pydantic model whose `type` names the module) and

    class Engine:
        def __init__(self, config: Config, *, model_folder: Path, log_folder: Path, seed: int,
                     num_threads: int, device: str, max_model_len: int) -> None: ...

which implements `asyncrl.interfaces.Engine`. `model_folder` is a Hugging Face folder, `log_folder`
is where the engine's own log goes, `num_threads` bounds its CPU threads, `device` is a torch device
string, `max_model_len` is the longest prompt plus completion in tokens. The constructor is cheap
and checks nothing that needs the model; `start` does the work. Modules whose names start with an
underscore are parts of an engine, not engines.
"""
