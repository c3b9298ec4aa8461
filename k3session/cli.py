# SPDX-License-Identifier: MIT
"""The command ``k3session``.  docs/cli.md describes it.

Exit codes: 0 done; 1 refused or failed, with one sentence on stderr; 2 wrong usage; 130 interrupted by Ctrl-C.
Results go to stdout, everything else to stderr; progress only where stderr is a terminal.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from k3session import __version__
from k3session.errors import K3Error

__all__ = ["main"]

_Command = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None, *, open_model: Callable[..., Any] | None = None) -> int:
    """Run the command line and return its exit code.

    ``open_model(folder, **options)`` opens models in place of `Model.open`.
    """
    args = _parser().parse_args(argv)
    args.open_model = open_model
    if args.verbose:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s", stream=sys.stderr)
    try:
        return int(args.run(args))
    except BrokenPipeError:
        # The reader has gone, as in `k3session generate ... | head`; nothing is left to say to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("k3session: interrupted", file=sys.stderr)
        return 130
    except (K3Error, OSError, ImportError) as error:
        print(f"k3session: {error}", file=sys.stderr)
    return 1


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


def _say(args: argparse.Namespace, value: dict[str, Any], lines: Callable[[], list[str]]) -> None:
    """Print a result: as JSON where it was asked for, else as text."""
    if args.json:
        _print_json(value)
    else:
        print("\n".join(lines()))


def _size(n: float) -> str:
    """Bytes for people, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


# ----------------------------------------------------------------------------------------------
# commands
# ----------------------------------------------------------------------------------------------


def _open(args: argparse.Namespace, folder: str | None) -> Any:
    from k3session.model import Model

    options = {
        "threads": args.threads,
        "weights": args.weights,
        "memory": getattr(args, "memory", None),
    }
    if getattr(args, "gpu_memory", None) is not None:
        options["gpu_memory"] = args.gpu_memory
    if args.open_model is not None and folder is not None:
        return args.open_model(folder, **options)
    options["progress"] = True
    return Model.open(**options) if folder is None else Model.open(folder, **options)


def _generate(args: argparse.Namespace) -> int:
    from dataclasses import replace

    from k3session.session import Session

    if args.session is not None and not Path(args.session).resolve().parent.is_dir():
        print(
            f"k3session: {args.session}: the folder does not exist; nothing could be saved there",
            file=sys.stderr,
        )
        return 2
    with _open(args, args.model) as model:
        tokenizer = model.tokenizer
        given = {
            n: getattr(args, n)
            for n in ("temperature", "top_k", "top_p", "min_p", "seed")
            if getattr(args, n) is not None
        }
        resumed = args.session is not None and Path(args.session).exists()
        session = Session.load(model, args.session) if resumed else model.session(latent=args.latent)
        with session:
            prompt = tokenizer.encode(args.prompt) if args.prompt else []
            if not prompt and not resumed:
                print("k3session: the prompt is empty; expected text to continue", file=sys.stderr)
                return 2
            if prompt:
                session.prefill(prompt, progress=True)
            sampling = replace(session.sampling or model.default_sampling, **given)
            if not args.json and not resumed:
                print(args.prompt, end="", flush=True)
            try:
                for r in session.generate(
                    args.max_tokens, sampling=sampling, stop=args.stop, logprobs=args.logprobs
                ):
                    if args.json:
                        print(json.dumps(r._asdict()), flush=True)
                    else:
                        print(r.text, end="", flush=True)
            finally:
                if not args.json:
                    print(flush=True)
                if args.session is not None:
                    session.save(args.session, progress=True)
    return 0


def _check(args: argparse.Namespace) -> int:
    from k3session.audit import audit

    report = audit(args.folder, deep=args.deep, progress=True)

    def lines() -> list[str]:
        state = "whole" if report["ok"] else f"{len(report['problems'])} problem(s)"
        text = [f"{args.folder}: {state}"]
        text += [f"  problem: {p}" for p in report["problems"]]
        if not report["ok"]:
            return text
        text += [f"  {key}: {_size(n)}" for key, n in (report.get("bytes") or {}).items()]
        text += [
            f"  memory, {key.replace('_', ' ')}: {_size(n)}"
            for key, n in (report.get("memory") or {}).items()
        ]
        return text

    _say(args, report, lines)
    return 0 if report["ok"] else 1


