"""`--config FILE.yaml`: reads a command's options from a file; the command line and environment variables override it.

This module contains no option names. The allowed keys and the types of their values come from the command's options.
"""

from __future__ import annotations

import inspect
import io
import reprlib
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from sidestream.cli.declare import option
from sidestream.config import RENAMED
from sidestream.errors import ConfigError
from sidestream_kv.config import renamed_option, unknown_name

# Options whose values error messages never show.
_SECRETS = ("api_key",)


def _apply(context: typer.Context, path: Path | None) -> Path | None:
    """Use the file's values as the options' defaults. Raises ConfigError."""
    if path is not None:
        command = context.command.callback
        assert command is not None
        known = {
            name: one for name, one in inspect.signature(command, eval_str=True).parameters.items() if name != "config"
        }
        for name, (key, given) in _by_name(path, _read(path), list(known)).items():
            of_several = isinstance(given, str) and list[Path] in _kinds(known[name].annotation)
            value = [given] if of_several else given
            expected = _type_error(value, known[name].annotation)
            if expected is not None:
                raise ConfigError(f"{path} sets {key} to {_shown(name, value)}: {expected}")
            context.default_map = {**(context.default_map or {}), name: value}
    return path


ConfigFile = Annotated[
    Path | None,
    option(
        "--config",
        metavar="FILE.yaml",
        help="Read options from this file; the command line overrides them.",
        show_default=False,
        callback=_apply,
        is_eager=True,
    ),
]


def _read(path: Path) -> list[tuple[Any, Any]]:
    """The keys and values of the file's mapping, in the file's order. A repeated key is returned each time."""
    try:
        import yaml
    except ModuleNotFoundError:
        raise ConfigError("--config needs the package PyYAML: pip install 'sidestream[server]'") from None
    try:
        # Parse a stream, not a string: for a string, the parser's errors quote lines, which may contain the API key.
        loader = yaml.SafeLoader(io.StringIO(path.read_bytes().decode("utf-8")))
        loader.name = "the file"
        try:
            root = loader.get_single_node()
            if root is None:
                return []
            if not isinstance(root, yaml.MappingNode):
                raise ConfigError(f"{path} holds no options: write lines such as kv-memory: 2GiB")
            return [
                (loader.construct_object(key, deep=True), loader.construct_object(value, deep=True))
                for key, value in root.value
            ]
        finally:
            loader.dispose()
    except OSError as failure:
        raise ConfigError(
            f"cannot read the config file {path}: {failure.strerror}; give a YAML file that exists"
        ) from None
    except UnicodeDecodeError as failure:
        raise ConfigError(f"{path} is not UTF-8: invalid byte at position {failure.start}; save it as UTF-8") from None
    except (yaml.YAMLError, ValueError, RecursionError) as failure:  # PyYAML raises ValueError for an impossible date
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(failure).split())}") from None


def _by_name(path: Path, pairs: list[tuple[Any, Any]], known: list[str]) -> dict[str, tuple[str, Any]]:
    """Each key and its value, by the option's name. Raises ConfigError for unknown and repeated keys."""
    found: dict[str, tuple[str, Any]] = {}
    for key, value in pairs:
        name = key.replace("-", "_") if isinstance(key, str) else ""
        if name not in known:
            if name in RENAMED:
                wrong = renamed_option(key, RENAMED[name].replace("_", "-"))
            else:
                wrong = unknown_name("option", str(key)[:64], [one.replace("_", "-") for one in known])
            raise ConfigError(f"{path} sets {str(key)[:64]} to {_shown(name, value)}: {wrong}")
        if name in found:
            raise ConfigError(
                f"{path} sets {key} twice ({_shown(name, found[name][1])} and {_shown(name, value)}): remove one"
            )
        found[name] = key, value
    return found


def _type_error(value: Any, annotation: Any) -> str | None:
    """An error message with the type that the option needs; None if the value has that type.

    YAML guesses types (`off` is false, 010 is 8). So if an option needs a text, a number or boolean is an error and is
    not converted.
    """
    kinds = _kinds(annotation)
    if bool in kinds:
        return None if isinstance(value, bool) else "it must be true or false"
    if kinds & {list[str], list[Path]}:
        texts = isinstance(value, list) and all(isinstance(one, str) for one in value)
        return None if texts else 'it must be a list of texts, such as ["a", "b"]'
    if int in kinds or float in kinds:
        fits = isinstance(value, int | float) if float in kinds else isinstance(value, int)
        return (
            None if fits and not isinstance(value, bool) else f"it must be a {'' if float in kinds else 'whole '}number"
        )
    for choices in kinds:
        if issubclass(choices, Enum) and value not in list(choices):
            return f"it must be one of {', '.join(choices)}"
    return None if isinstance(value, str) else "it must be a text: put it in quotes, or leave it out"


def _kinds(annotation: Any) -> set[Any]:
    """The types that an option's value may have."""
    kind, *_ = get_args(annotation)
    return set(get_args(kind)) - {type(None)} or {kind}


def _shown(name: str, value: Any) -> str:
    return "a value that is not shown" if name in _SECRETS else reprlib.repr(value)
