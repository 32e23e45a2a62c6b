"""Traces of requests replayed against the real manager, without a model: hit rates, losses and their causes."""

from hybridkv.sim.generators import GENERATORS, generated
from hybridkv.sim.pages import PagesCache
from hybridkv.sim.replay import Service, replay
from hybridkv.sim.requests import Request, Summary, Trace, summarize
from hybridkv.sim.results import Replay
from hybridkv.sim.runs import POLICIES, Options, pool_size, simulate, simulate_unbounded
from hybridkv.sim.traces import read_mooncake, read_sessions, read_trace

__all__ = [
    "GENERATORS",
    "POLICIES",
    "Options",
    "PagesCache",
    "Replay",
    "Request",
    "Service",
    "Summary",
    "Trace",
    "generated",
    "pool_size",
    "read_mooncake",
    "read_sessions",
    "read_trace",
    "replay",
    "simulate",
    "simulate_unbounded",
    "summarize",
]