def _info(args: argparse.Namespace) -> int:
    from k3session._core.ops import BUILD, best_isa

    with _open(args, args.folder) as model:
        c = model.config
        report = {
            "k3session": __version__,
            "build": BUILD,
            "best_isa": best_isa(),
            "isa": model.isa,
            "threads": model.threads,
            "device": model.device,
            "model": str(model.path),
            "fingerprint": model.fingerprint.digest,
            "layers": c.num_hidden_layers,
            "kda_layers": len(c.kda_layers),
            "mla_layers": len(c.full_attn_layers),
            "hidden_size": c.hidden_size,
            "vocab_size": c.vocab_size,
            "max_position_embeddings": c.max_position_embeddings,
            "bytes_per_step": model._weights.step_bytes(),
            "bytes_per_token_of_context": model.bytes_per_token,
        }

    def lines() -> list[str]:
        width = max(map(len, report))
        shown = {
            **report,
            "bytes_per_step": ", ".join(f"{k} {_size(v)}" for k, v in report["bytes_per_step"].items()),
        }
        return [f"{k:{width}}  {v}" for k, v in shown.items()]

    _say(args, report, lines)
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from k3session import doctor

    report = doctor.examine()
    _say(args, report, lambda: doctor.lines(report))
    return 0 if report["ok"] else 1


def _synth(args: argparse.Namespace) -> int:
    from k3session.synth import synth

    synth(args.folder, args.preset, seed=args.seed, experts=args.experts, trunk=args.trunk, progress=True)
    return 0


def _snapshot_inspect(args: argparse.Namespace) -> int:
    from k3session.snapshot import inspect_file

    report = inspect_file(args.file)

    def lines() -> list[str]:
        text = [f"{k}: {v}" for k, v in report.items() if k not in ("tensors", "tokens", "fingerprint")]
        text.append(f"fingerprint: {report.get('fingerprint', {}).get('digest')}")
        text.append(f"tokens: {report['tokens']}")
        text += [f"  {n}  {t['dtype']} {t['shape']}  {t['xxh3_128']}" for n, t in report["tensors"].items()]
        return text

    _say(args, report, lines)
    return 0


def _snapshot_verify(args: argparse.Namespace) -> int:
    from k3session.snapshot import verify_file

    report = verify_file(args.file, progress=True)
    _say(args, report, lambda: [f"{args.file}: whole, {report['tensors']} tensors, {_size(report['bytes'])}"])
    return 0


def _snapshot_diff(args: argparse.Namespace) -> int:
    from k3session.snapshot import diff_files

    found = diff_files(args.file, args.other)
    report = {"same": not found, "differences": {k: list(v) for k, v in found.items()}}
    _say(args, report, lambda: [f"{k}: {a!r} | {b!r}" for k, (a, b) in found.items()] or ["the same"])
    return 1 if found else 0


def _snapshot_merge(args: argparse.Namespace) -> int:
    from k3session.progress import Progress
    from k3session.snapshot_parts import merge

    progress = Progress(True)
    try:
        size = merge(args.file, args.out, args.part, progress=progress)
    finally:
        progress.close()
    _say(args, {"file": args.out, "bytes": size}, lambda: [f"{args.out}: {_size(size)}"])
    return 0


