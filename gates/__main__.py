"""``python -m gates``: runs gates, prints a table and writes the receipt.

Exit codes: 0 all green; 1 a gate is red; 2 the command cannot be carried out here; 3 ``--ensure`` refuses.
"""

from __future__ import annotations

import argparse
import sys

import torch
from rich.console import Console
from rich.table import Table

from gates.gate import AXES, DTYPES, IDS, MOST_RANKS, SHARDINGS, Case, Degrees, Result, get, required, sweep
from gates.receipt import RECEIPT, Receipt, device_name
from gates.run import run

RED, IMPOSSIBLE, REFUSED = 1, 2, 3
DEGREES = {"cpu": [2, 4], "cuda": [2]}
AXIS_NAMES = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert", "dp": "data"}


def parser() -> argparse.ArgumentParser:
    cli = argparse.ArgumentParser("python -m gates", description=__doc__.split("\n")[0])
    cli.add_argument("ids", nargs="*", metavar="ID", help=f"gates to run, of {', '.join(IDS)} (default: all)")
    cli.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    cli.add_argument("--nproc", type=int, metavar="N", help="processes, which is the degree of each gate's axis")
    cli.add_argument("--dtype", choices=DTYPES, help="only this dtype; of a job: its weights' (default: fp32)")
    job = cli.add_argument_group("what a job needs: its gates, and with --ensure only those that were never run")
    for axis, name in AXIS_NAMES.items():
        job.add_argument(f"--{axis}", type=int, metavar="N", help=f"the job's {name}-parallel degree")
    job.add_argument("--sharding", choices=SHARDINGS, default="none", help="over its data-parallel ranks")
    job.add_argument("--sp", action="store_true", help="the job uses sequence parallelism")
    job.add_argument("--ensure", action="store_true", help="exit 3 with the reason where a gate is red or stale")
    return cli


def cases_for(args: argparse.Namespace) -> list[Case]:
    """The cases that the command line asks for.

    Raises:
        ValueError: an unknown gate, a degree out of range, or options that exclude each other.
    """
    unknown = [name for name in args.ids if name.upper() not in IDS]
    if unknown:
        raise ValueError(f"no gate is called {', '.join(unknown)}; there are {', '.join(IDS)}")
    job = job_degrees(args)
    if job is None and (args.ensure or args.sp or args.sharding != "none"):
        raise ValueError("--ensure, --sp and --sharding are about a job: give its degrees too, such as --tp or --dp")
    if job is not None:
        if args.ids or args.nproc:
            raise ValueError("a job's degrees choose the gates that it needs: give no ID and no --nproc with them")
        fault = job.fault or ("--sp needs --tp above 1" if args.sp and job.tp == 1 else "")
        if fault:
            raise ValueError(f"{job_options(args)} is no parallel layout: {fault}")
        if job.dp == 1 and args.sharding != "none":
            raise ValueError(f"--sharding {args.sharding} has nothing to shard over: give --dp too")
        return required(job, args.sp, args.dtype or "fp32", args.device, args.sharding)
    if args.nproc is not None and not 1 <= args.nproc <= MOST_RANKS:
        raise ValueError(f"--nproc {args.nproc} is not between 1 and {MOST_RANKS}")
    ids = [name.upper() for name in args.ids] or list(IDS)
    processes = [args.nproc] if args.nproc else degrees(args.device)
    cases = sweep(ids, processes, args.device)
    cases = [case for case in cases if args.dtype in (None, case.dtype)]
    if not cases:
        raise ValueError(f"{', '.join(ids)} has nothing for {processes[-1]} processes in {args.dtype or 'any dtype'}")
    return cases


def degrees(device: str) -> list[int]:
    """Processes that a bare command runs the gates with; on one GPU one."""
    if device == "cuda" and torch.cuda.device_count() == 1:
        return [1]
    return DEGREES[device]


