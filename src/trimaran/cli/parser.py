"""The argument parser: sub-commands, and flags generated from config.py.

Owns: how settings become flags and how an unknown flag is answered. Imports no torch and no web
framework, so that ``--help`` is immediate.
"""

import argparse
import difflib
import sys
from typing import Any, NoReturn

from trimaran import __version__
from trimaran.cli import commands
from trimaran.cli.vllm_flags import VLLM_FLAGS, Status
from trimaran.config import ENV_PREFIX, Field, fields
from trimaran.errors import ConfigError

SERVE_EXAMPLES = f"""examples:
  trimaran serve demo                              the packaged Gemma 3 270M on http://127.0.0.1:8000
  trimaran serve ./my-model --port 9000            a folder with config.json and safetensors
  trimaran serve model.gguf --max-model-len 4096   a GGUF file
  trimaran serve ORG/NAME@main --api-key SECRET    from the hub, with a key
  trimaran serve demo --config serve.yaml          settings from a file (port: 9000 …)

A setting is taken from its flag, else from the environment ({ENV_PREFIX}PORT for --port), else from
the --config file, else from its default. Every flag is described in docs/flags.md.
"""
BENCH_EXAMPLES = """examples:
  trimaran bench                                   everything, as a table (make bench)
  trimaran bench --only serve-demo                 one part
  trimaran bench --peer vllm=http://127.0.0.1:9001 the same load on another server, in turn
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="trimaran",
        description="Serve large language models over an OpenAI-compatible API.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n  trimaran serve demo\n  trimaran serve --help",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"trimaran {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    serve = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve a model over an OpenAI-compatible HTTP API.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=SERVE_EXAMPLES,
        allow_abbrev=False,
    )
    add_settings(serve)
    serve.set_defaults(run=commands.serve)
    bench = subparsers.add_parser(
        "bench",
        help="measure speed, start-up and memory",
        description="Measure this machine, and other servers in turn; prints a table.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=BENCH_EXAMPLES,
        allow_abbrev=False,
    )
    commands.add_bench_arguments(bench)
    bench.set_defaults(run=commands.bench)
    parser.set_defaults(run=lambda _: _print_help(parser))
    return parser


def _print_help(parser: argparse.ArgumentParser) -> int:
    parser.print_help(sys.stderr)
    return 2


def add_settings(parser: argparse.ArgumentParser) -> None:
    """MODEL, --config, and one flag per setting, grouped by section."""
    parser.add_argument("--config", metavar="FILE", help="YAML file with settings")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in fields():
        if field.name == "model":
            parser.add_argument("model", nargs="?", metavar="MODEL", help=field.help)
            continue
        group = groups.setdefault(field.section, parser.add_argument_group(field.section))
        _add_flag(group, field)


def _add_flag(group: "argparse._ArgumentGroup", field: Field) -> None:
    options: dict[str, Any] = {
        "dest": field.name,
        "default": None,
        "help": describe(field).replace("%", "%%"),
    }
    if field.is_flag:
        group.add_argument(field.flag, action=argparse.BooleanOptionalAction, **options)
        return
    options["metavar"] = (
        "{" + ",".join(map(str, field.choices)) + "}" if field.choices else _metavar(field)
    )
    if field.is_list:
        options["nargs"] = "+"
    group.add_argument(field.flag, **options)


def describe(field: Field) -> str:
    """The help text with the default, where there is one worth naming."""
    if field.default in (None, (), "") or field.is_secret or "(default" in field.help:
        return field.help
    default = field.default
    if field.is_flag:
        default = "on" if default else "off"
    elif field.is_size:
        default = f"{default >> 20}M"
    return f"{field.help} (default {default})"


def _metavar(field: Field) -> str:
    if field.is_size:
        return "SIZE"
    if field.plain_type in (int, float):
        return "N"
    return "TEXT"


def parse(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """Parse, answering unknown flags with advice.

    Raises ConfigError: names the flag and the nearest one, or what to use instead.
    """
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        raise ConfigError(
            "; ".join(_advice(item) for item in unknown if item.startswith("-"))
            or (f"unexpected argument {unknown[0]!r}; see `trimaran --help`")
        )
    _check_lists(arguments)
    return arguments


def _check_lists(arguments: argparse.Namespace) -> None:
    """A flag that takes several values also takes a MODEL behind it: ask rather than guess."""
    if getattr(arguments, "model", "") is not None:
        return
    for field in fields():
        values = getattr(arguments, field.name, None)
        if field.is_list and values is not None and len(values) > 1:
            shown = "its values" if field.is_secret else " ".join(values)
            raise ConfigError(
                f"{field.flag} took {shown}, and MODEL is missing: put MODEL before the flags"
            )


def _advice(flag: str) -> str:
    name = flag.split("=")[0]
    known = VLLM_FLAGS.get(name)
    if known is not None and known.status is not Status.SAME:
        return f"{name}: {known.advice}"
    ours = [field.flag for field in fields()] + ["--config", "--help", "--version"]
    nearest = difflib.get_close_matches(name, ours, n=1, cutoff=0.5)
    hint = f"; did you mean {nearest[0]}?" if nearest else "; see `trimaran serve --help`"
    return f"unknown flag {name}{hint}"


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings the user gave as flags, by field name."""
    names = {field.name for field in fields()}
    return {k: v for k, v in vars(arguments).items() if k in names and v is not None}