def _bench(args: argparse.Namespace) -> int:
    from k3session.bench import measure

    with _open(args, args.folder) as model:
        report = measure(
            model, prompt=args.prompt_tokens, steps=args.steps, repeats=args.repeats, progress=True
        )

    def lines() -> list[str]:
        def row(name: str, key: str, scale: float, unit: str) -> str:
            v = report[key]
            middle, low, high = (v[k] * scale for k in ("median", "min", "max"))
            return f"{name:22} {middle:10.2f} {unit}  ({low:.2f} .. {high:.2f}, n {v['n']})"

        return [
            f"{report['model']} on {report['device']} ({report['isa']}, {report['threads']} threads), medians (range)",
            row("prefill", "prefill_tokens_per_second", 1, "token/s"),
            row("decode", "decode_tokens_per_second", 1, "token/s"),
            row("one step", "step_seconds", 1e3, "ms"),
            row("memory read", "read_bytes_per_second", 1e-9, "GB/s"),
            row("share of bandwidth", "share_of_bandwidth", 100, "%"),
        ]

    _say(args, report, lines)
    return 0


def _plan(args: argparse.Namespace) -> int:
    from dataclasses import replace

    from k3session.plan import plan
    from k3session.rates import ASSUMED

    given = {"disk": args.disk_rate, "memory": args.memory_rate, "cores": args.core_rate}
    given = {name: rate for name, rate in given.items() if rate is not None}
    if args.measure and given:
        print("k3session: expected --measure, or rates that are given, not both", file=sys.stderr)
        return 2
    rates = replace(ASSUMED, **given)
    report = plan(
        args.folder, args.memory, threads=args.threads, rates=rates, measured=args.measure, progress=True
    )

    def lines() -> list[str]:
        divided, seconds, each = report["memory"], report["seconds"], report["per_token"]
        how = "measured" if args.measure else "assumed or given"
        text = [f"{report['path']} within {_size(divided['budget'])}, {report['threads']} threads"]
        if divided["mapped"]:
            text.append("everything fits: the files are mapped, and nothing is read while a pass runs")
        else:
            text.append(
                f"stays in memory: {_size(divided['resident'])} of the trunk, and {divided['slots']} experts "
                f"({_size(divided['slots'] * divided['slot'])}); read ahead: {_size(divided['ring'])}"
            )
        session, process = _size(divided["session"]), _size(divided["process"])
        text.append(
            f"a session: {session}; the process without the model: {process}; "
            f"smallest budget: {_size(divided['smallest'])}"
        )
        text += [
            *(
                f"{name:7} {_size(each[name]):>10} a token at {_size(report['rates'][name])}/s ({how}): "
                f"{seconds[name]:.3g} s"
                for name in ("disk", "memory", "cores")
            ),
            f"predicted: {seconds['token']:.3g} s a token; {seconds['without_overlap']:.3g} s if nothing overlapped",
            report["advice"],
        ]
        return text

    _say(args, report, lines)
    return 0


def _rate(text: str) -> float:
    """Bytes a second, from a size."""
    from k3session.budget import read_memory

    try:
        return float(read_memory(text) or 0)
    except K3Error as problem:
        raise argparse.ArgumentTypeError(f"expected bytes a second such as 3GB, found {text!r}") from problem


def _compare(args: argparse.Namespace) -> int:
    from k3session.compare import Side, compare, record

    if (args.other is None) == (args.record is None):
        print("k3session: expected two sides, or one and --record FILE", file=sys.stderr)
        return 2
    ids = args.ids
    if args.ids_file is not None:
        try:
            ids = _ids(Path(args.ids_file).read_text(encoding="utf-8", errors="replace"))
        except argparse.ArgumentTypeError as problem:
            print(f"k3session: {args.ids_file}: {problem}", file=sys.stderr)
            return 1
    if args.record is not None:
        if ids is None:
            print("k3session: --record needs --ids or --ids-file", file=sys.stderr)
            return 2
        trace = record(Side.read(args.side), ids, threads=args.threads, progress=True)
        size = trace.save(args.record)
        report = {"file": args.record, "tokens": int(trace.tokens.size), "bytes": size, "names": trace.names}
        _say(args, report, lambda: [f"{args.record}: {report['tokens']} tokens, {_size(size)}"])
        return 0
    sides = Side.read(args.side), Side.read(args.other)
    found = compare(*sides, ids, args.bound, threads=args.threads, progress=True)
    _say(args, {"a": args.side, "b": args.other, **found.to_dict()}, found.lines)
    return 0 if found.within else 1