def job_degrees(args: argparse.Namespace) -> Degrees | None:
    """The job's parallel degrees; None where none is given."""
    given = {axis: value for axis in AXES if (value := getattr(args, axis)) is not None}
    return Degrees(**given) if given else None


def job_options(args: argparse.Namespace) -> str:
    """The job's own options, as they were given."""
    options = [f"--{axis} {value}" for axis in AXES if (value := getattr(args, axis)) is not None]
    options += [f"--sharding {args.sharding}"] * (args.sharding != "none") + ["--sp"] * args.sp
    return " ".join(options)


def check_devices(cases: list[Case]) -> None:
    """Raises ValueError where a case needs more GPUs than there are."""
    if any(case.device == "cuda" for case in cases):
        needed, there = max(case.degrees.world for case in cases), torch.cuda.device_count()
        if needed > there:
            raise ValueError(f"{needed} ranks need as many GPUs, and this machine has {there}: see --nproc")


def run_all(cases: list[Case], receipt: Receipt, console: Console) -> list[Result]:
    """Run the cases one after the other, each written to the receipt as it ends, and print the table."""
    title = f"gates on {device_name(cases[0].device)}; gaps of norms, weights and states are relative"
    table = Table(title=title, title_justify="left")
    for column in ("gate", "number", "bound", "of", ""):
        table.add_column(column, justify="right" if column in ("number", "bound") else "left", no_wrap=column != "of")
    for gate_id in sorted({case.gate for case in cases}, key=IDS.index):
        console.print(f"{gate_id}: {get(gate_id).compares}", highlight=False, soft_wrap=True)
    results = []
    for result in run(cases):
        receipt.add(result)
        results.append(result)
        if result.failure:
            table.add_row(result.case.label, "-", "-", result.failure, "[red]FAIL[/]")
        for i, reading in enumerate(result.readings):
            verdict = "[green]pass[/]" if reading.passed else "[red]FAIL[/]"
            number, bound = f"{reading.value:.2e}", f"{reading.bound:.2e}"
            table.add_row("" if i else result.case.label, number, bound, reading.what, verdict)
        table.add_section()
    console.print(table)
    return results


def ensure(cases: list[Case], receipt: Receipt, console: Console, job: str) -> int:
    """Run the cases that the receipt does not cover; refuse where one is red or stale."""
    objections = {case.key: receipt.objection(case) for case in cases if receipt.covers(case)}
    objections = {key: why for key, why in objections.items() if why}
    if not objections:
        missing = [case for case in cases if not receipt.covers(case)]
        results = run_all(missing, receipt, console) if missing else []
        objections = {r.case.key: receipt.objection(r.case) for r in results if not r.passed}
    for key, why in objections.items():
        console.print(f"gate {key} is {why}", style="red", highlight=False, soft_wrap=True)
    if objections:
        command = f"python -m gates --device {cases[-1].device} {job}"
        console.print(f"not started; `{command}` runs these gates again", highlight=False, soft_wrap=True)
        return REFUSED
    console.print(f"gates: {len(cases)} green in {RECEIPT.name}", highlight=False)
    return 0


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    console = Console()
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        cases = cases_for(args)
        check_devices(cases)
        receipt = Receipt(RECEIPT)
    except ValueError as error:
        print(f"gates: {error}", file=sys.stderr)
        return REFUSED if args.ensure else IMPOSSIBLE
    if args.ensure:
        return ensure(cases, receipt, console, f"{job_options(args)} --dtype {args.dtype or 'fp32'}")
    results = run_all(cases, receipt, console)
    left_out = max(DEGREES[args.device]) if args.nproc is None and job_degrees(args) is None else 0
    if left_out > max(case.degrees.world for case in cases):
        console.print(f"NOT RUN: what needs {left_out} ranks, for want of as many GPUs", highlight=False)
    console.print(f"receipt: {RECEIPT}", highlight=False, soft_wrap=True)
    return 0 if all(result.passed for result in results) else RED


if __name__ == "__main__":
    sys.exit(main())
