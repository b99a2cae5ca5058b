"""A reward whose vendor library no machine has."""

from typing import Literal

from pydantic import BaseModel

requires = (("library_that_no_machine_has", "pip install 'library-that-no-machine-has>=2'"),)


class Config(BaseModel, frozen=True, extra="forbid"):
    """No settings."""

    type: Literal["plugin_of_mine.not_installed"] = "plugin_of_mine.not_installed"
