"""Everybody who is measured, the baseline first."""

from weights_bench.baselines import IndexValue, XorZstd
from weights_bench.contender import Contender
from weights_bench.ours import CODECS

CONTENDERS: tuple[Contender, ...] = (XorZstd(), XorZstd("blake3"), IndexValue(), *CODECS)
