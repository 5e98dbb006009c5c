"""What a gate is: a comparison measured by every rank of a case, with a bound for each number."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import asdict, dataclass

MOST_RANKS = 8
DTYPES = ("fp32", "bf16")
IDS = ("TP", "SP1", "MG", "T0", "T1", "T2", "F1", "F2", "F3", "MW", "SR")
#: Where a data-parallel job keeps weights and states: whole everywhere, states sharded, all sharded.
SHARDINGS = ("none", "states", "full")


@dataclass(frozen=True)
class Case:
    """One run of one gate.

    Attributes:
        gate: the gate's ID.
        device: "cpu" (gloo) or "cuda" (NCCL, one GPU a rank).
        dtype: "fp32" or "bf16", of the weights and activations.
        tp: tensor-parallel degree.
        sp: sequence parallelism.
        dp: data-parallel degree.
    """

    gate: str
    device: str
    dtype: str
    tp: int
    sp: bool = False
    dp: int = 1

    @property
    def world(self) -> int:
        """The number of processes."""
        return self.tp * self.dp

    @property
    def label(self) -> str:
        degree = f"tp{self.tp}" if self.dp == 1 else f"dp{self.dp}"
        return f"{self.gate} {degree}{' sp' if self.sp else ''} {self.dtype}"

    @property
    def key(self) -> str:
        return f"{self.label} {self.device}"

    def to_dict(self) -> dict:
        return asdict(self)


@dataclass(frozen=True)
class Reading:
    """A measured number and the largest value that it may have. NaN fails."""

    what: str
    value: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.value <= self.bound


@dataclass(frozen=True)
class Result:
    """What running a case gave: its readings, or the reason why there are none."""

    case: Case
    readings: tuple[Reading, ...]
    seconds: float
    device_name: str
    failure: str = ""

    @property
    def passed(self) -> bool:
        return not self.failure and bool(self.readings) and all(reading.passed for reading in self.readings)


@dataclass(frozen=True)
class Gate:
    """A gate: one file that says what it compares and measures it.

    Attributes:
        id: its name on the command line and in the receipt.
        compares: one sentence for the table.
        least: the smallest degree that it is about.
        sp: with sequence parallelism, without, or each.
        dtypes: the dtypes that it has bounds for.
        measure: runs in every rank of a case, with Megatron's parallel state set up, and returns the readings.
            Ranks may differ in their values; the largest counts.
        axis: which degree of a case it is about: "tp" or "dp".
        shardings: of data-parallel jobs, those that need it; empty: it is not about them.
    """

    id: str
    compares: str
    least: int
    sp: tuple[bool, ...]
    dtypes: tuple[str, ...]
    measure: Callable[[Case], list[Reading]]
    axis: str = "tp"
    shardings: tuple[str, ...] = ()

    def cases_for(self, tp: int, sp: bool, dtype: str, device: str, dp: int = 1, sharding: str = "none") -> list[Case]:
        """The cases that a job of these degrees needs; none where this gate says nothing about the job.

        A bf16 job needs the fp32 case too: bf16 bounds are too wide to see, say, a wrong decay.
        """
        if self.axis == "dp" and sharding not in self.shardings:
            return []
        degree = {"tp": tp, "dp": dp}[self.axis]
        if degree < self.least or (self.sp == (True,) and not sp):
            return []
        dtypes = [precision for precision in self.dtypes if precision in ("fp32", dtype)]
        return [self.case(device, precision, degree, sp and True in self.sp) for precision in dtypes]

    def case(self, device: str, dtype: str, degree: int, sp: bool = False) -> Case:
        """The case of this degree of its axis."""
        return Case(self.id, device, dtype, **{"tp": 1, self.axis: degree}, sp=sp)


def get(gate_id: str) -> Gate:
    """The gate of this ID, from its own file: gates/<id in lower case>.py, which defines ``GATE``."""
    return importlib.import_module(f"gates.{gate_id.lower()}").GATE


def reduced(degree: int) -> int:
    """A parallel degree as the gates run it: at most MOST_RANKS, and above 1 where the job's is above 1."""
    return min(degree, MOST_RANKS)


def required(tp: int, sp: bool, dtype: str, device: str, dp: int = 1, sharding: str = "none") -> list[Case]:
    """The cases that must be green before a job of these degrees may start."""
    job = reduced(tp), sp, dtype, device, reduced(dp), sharding
    return [case for gate_id in IDS for case in get(gate_id).cases_for(*job)]


def sweep(gate_ids: list[str], degrees: list[int], device: str) -> list[Case]:
    """Every case of these gates at these degrees: what ``python -m gates`` runs."""
    return [
        gate.case(device, dtype, degree, sp)
        for degree in degrees
        for gate in map(get, gate_ids)
        for sp in gate.sp
        for dtype in gate.dtypes
        if degree >= gate.least and not (sp and degree == 1)
    ]
