"""The YAML file of --config as a source of options, after flags and environment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from cyclopts import App
from cyclopts.argument import ArgumentCollection
from cyclopts.config import Dict

from decodestep.service.options import OptionError


class ConfigFile:
    """A cyclopts config source. One file serves all commands: each takes the keys that it knows."""

    def __init__(self, root: App) -> None:
        self._root = root

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Fill in what the sources before left open. Raises OptionError."""
        argument = arguments.get("--config", None)
        if argument is None or not argument.tokens:
            return
        path = Path(argument.tokens[0].value)
        values = {str(key).replace("_", "-"): value for key, value in _read(path).items()}
        if unknown := values.keys() - set(self._known_keys()):
            names = ", ".join(sorted(key.replace("-", "_") for key in unknown))
            raise OptionError("config", path, f"keys that are options, but no command has {names}")
        Dict(values, source=str(path), use_commands_as_keys=False, allow_unknown=True)(
            app, commands, arguments
        )

    def _known_keys(self) -> Iterator[str]:
        for name in self._root:
            if not name.startswith("-"):
                for argument in self._root[name].assemble_argument_collection():
                    yield argument.name.removeprefix("--")


def _read(path: Path) -> dict[Any, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError("config", path, f"a YAML file that can be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise OptionError("config", path, f"YAML ({error})") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise OptionError("config", path, "`option: value` lines")
    return values
