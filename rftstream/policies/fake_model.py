"""The model behind the fake policy and the fake backend: one number, its skill, which policy gradient raises.

The probability of a right answer to a sum such as `3+4=` is sigmoid(skill - difficulty). The prompt determines the
difficulty. So rewards rise if and only if rollouts, rewards and advantages pass correctly through the whole flow.
Beside the skill there are filler elements that depend on everything that was trained, in order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import numpy as np

from rftstream.contracts.beside import Beside
from rftstream.contracts.ids import derive_seed
from rftstream.errors import WeightsError
from rftstream.weights.snapshot import DTYPES, RawTensor

SKILL, FILLER = "fake.skill", "fake.filler"
_SUM = re.compile(r"(-?\d+)\s*([-+*])\s*(-?\d+)")


def solve(prompt: str) -> str | None:
    """Return the answer to the last sum, difference or product in the text; None if there is none."""
    found = _SUM.findall(prompt)
    if not found:
        return None
    left, sign, right = int(found[-1][0]), found[-1][1], int(found[-1][2])
    return str({"+": left + right, "-": left - right, "*": left * right}[sign])


def right_probability(skill: float, prompt: str) -> float:
    """Return the probability of a right answer to this prompt: sigmoid(skill - difficulty)."""
    difficulty = uniform(0, "difficulty", prompt) - 0.5
    return 1 / (1 + math.exp(min(difficulty - skill, 700.0)))


def uniform(seed: int, *parts: object) -> float:
    """Return a number in (0, 1) that is determined by seed and parts."""
    return (derive_seed(seed, *parts) + 0.5) / 2**63


def uniforms(seed: int, start: int, stop: int) -> np.ndarray:
    """Return a number in (0, 1) for each place from `start` up to `stop`, float32, determined by seed and place: the
    finaliser of MurmurHash3, so that a place costs a nanosecond."""
    state = np.arange(start + 1, stop + 1, dtype=np.uint32)
    state *= np.uint32(0x9E3779B9)
    state += np.uint32((seed ^ seed >> 32) & 0xFFFFFFFF)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        state ^= state >> np.uint32(shift)
        state *= np.uint32(factor)
    state >>= np.uint32(9)
    numbers = state.astype(np.float32)
    numbers += np.float32(0.5)
    numbers *= np.float32(2.0**-23)
    return numbers


def values_beside(token_ids_T: np.ndarray, most: int) -> Beside:
    """Return 1 to `most` values beside each token but the first, which this token and the one before it determine."""
    before_T, after_T = token_ids_T[:-1].astype(np.int64), token_ids_T[1:].astype(np.int64)
    counts_T = np.concatenate([np.zeros(min(len(token_ids_T), 1), np.int64), 1 + after_T % most])
    values = np.repeat(31 * before_T + 7 * after_T, counts_T[1:]) + np.arange(counts_T.sum())
    begins_V = np.repeat(np.cumsum(counts_T) - counts_T, counts_T)
    return Beside(counts_T.astype(np.int32), ((values - begins_V) % 251).astype(np.uint8))


def serve(values: np.ndarray, dtype: str) -> RawTensor:
    """Return float32 values in a served dtype. bfloat16 is rounded to nearest, ties to even, as torch does."""
    if dtype == "bfloat16":
        bits = values.astype("<f4").view("<u4")
        data = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
    else:
        data = values.astype({"float16": "<f2", "float32": "<f4"}[dtype]).tobytes()
    return RawTensor(DTYPES[dtype], tuple(values.shape), data)


def read(tensor: RawTensor) -> np.ndarray:
    """Return the float32 values of a tensor that `serve` made."""
    data = memoryview(tensor.data)
    if tensor.dtype == "BF16":
        bits: np.ndarray = np.frombuffer(data, dtype="<u2").astype("<u4") << 16
        return bits.view("<f4").reshape(tensor.shape)
    return np.frombuffer(data, dtype={"F16": "<f2", "F32": "<f4"}[tensor.dtype]).astype(np.float32)


def read_skill(tensors: Mapping[str, RawTensor], *, where: str) -> float:
    """Return the skill in a version's tensors. WeightsError if the fake backend did not make them."""
    fillers = {name for name in tensors if name == FILLER or name.startswith(f"{FILLER}.")}
    if not fillers or tensors.keys() - fillers != {SKILL} or tensors[SKILL].shape != (1,):
        raise WeightsError(f"{where}: got {', '.join(sorted(tensors)[:3])}, expected {FILLER}, {SKILL}; another model?")
    return float(read(tensors[SKILL])[0])
