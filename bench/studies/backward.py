# SPDX-License-Identifier: Apache-2.0
"""Where a backward's time goes, beside its products alone.

    python -m bench.studies.backward --out FILE CONFIG ...

Each CONFIG is a layer's TOML file. "backward" makes all gradients. "call" leaves those of w1 and
w2 out, so what it takes less is the launch that makes these. Each product of a backward also
stands alone, by torch._grouped_mm over rows that lie sorted. Then a world with a trace makes the
same call, with h kept: what its parts took, by kind. One rank. It times and counts; whether values
are right is the tests' affair.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import moeos
from bench.gpu import compile_ahead
from bench.gpu.in_turn import InTurn
from bench.studies import options
from bench.studies.training import contestants, study
from bench.studies.training.contestants import SAVES
from moeos.cli.shared import output
from moeos.cli.timeline.call import STAGES, CallTrace, kind_name, phases, work_time

TRACE_EVENTS = 2048
"""Of each actor, which the parts of the largest call have to fit in."""
_DEADLINE = 300.0  # seconds; the compiler's time counts
_TRACED = 3  # calls, of which the last one's trace counts
_KINDS = (
    *study.KINDS,
    {"saves": True, "trace_events": TRACE_EVENTS},
    {"saves": True, "trace_events": TRACE_EVENTS, "gradients": True},
)


def account(call: CallTrace) -> dict[str, Any]:
    """What the parts of each kind took, in ns: the mean of each phase, and their share of all
    processors' time at work and in all phases.
    """
    whole = call.length * call.processors
    found: dict[str, Any] = {"length": call.length, "processors": call.processors, "kinds": {}}
    for kind in STAGES:
        parts = call.parts[call.parts["kind"] == kind]
        if len(parts) == 0:
            continue
        means = {
            name: float((after - before)[before >= 0].mean())
            for name, before, after in phases(parts)
            if bool((before >= 0).any())
        }
        found["kinds"][kind_name(kind)] = {
            "parts": len(parts),
            "first_claimed": int(parts["claimed"].min()),
            "last_visible": int(parts["visible"].max()),
            "work_share": work_time(parts) / whole,
            "phases": means,
        }
    found["work_share"] = work_time(call.parts) / whole
    return found


def alone(inputs: contestants.Inputs) -> dict[str, Callable[[], Tensor]]:
    """The products of a backward by torch._grouped_mm, of rows that lie sorted by expert."""
    experts, hidden, intermediate = inputs.w2.shape
    pairs = inputs.ids.numel()
    ends = torch.bincount(inputs.ids.flatten(), minlength=experts).cumsum(0).to(torch.int32)

    def rows(columns: int) -> Tensor:
        return torch.randn(pairs, columns, device="cuda").to(inputs.x.dtype)

    x, d_out, inner, d_hidden = map(rows, (hidden, hidden, intermediate, inputs.w1.shape[1]))
    multiply = torch._grouped_mm
    return {
        "dA": lambda: multiply(d_out, inputs.w2, offs=ends),
        "h": lambda: multiply(x, inputs.w1.transpose(1, 2), offs=ends),
        "dX": lambda: multiply(d_hidden, inputs.w1, offs=ends),
        "dW1": lambda: multiply(d_hidden.t(), x, offs=ends),
        "dW2": lambda: multiply(d_out.t(), inner, offs=ends),
    }


def _times(cfg: moeos.MoEConfig, tokens: int) -> dict[str, Any]:
    with moeos.init("cuda", deadline=_DEADLINE) as world:
        clock = InTurn(world)
        inputs = contestants.draw(cfg, tokens, "cuda", 0)
        work: dict[str, Callable[[], Any]] = dict(alone(inputs))
        frozen = dataclasses.replace(inputs, w1=inputs.w1.detach(), w2=inputs.w2.detach())
        for save in SAVES:
            maker = contestants.moeos_forward(cfg, world, save)
            for name, given, wanted in (
                ("backward", inputs, inputs.wanted),
                ("call", frozen, (inputs.x, inputs.weights)),
            ):
                with torch.enable_grad():
                    y = maker(given)()
                work[f"{name}, {save}"] = functools.partial(
                    torch.autograd.grad, y, wanted, inputs.d_out, retain_graph=True
                )
            work[f"forward, {save}"] = torch.enable_grad()(maker(inputs))
        return options.timed(clock, tokens, work)


def _trace(cfg: moeos.MoEConfig, tokens: int) -> dict[str, Any]:
    with moeos.init("cuda", deadline=_DEADLINE, trace_events=TRACE_EVENTS) as world:
        inputs = contestants.draw(cfg, tokens, "cuda", 0)
        experts = moeos.Experts(dataclasses.replace(cfg, save="preactivation"), world)
        with torch.enable_grad():
            y = experts(inputs.x, inputs.ids, inputs.weights, inputs.w1, inputs.w2)
        for _ in range(_TRACED):
            contestants.gradients(y, inputs)
        experts.check()
        return account(CallTrace.of([experts.trace()]))


def measure(cfg: moeos.MoEConfig, tokens: int) -> dict[str, Any]:
    """One layer with so many tokens."""
    times = _times(cfg, tokens)
    torch.cuda.empty_cache()
    return {
        "tokens": tokens,
        "flops": 2 * study.forward_flops(cfg, tokens),
        "seconds": times,
        "trace": _trace(cfg, tokens),
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("configs", nargs="+", type=Path, help="a layer's TOML file")
    parser.add_argument("--out", required=True, type=Path, help="where the JSON document goes")
    chosen = parser.parse_args()
    configs = {path.stem: moeos.MoEConfig.from_toml(path) for path in chosen.configs}
    of_gpu = (1, torch.cuda.get_device_properties().multi_processor_count)
    with compile_ahead.started(list(configs.items()), *of_gpu, kinds=_KINDS) as compilation:
        print(compilation.wait(lambda: None), flush=True)
    layers: dict[str, Any] = {}
    for name, cfg in configs.items():
        with torch.no_grad():
            results = [measure(cfg, cfg.max_tokens)]
        layers[name] = {"config": json.loads(cfg.digest()), "results": results}
        document = options.document("backward", 1, layers)
        chosen.out.write_text(output.json_text(document), encoding="utf-8")
        print(name, _shown(results[0]), sep="\n", flush=True)


def _shown(result: dict[str, Any]) -> str:
    lines = [f"{name}: {time['median'] * 1e3:.3f} ms" for name, time in result["seconds"].items()]
    trace = result["trace"]
    lines.append(f"traced: {trace['length'] / 1e6:.3f} ms, at work {trace['work_share']:.3f}")
    lines += [f"  {kind}: {told}" for kind, told in trace["kinds"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