def _ids(text: str) -> list[int]:
    """Token ids with commas or white space between them."""
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError as problem:
        raise argparse.ArgumentTypeError(f"expected token ids such as 1,2,3: {problem}") from None


# ----------------------------------------------------------------------------------------------
# arguments
# ----------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="k3session", description="Run models of the Kimi K3 architecture as stateful sessions."
    )
    top.add_argument("--version", action="version", version=f"k3session {__version__}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--verbose", action="store_true", help="say on stderr what is being done")
    as_json = argparse.ArgumentParser(add_help=False)
    as_json.add_argument("--json", action="store_true", help="print JSON instead of text")
    threads = argparse.ArgumentParser(add_help=False)
    threads.add_argument(
        "--threads", type=int, metavar="N", help="threads of a pass; default: the cores this process may use"
    )
    threads.add_argument(
        "--weights",
        default="stored",
        choices=("stored", "compact", "q8"),
        help="recode the trunk at load: compact, the same bits in about 12 bits a weight; q8, faster, with an error",
    )
    memory = argparse.ArgumentParser(add_help=False)
    memory.add_argument(
        "--memory",
        metavar="SIZE",
        help="what the process may have in memory, such as 8GiB, or auto; default: no limit",
    )
    memory.add_argument(
        "--gpu-memory",
        metavar="SIZE",
        help="what the model may have of a GPU's memory; the rest is brought there in every pass; default: no limit",
    )
    commands = top.add_subparsers(metavar="COMMAND", required=True)

    def command(
        name: str, run: _Command, text: str, *parents: argparse.ArgumentParser, under: Any = commands
    ) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = under.add_parser(
            name, help=text, description=text, parents=[common, *parents]
        )
        parser.set_defaults(run=run)
        return parser

    p = command("generate", _generate, "Continue a text.", as_json, threads, memory)
    p.add_argument(
        "prompt", metavar="PROMPT", help="the text to continue; may be empty when --session goes on"
    )
    p.add_argument("--model", metavar="DIR", help="a checkpoint folder; default: the small model that ships")
    p.add_argument(
        "--max-tokens",
        type=int,
        default=200,
        metavar="N",
        help="at most this many tokens (default: %(default)s)",
    )
    p.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="0 takes the most probable token; default: the checkpoint's",
    )
    p.add_argument("--top-k", type=int, metavar="K", help="keep the K most probable tokens")
    p.add_argument("--top-p", type=float, metavar="P", help="keep the most probable tokens up to this sum")
    p.add_argument(
        "--min-p", type=float, metavar="P", help="keep tokens at least this fraction as probable as the best"
    )
    p.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text")
    p.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; may be given several times",
    )
    p.add_argument(
        "--logprobs",
        type=int,
        default=0,
        metavar="K",
        help="with --json, also the K most probable tokens at each place",
    )
    p.add_argument(
        "--latent",
        choices=("fp32", "bf16"),
        default="fp32",
        help="how the latent cache is stored (default: %(default)s)",
    )
    p.add_argument(
        "--session", metavar="FILE", help="go on from this snapshot if it exists, and save to it at the end"
    )

    p = command("check", _check, "Audit a checkpoint folder without running it.", as_json)
    p.add_argument("folder", metavar="DIR")
    p.add_argument(
        "--deep",
        action="store_true",
        help="read every byte: look for values that are not finite, and hash everything",
    )

    p = command("info", _info, "Say what a model is and how it would run here.", as_json, threads, memory)
    p.add_argument(
        "folder", metavar="DIR", nargs="?", help="a checkpoint folder; default: the small model that ships"
    )

    p = command(
        "plan", _plan, "Predict how a model runs within a memory budget, from its headers.", as_json, threads
    )
    p.add_argument("folder", metavar="DIR")
    p.add_argument(
        "--memory", metavar="SIZE", required=True, help="what the process may have in memory: 8GiB, auto"
    )
    p.add_argument(
        "--measure",
        action="store_true",
        help="measure disk, memory and cores for some two seconds, instead of assuming",
    )
    for name, what in (
        ("disk", "from the disk"),
        ("memory", "from memory"),
        ("core", "of weights by the cores"),
    ):
        p.add_argument(
            f"--{name}-rate", type=_rate, metavar="SIZE", help=f"bytes a second {what}, such as 3GB"
        )

    command("doctor", _doctor, "Say what can be used here, and what not and why.", as_json)

    from k3session.presets import PRESETS

    p = command("synth", _synth, "Write a checkpoint with random weights.")
    p.add_argument("folder", metavar="DIR")
    p.add_argument("--preset", required=True, choices=sorted(PRESETS), help="the shape of the model")
    p.add_argument(
        "--seed",
        type=int,
        default=1234,
        metavar="N",
        help="the same seed gives the same bytes (default: %(default)s)",
    )
    p.add_argument(
        "--experts",
        choices=("mxfp4", "bf16"),
        default="mxfp4",
        help="how routed experts are stored (default: %(default)s)",
    )
    p.add_argument(
        "--trunk",
        choices=("bf16", "f32"),
        default="bf16",
        help="how the other matrices are stored (default: %(default)s)",
    )

    p = command("bench", _bench, "Measure prefill and decode against the read bandwidth.", as_json, threads)
    p.add_argument(
        "folder", metavar="DIR", nargs="?", help="a checkpoint folder; default: the small model that ships"
    )
    p.add_argument(
        "--prompt-tokens",
        type=int,
        default=128,
        metavar="N",
        help="tokens in a prefill (default: %(default)s)",
    )
    p.add_argument(
        "--steps", type=int, default=32, metavar="N", help="tokens decoded after it (default: %(default)s)"
    )
    p.add_argument("--repeats", type=int, default=7, metavar="N", help="how often (default: %(default)s)")

    p = command(
        "compare",
        _compare,
        "Run the same tokens through two models, devices or instruction sets, and say where they first differ.",
        as_json,
        threads,
    )
    p.add_argument(
        "side",
        metavar="A",
        help="a folder, FOLDER@OPTION,... (cpu, cuda, isa=base, ...), or a recorded trace",
    )
    p.add_argument("other", metavar="B", nargs="?", help="the other side")
    p.add_argument("--ids", type=_ids, metavar="IDS", help="token ids, such as 1,2,3; a trace brings its own")
    p.add_argument("--ids-file", metavar="FILE", help="a file of token ids instead")
    p.add_argument(
        "--bound",
        type=float,
        default=1e-4,
        metavar="X",
        help="what may differ, relative to the largest value in a layer (default: %(default)s)",
    )
    p.add_argument(
        "--record", metavar="FILE", help="write a trace of A for a comparison elsewhere, instead of comparing"
    )

    p = command("snapshot", lambda args: 2, "Look at snapshot files; needs no weights.")
    under = p.add_subparsers(metavar="ACTION", required=True)
    q = command("inspect", _snapshot_inspect, "Say what a snapshot holds.", as_json, under=under)
    q.add_argument("file", metavar="FILE")
    q = command("verify", _snapshot_verify, "Compare every tensor with its digest.", as_json, under=under)
    q.add_argument("file", metavar="FILE")
    q = command("diff", _snapshot_diff, "List what differs between two snapshots.", as_json, under=under)
    q.add_argument("file", metavar="FILE")
    q.add_argument("other", metavar="OTHER")
    q = command("merge", _snapshot_merge, "Make one file of a snapshot in parts.", as_json, under=under)
    q.add_argument("file", metavar="FILE", help="the file that names the parts")
    q.add_argument("part", metavar="PART", nargs="*", help="parts that do not lie beside it")
    q.add_argument("-o", "--out", metavar="FILE", required=True, help="the file to write")
    return top


if __name__ == "__main__":
    sys.exit(main())
