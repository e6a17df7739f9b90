"""Writes docs/flags.md from config.py: ``python -m trimaran.cli.flags_doc > docs/flags.md``."""

import sys

from trimaran.cli.parser import describe
from trimaran.cli.vllm_flags import VLLM_FLAGS
from trimaran.config import Config, fields


def render() -> str:
    """The page, as Markdown."""
    lines = [
        "# Settings",
        "",
        "Generated from `src/trimaran/config.py` by `python -m trimaran.cli.flags_doc`;"
        " a test holds it current.",
        "",
        "A setting is taken from its flag, else from the environment, else from the `--config` file"
        " (YAML, names in snake_case or kebab-case), else from its default.",
        "",
    ]
    sections = {name: kind for name, kind in Config.__annotations__.items() if name != "engine"}
    for section, kind in sections.items():
        lines += [f"## {section}", "", (kind.__doc__ or "").strip(), ""]
        lines += ["| flag | environment | values | meaning |", "|---|---|---|---|"]
        for field in fields():
            if field.section != section:
                continue
            flag = "`MODEL`" if field.name == "model" else f"`{field.flag}`"
            if field.is_flag:
                flag += f", `--no-{field.flag[2:]}`"
            values = ", ".join(map(str, field.choices)) or _values(field.plain_type, field.is_list)
            values = "size (512M, 2G)" if field.is_size else values
            lines.append(f"| {flag} | `{field.env}` | {values} | {describe(field)} |")
        lines.append("")
    lines += [
        "## Coming from vLLM",
        "",
        "| vLLM's flag | here | |",
        "|---|---|---|",
        *(
            f"| `{name}` | {flag.status.value} | {flag.advice} |"
            for name, flag in VLLM_FLAGS.items()
        ),
        "",
    ]
    return "\n".join(lines)


def _values(kind: object, is_list: bool) -> str:
    if is_list:
        return "one or more texts"
    names: dict[object, str] = {int: "integer", float: "number", bool: "on, off"}
    return names.get(kind, "text")


if __name__ == "__main__":
    sys.stdout.write(render())
