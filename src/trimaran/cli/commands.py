"""What each sub-command does: resolve settings, import the part that does the work, run it."""

import argparse

BENCH_PARTS = ("startup", "memory", "client-path", "offline", "serve-demo", "serve-tiny")


def serve(arguments: argparse.Namespace) -> int:
    """`trimaran serve`: this process becomes the supervisor."""
    from trimaran.cli.parser import settings_of
    from trimaran.config import resolve
    from trimaran.launch.supervisor import serve as run_supervisor

    return run_supervisor(resolve(settings_of(arguments), file=arguments.config))


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only", nargs="+", choices=BENCH_PARTS, metavar="PART",
        help=f"parts to run (default: all): {', '.join(BENCH_PARTS)}",
    )  # fmt: skip
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=URL",
        help="another OpenAI-compatible server, loaded in turn with ours (serve-demo, serve-tiny)",
    )  # fmt: skip
    parser.add_argument(
        "--serve-args", default="", metavar="ARGS", help="further arguments for trimaran serve"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the results as JSON")


def bench(arguments: argparse.Namespace) -> int:
    """`trimaran bench`."""
    from trimaran.bench.suite import run_suite

    return run_suite(arguments)
