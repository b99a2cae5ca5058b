"""Weight publication: how a new policy version gets from the trainer to the engines.

A plug-in module offers `Config` and `Channel(config, run_dir=Path)` with

    folder(version) -> Path    where the trainer writes that version (Hugging Face names)
    discard(version)           once every engine holds a newer one
    close()                    removes what is left

The trainer writes, the driver says when, the engines read.
"""
