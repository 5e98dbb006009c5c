"""What a gate is: a comparison measured by every rank of a case, with a bound for each number."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields

MOST_RANKS = 8
DTYPES = ("fp32", "bf16")
IDS = ("TP", "SP1", "MG", "T0", "T1", "T2", "F1", "F2", "F3", "MW", "SR", "PP1", "CP1", "EP1")
#: Where a data-parallel job keeps weights and states: whole everywhere, states sharded, all sharded.
SHARDINGS = ("none", "states", "full")


@dataclass(frozen=True)
class Degrees:
    """Parallel degrees by Megatron's names: tensor, pipeline, context, expert and data parallel; 1: not at all.

    As in Megatron the experts lie over the data- and context-parallel ranks: ``ep`` divides ``dp * cp``, and takes no
    ranks of its own.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1

    @property
    def world(self) -> int:
        """The number of processes."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def fault(self) -> str:
        """Why these are no layout; empty where they are one."""
        below = [f"{name} {value}" for name, value in asdict(self).items() if value < 1]
        if below:
            return f"{', '.join(below)}: below 1"
        return f"ep {self.ep} does not divide dp {self.dp} x cp {self.cp}" if self.dp * self.cp % self.ep else ""

    @property
    def label(self) -> str:
        """Those above 1; ``tp1`` where there are none."""
        above = [f"{name}{value}" for name, value in asdict(self).items() if value > 1]
        return " ".join(above) or "tp1"

    def reduced(self) -> Degrees:
        """Each as the gates run it."""
        return Degrees(**{name: reduced(value) for name, value in asdict(self).items()})

    @classmethod
    def along(cls, axis: str, degree: int) -> Degrees:
        """Those of a gate about ``axis`` alone; expert-parallel ranks are data-parallel ones."""
        return cls(**{axis: degree}, **({"dp": degree} if axis == "ep" else {}))


AXES = tuple(field.name for field in fields(Degrees))


@dataclass(frozen=True)
class Case:
    """One run of one gate.

    Attributes:
        gate: the gate's ID.
        device: "cpu" (gloo) or "cuda" (NCCL, one GPU a rank).
        dtype: "fp32" or "bf16", of the weights and activations.
        degrees: the parallel degrees.
        sp: sequence parallelism.
    """

    gate: str
    device: str
    dtype: str
    degrees: Degrees
    sp: bool = False

    @property
    def label(self) -> str:
        return f"{self.gate} {self.degrees.label}{' sp' if self.sp else ''} {self.dtype}"

    @property
    def key(self) -> str:
        return f"{self.label} {self.device}"

    def to_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def from_dict(cls, content: dict) -> Case:
        return cls(**{**content, "degrees": Degrees(**content["degrees"])})


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
        axis: which degree of a case it is about, one of ``AXES``.
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

    def cases_for(self, job: Degrees, sp: bool, dtype: str, device: str, sharding: str = "none") -> list[Case]:
        """The cases that a job of these degrees needs; none where this gate says nothing about the job.

        A bf16 job needs the fp32 case too: bf16 bounds are too wide to see, say, a wrong decay.
        """
        if self.axis == "dp" and sharding not in self.shardings:
            return []
        degree = getattr(job, self.axis)
        if degree < self.least or (self.sp == (True,) and not sp):
            return []
        dtypes = [precision for precision in self.dtypes if precision in ("fp32", dtype)]
        return [self.case(device, precision, degree, sp and True in self.sp) for precision in dtypes]

    def case(self, device: str, dtype: str, degree: int, sp: bool = False) -> Case:
        """The case of this degree of its axis."""
        return Case(self.id, device, dtype, Degrees.along(self.axis, degree), sp)


def get(gate_id: str) -> Gate:
    """The gate of this ID, from its own file: gates/<id in lower case>.py, which defines ``GATE``."""
    return importlib.import_module(f"gates.{gate_id.lower()}").GATE


def reduced(degree: int) -> int:
    """A parallel degree as the gates run it: at most MOST_RANKS, and above 1 where the job's is above 1."""
    return min(degree, MOST_RANKS)


def required(job: Degrees, sp: bool, dtype: str, device: str, sharding: str = "none") -> list[Case]:
    """The cases that must be green before a job of these degrees may start."""
    return [case for gate_id in IDS for case in get(gate_id).cases_for(job.reduced(), sp, dtype, device, sharding)]


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
